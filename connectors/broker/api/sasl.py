"""SaslHandshake and SaslAuthenticate."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from kafka.protocol.sasl import SaslAuthenticateResponse, SaslHandshakeResponse

from connectors.broker.errors import ErrorCode
from connectors.broker.notices import notice
from connectors.broker.protocol import Call, Reply
from connectors.broker.security import MECHANISMS, NotAuthenticated, Session

FAILED_S: Final = 0.5
"""Before the answer: clients that know no better try again at once."""


async def handshake(call: Call, request: Any) -> Reply:
    """Which mechanism the tokens that follow are of."""
    session, code = call.session, ErrorCode.NONE
    if session.authenticated or session.expects_token:
        code = ErrorCode.ILLEGAL_SASL_STATE
    elif request.mechanism not in MECHANISMS:
        code = ErrorCode.UNSUPPORTED_SASL_MECHANISM
    else:
        session.choose(request.mechanism)
    mechanisms = [] if session.authenticated else list(MECHANISMS)
    return Reply(SaslHandshakeResponse(error_code=code, mechanisms=mechanisms))


async def authenticate(call: Call, request: Any) -> Reply:
    """The client learns that it failed, not of what; the broker's log has both."""
    session = call.session
    if not session.expects_token:
        text = "SaslHandshake comes first, and once"
        return _answered(ErrorCode.ILLEGAL_SASL_STATE, text)
    try:
        return _answered(ErrorCode.NONE, None, session.answer(bytes(request.auth_bytes)))
    except NotAuthenticated as error:
        session.failed = True
        _say(session, error)
        await asyncio.sleep(FAILED_S)
        text = f"Authentication failed with SASL mechanism {session.mechanism}"
        return _answered(ErrorCode.SASL_AUTHENTICATION_FAILED, text)


def _answered(code: ErrorCode, text: str | None, token: bytes = b"") -> Reply:
    return Reply(
        SaslAuthenticateResponse(
            error_code=code, error_message=text, auth_bytes=token, session_lifetime_ms=0
        )
    )


def _say(session: Session, error: NotAuthenticated) -> None:
    why = " ".join(str(error).split())[:200]
    user = session.user[:100]
    notice(f"client {session.peer}: user {user!r} not authenticated ({session.mechanism}): {why}")
