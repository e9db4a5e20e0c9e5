"""Feedback as applications send it: one body about one or several sessions, or calls."""

from __future__ import annotations

import hashlib
import time
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from connectors.gateway.asked import decoded
from connectors.gateway.errors import invalid
from connectors.traffic import Feedback

DEFAULT_NAME: Final = "feedback"

Text = Annotated[str, Meta(min_length=1, max_length=512)]
Texts = Annotated[list[Text], Meta(min_length=1, max_length=1000)]


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`session` with `call` or `calls`: these calls of it. true counts as 1."""

    value: bool | float
    id: Text | None = None
    session: Text | None = None
    sessions: Texts | None = None
    call: Text | None = None
    calls: Texts | None = None
    name: Text | None = None
    time: float | None = None
    source: str | None = None
    comment: str | None = None


def read(data: bytes, session: str | None = None) -> list[Feedback]:
    """A fact a session or call; sessions as the client names them. `session`: where the body names
    none. The facts' ids follow from the body's id or, without one, from its content, so that a
    body that is sent again says nothing new. Refused (400)."""
    body: Body = decoded(data, Body)
    sessions = _one_or_many(body.session, body.sessions, "session")
    calls = _one_or_many(body.call, body.calls, "call")
    if not sessions and session is not None:
        sessions = [session]
    if not sessions and not calls:
        raise invalid("feedback is about session, sessions, call or calls", "session")
    if len(sessions) > 1 and calls:
        raise invalid("calls are of one session", "sessions")
    named = body.id or _digest(body, sessions)
    one = sessions[0] if sessions else ""
    about: list[tuple[str, str | None]] = [(one, call) for call in calls]
    try:
        return [
            Feedback(
                id=named if call is None or len(calls) == 1 else f"{named}/{call}",
                name=body.name or DEFAULT_NAME,
                value=float(body.value),
                time=time.time() if body.time is None else body.time,
                session=of,
                call=call,
                source=body.source or "",
                comment=body.comment or "",
            )
            for of, call in about or [(each, None) for each in sessions]
        ]
    except ValueError as error:
        raise invalid(str(error), "value") from error


def _one_or_many(one: str | None, many: list[str] | None, name: str) -> list[str]:
    if one is not None and many is not None:
        raise invalid(f"give {name} or {name}s, not both", name)
    return [one] if one is not None else list(dict.fromkeys(many or ()))


def _digest(body: Body, sessions: list[str]) -> str:
    content = msgspec.json.encode((body, sessions), order="sorted")
    return "fb-" + hashlib.blake2b(content, digest_size=12).hexdigest()
