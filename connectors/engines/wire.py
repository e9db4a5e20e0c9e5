"""What both sides of the engine's HTTP interface share: bodies that are no type of the engine
itself, and how whatever came in is read."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from connectors.engines.types import Completion, Part

MAX_ANSWER_BYTES: Final = 64 << 20
"""A larger answer of an engine, or a longer line of it, is none."""


def decoded(data: bytes | bytearray, kind: Any) -> Any:
    """The JSON in `data` as `kind`; ValueError when it is none, however deep it is nested."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error


class RequestId(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """`kind`: "refused" (never succeeds), "error" (may be sent again), "unavailable" (an outage),
    "version_gone", or a WeightsError's."""

    error: str
    kind: str = "error"


class Last(msgspec.Struct, frozen=True, kw_only=True):
    """The last line of a stream that ends well."""

    done: tuple[Completion, ...]


class _Keys(msgspec.Struct):
    done: msgspec.Raw = msgspec.Raw(b"")
    error: msgspec.Raw = msgspec.Raw(b"")


def decoded_line(data: bytes | bytearray) -> Part | Last | ErrorBody:
    """One line of a stream; ValueError when it is none."""
    keys: _Keys = decoded(data, _Keys)
    kind = Last if bytes(keys.done) else ErrorBody if bytes(keys.error) else Part
    line: Part | Last | ErrorBody = decoded(data, kind)
    return line
