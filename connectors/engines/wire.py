"""What both sides of the engine's HTTP interface share: bodies that are no type of the engine
itself, and how whatever came in is read."""

from __future__ import annotations

from typing import Any, Final

import msgspec

MAX_ANSWER_BYTES: Final = 64 << 20
"""A larger answer of an engine is none."""


def decoded(data: bytes, kind: Any) -> Any:
    """The JSON in `data` as `kind`; ValueError when it is none, however deep it is nested."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error


class RequestId(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """`kind`: "refused" (never succeeds), "error" (may be sent again), "unavailable" (an outage),
    or a WeightsError's."""

    error: str
    kind: str = "error"
