"""Who may talk to the broker: TLS for every connection, and SASL until one is authenticated.

    SaslHandshake (mechanism) -> SaslAuthenticate (a token each way, PLAIN one, SCRAM two rounds)

Without users every connection is authenticated from the start.
"""

from __future__ import annotations

import functools
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scramp import ScramException, ScramMechanism

from connectors.broker.errors import CertificateUnusable, UsersUnusable
from connectors.broker.users import SCRAM, Users

MECHANISMS: Final = ("PLAIN", *SCRAM)
MAX_UNPROVEN_BYTES: Final = 64 << 10
"""Of a request on a connection that has not proven yet who it is."""


class NotAuthenticated(Exception):
    """The token proves nothing; the message is for the broker's own log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    tls: ssl.SSLContext | None = None
    users: Users | None = None


OPEN: Final = Security()
"""To everybody, in the clear."""


def secured(
    tls_cert: str | Path | None, tls_key: str | Path | None, users: str | Path | None
) -> Security:
    """What the broker serves with. BrokerError of one line when a file is not what it should be."""
    return Security(
        tls=_context(tls_cert, tls_key) if tls_cert is not None else None,
        users=Users(Path(users)) if users is not None else None,
    )


def _context(cert: str | Path, key: str | Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # An encrypted key is an error: nobody is there to type its password.
        context.load_cert_chain(cert, key, password="")
    except OSError as error:  # of ssl, too
        raise CertificateUnusable(
            f"the certificate {cert} with the key {key or cert}: {error.strerror or error}"
        ) from error
    return context


class Session:
    """How far one connection has said who it is."""

    def __init__(self, users: Users | None, peer: str) -> None:
        self.authenticated = users is None
        self.failed = False
        """The connection is of no more use."""
        self.peer = peer
        self.mechanism = ""
        self.user = ""
        """As the client names itself, before that is proven too."""
        self._users = users
        self._step: Callable[[bytes], bytes] | None = None

    @property
    def expects_token(self) -> bool:
        return self._step is not None

    def choose(self, mechanism: str) -> None:
        """One of MECHANISMS, for a connection that is not authenticated."""
        self.mechanism = mechanism
        self._step = self._plain if mechanism == "PLAIN" else self._scram_first

    def answer(self, token: bytes) -> bytes:
        """The token to send back. NotAuthenticated when it proves nothing; a new `choose` has to
        follow then."""
        step, self._step = self._step, None
        assert step is not None
        try:
            return step(token)
        except (ScramException, UsersUnusable) as error:
            raise NotAuthenticated(str(error.__cause__ or error)) from error
        except ValueError:  # whose message may quote the token
            raise NotAuthenticated("no token of this mechanism") from None

    def _plain(self, token: bytes) -> bytes:
        """RFC 4616: whom to act as, who it is, the password."""
        acting, self.user, password = token.decode().split("\0")
        if acting not in ("", self.user) or not self._known.has(self.user, password):
            raise NotAuthenticated("unknown user or wrong password")
        self.authenticated = True
        return b""

    def _scram_first(self, token: bytes) -> bytes:
        server = ScramMechanism(self.mechanism).make_server(self._scram_keys)
        server.set_client_first(token.decode())
        self._step = functools.partial(self._scram_final, server)
        return bytes(server.get_server_first().encode())

    def _scram_final(self, server: Any, token: bytes) -> bytes:
        server.set_client_final(token.decode())
        self.authenticated = True
        return bytes(server.get_server_final().encode())

    def _scram_keys(self, name: str) -> tuple[bytes, bytes, bytes, int] | None:
        self.user = name
        return self._known.keys(name, self.mechanism)

    @property
    def _known(self) -> Users:
        assert self._users is not None
        return self._users
