"""The users of a broker, as a file: each one's SCRAM keys, never a password.

    python -m connectors.broker users add NAME --file F

The keys let the broker recognise who knows the password, in SASL/PLAIN too; they do not let anybody
log in, but guesses can be tried against them: the file is its owner's alone (0600).
"""

from __future__ import annotations

import hmac
import re
from pathlib import Path
from typing import Final

import msgspec
from scramp import ScramException, ScramMechanism

from connectors.broker.errors import UsersUnusable
from connectors.files import replace_file

SCRAM: Final = ("SCRAM-SHA-256", "SCRAM-SHA-512")
NAME: Final = re.compile(r"[A-Za-z0-9._@-]{1,100}")
MODE: Final = 0o600


class Keys(msgspec.Struct, frozen=True):
    """Of one user and one mechanism (RFC 5802, section 3)."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int


class Users:
    """Read at every question, so a change counts from the next connection on."""

    def __init__(self, file: Path) -> None:
        """UsersUnusable when the file cannot be read or others than its owner may read it."""
        self._file = file
        if self._read() and file.stat().st_mode & 0o077:
            raise UsersUnusable(f"{file}: others may read it: chmod 600 {file}")

    def keys(self, name: str, mechanism: str) -> tuple[bytes, bytes, bytes, int] | None:
        """As scramp takes them; None for an unknown user."""
        found = self._read().get(name, {}).get(mechanism)
        return None if found is None else msgspec.structs.astuple(found)

    def has(self, name: str, password: str) -> bool:
        """Whether there is that user with that password."""
        mechanism = SCRAM[0]
        keys = self.keys(name, mechanism)
        if keys is None:
            return False
        salt, stored_key, _, iterations = keys
        try:
            _, made, _, _ = ScramMechanism(mechanism).make_auth_info(password, iterations, salt)
        except ScramException:  # characters that no password has
            return False
        return hmac.compare_digest(made, stored_key)

    def _read(self) -> dict[str, dict[str, Keys]]:
        return _read(self._file)


def add(file: Path, name: str, password: str) -> None:
    """Adds user `name`, or gives it a new password. UsersUnusable when the name or the password is
    none, or the file cannot be read or written."""
    if not NAME.fullmatch(name):
        raise UsersUnusable(
            f"{name!r} is no user name: letters, digits and . _ @ -, at most 100 of them"
        )
    if not password or not password.isascii() or not password.isprintable():
        # Clients differ in what they make of other characters before they hash them.
        raise UsersUnusable("a password is one line of printable ASCII characters, at least one")
    users = _read(file) if file.exists() else {}
    made = {m: Keys(*ScramMechanism(m).make_auth_info(password)) for m in SCRAM}
    _write(file, {**users, name: made})


def remove(file: Path, name: str) -> None:
    """UsersUnusable when there is no such user."""
    users = _read(file)
    if users.pop(name, None) is None:
        raise UsersUnusable(f"{file}: has no user {name}")
    _write(file, users)


def _read(file: Path) -> dict[str, dict[str, Keys]]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, dict[str, Keys]])
    except OSError as error:
        raise UsersUnusable(
            f"{file}: cannot be read ({error.strerror}): `python -m connectors.broker users add "
            f"NAME --file {file}` makes it"
        ) from error
    except msgspec.DecodeError as error:
        raise UsersUnusable(f"{file}: is no file of users: {error}") from error


def _write(file: Path, users: dict[str, dict[str, Keys]]) -> None:
    try:
        replace_file(file, msgspec.json.format(msgspec.json.encode(users)), sync=True, mode=MODE)
    except OSError as error:
        raise UsersUnusable(f"{file}: cannot be written: {error.strerror}") from error
