"""One attempt to reach a broker with a client's settings, and what is wrong if it fails.

kafka-python's clients try again whatever the failure, so a wrong password looks to them like a
broker that is away. This goes the same way once, over the same connection code: TCP, TLS,
ApiVersions, SASL, Metadata. A broker that hangs up says nothing of its reasons; another attempt,
of another kind, then tells whether it speaks TLS or wants SASL, so that a broker which is just
being restarted is never taken for one that refuses.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kafka import errors as kafka_errors
from kafka.net.manager import KafkaConnectionManager
from kafka.net.selector import NetworkSelector

NO_MECHANISM: Final = "NONE"
"""A SASL mechanism that no broker has: one that wants SASL says so, others say that they do not."""

_HUNG_UP: Final = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)


class Away(Exception):
    """No broker answers; it may be one that is being restarted."""


class Refuses(Exception):
    """A broker answers, and will not with these settings. The message names the setting."""


def knock(settings: Mapping[str, Any], answer_s: float) -> None:
    """Returns when a broker of `bootstrap_servers` answers as it would answer a client, each within
    `answer_s`. Refuses when none does and one of them refuses, else Away."""
    failures: list[Away | Refuses] = []
    for server in settings["bootstrap_servers"]:
        try:
            return _knock_at({**settings, "bootstrap_servers": [server]}, answer_s)
        except (Away, Refuses) as failure:
            failures.append(failure)
    raise next((f for f in failures if isinstance(f, Refuses)), failures[0])


def _knock_at(settings: Mapping[str, Any], answer_s: float) -> None:
    tried = _attempt(settings, answer_s)
    if tried.error is None:
        return
    if isinstance(tried.error, kafka_errors.KafkaTimeoutError):
        raise Away(f"{settings['bootstrap_servers'][0]} does not answer within {answer_s:g} s")
    reason = (
        _refusal(tried.error, settings)
        or _other_protocol(tried, settings, answer_s)
        or _of_tls(tried.error, settings)
    )
    if reason is not None:
        raise Refuses(f"kafka.security: {reason}")
    raise Away(_said(tried.error))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """How far an attempt came: `connected` over TCP and TLS, `greeted` by an answer to
    ApiVersions; through when there is no `error`."""

    connected: bool
    greeted: bool
    error: BaseException | None


def _attempt(settings: Mapping[str, Any], answer_s: float) -> _Tried:
    net = NetworkSelector()
    manager: Any = KafkaConnectionManager(net, **settings)
    node = manager.cluster.bootstrap_brokers()[0].node_id
    connection = manager.get_connection(node, timeout_ms=answer_s * 1000)

    async def whole() -> None:
        await connection
        await connection.send_request(manager.cluster.metadata_request())

    async def limited() -> None:
        await manager.wait_for(manager.call_soon(whole), answer_s * 1000)

    error: BaseException | None = None
    try:
        net.run(limited)
    except Exception as failed:  # kafka-python lets through what TLS, SASL and the socket raise
        error = failed
    connected, greeted = connection.parser is not None, connection.broker_version_data is not None
    manager.close()
    net.close()
    return _Tried(connected=connected, greeted=greeted, error=error)


def _refusal(error: BaseException, settings: Mapping[str, Any]) -> str | None:
    """What the error alone says."""
    protocol, mechanism = settings.get("security_protocol"), settings.get("sasl_mechanism")
    if isinstance(error, kafka_errors.SaslAuthenticationFailedError):
        return (
            f"the broker does not accept sasl_username {settings.get('sasl_plain_username')} with "
            f"this password ({mechanism})"
        )
    if isinstance(error, kafka_errors.UnsupportedSaslMechanismError):
        return f"the broker does not offer sasl_mechanism {mechanism}"
    if isinstance(error, kafka_errors.IllegalSaslStateError):
        return f"the broker asks for no SASL, security_protocol is {protocol}"
    for failed in _chain(error):
        if isinstance(failed, ssl.SSLCertVerificationError):
            key = "ssl_check_hostname" if "match" in failed.verify_message else "ssl_cafile"
            return f"{key}: the broker's certificate is not trusted: {failed.verify_message}"
    return None


def _of_tls(error: BaseException, settings: Mapping[str, Any]) -> str | None:
    """What the two sides of a TLS connection, neither of which just hung up, do not agree on."""
    for failed in _chain(error):
        if isinstance(failed, ssl.SSLError) and not isinstance(failed, _HUNG_UP):
            without = "" if settings.get("ssl_certfile") else ", and there is no ssl_certfile"
            return f"no TLS with the broker ({failed.reason}){without}"
    return None


def _other_protocol(tried: _Tried, settings: Mapping[str, Any], answer_s: float) -> str | None:
    """What the broker answers to another kind of client, after it hung up on this one."""
    protocol = settings.get("security_protocol", "PLAINTEXT")
    if not tried.greeted:
        return _other_transport(protocol, settings, answer_s)
    if protocol.startswith("SASL_"):
        return None
    asked = "SASL_SSL" if protocol == "SSL" else "SASL_PLAINTEXT"
    asking = {**settings, "security_protocol": asked, "sasl_mechanism": NO_MECHANISM}
    offered = _attempt(asking, answer_s)
    if isinstance(offered.error, kafka_errors.UnsupportedSaslMechanismError):
        return f"the broker wants SASL, security_protocol is {protocol}: set {asked}"
    return None


def _other_transport(protocol: str, settings: Mapping[str, Any], answer_s: float) -> str | None:
    if protocol.endswith("SSL"):
        if _attempt({**settings, "security_protocol": "PLAINTEXT"}, answer_s).greeted:
            return f"the broker does not speak TLS, security_protocol is {protocol}"
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if _attempt(
        {**settings, "security_protocol": "SSL", "ssl_context": context}, answer_s
    ).connected:
        return f"the broker speaks TLS, security_protocol is {protocol}"
    return None


def _chain(error: BaseException | None) -> list[BaseException]:
    """The error, those it wraps and those it followed."""
    found: list[BaseException] = []
    while error is not None:
        found += [error, *(a for a in error.args if isinstance(a, BaseException))]
        error = error.__cause__ or error.__context__
    return found


def _said(error: BaseException) -> str:
    text = str(error).removeprefix(f"{type(error).__name__}: ")
    return text or type(error).__name__
