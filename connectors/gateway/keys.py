"""API keys from a file: a line a key, `KEY` or `KEY NAME`; `#` begins a comment.

The name tells keys' sessions and users apart in the log, where the key itself never stands. Without
one it is a digest of the key. The file is read again when it changes."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from pathlib import Path
from typing import Final

from connectors.config import ConfigError
from connectors.gateway.errors import Refused

log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[A-Za-z0-9_.@-]{1,64}")

Stamp = tuple[int, int, int]


class Keys:
    """Whose request it is, by its key; without a file everybody is ""."""

    def __init__(self, file: Path | None) -> None:
        """ConfigError when the file cannot be read or holds no key."""
        self._file = file
        self._names: dict[bytes, str] = {}
        self._stamp: Stamp | None = None
        if file is not None:
            self._stamp = _stamp(file)
            self._names = _read(file)

    def owner(self, authorization: str | None) -> str:
        """The name of the key in a header `Authorization: Bearer KEY`; Refused (401) without a
        valid one."""
        if self._file is None:
            return ""
        self._read_again(self._file)
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized(
                "You didn't provide an API key: send it as a header, Authorization: Bearer KEY"
            )
        given, owner = _digest(key.strip()), None
        for digest, name in self._names.items():
            # All of them, each in constant time: how long it takes tells nothing about a key.
            if hmac.compare_digest(digest, given):
                owner = name
        if owner is None:
            raise _unauthorized("Incorrect API key provided")
        return owner

    def _read_again(self, file: Path) -> None:
        """If it changed. A file that is unusable now changes nothing."""
        try:
            if (stamp := _stamp(file)) == self._stamp:
                return
            names = _read(file)
        except ConfigError as error:
            if self._stamp is not None:
                log.error("the keys read before go on: %s", error)
            self._stamp = None
            return
        self._stamp, self._names = stamp, names


def _read(file: Path) -> dict[bytes, str]:
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"gateway.keys_file: {file} cannot be read: {error}") from error
    names: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        digest = _digest(words[0])
        name = words[1] if len(words) > 1 else digest.hex()[:12]
        if len(words) > 2 or not _NAME.fullmatch(name):
            raise ConfigError(
                f"gateway.keys_file: {file} line {number} is neither KEY nor KEY NAME "
                "(a name has letters, digits and _.@-)"
            )
        names[digest] = name
    if not names:
        raise ConfigError(f"gateway.keys_file: {file} holds no key")
    return names


def _stamp(file: Path) -> Stamp:
    try:
        found = file.stat()
    except OSError as error:
        raise ConfigError(f"gateway.keys_file: {file}: {error.strerror}") from error
    return found.st_mtime_ns, found.st_size, found.st_ino


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _unauthorized(message: str) -> Refused:
    return Refused(401, message, code="invalid_api_key")
