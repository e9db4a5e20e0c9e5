"""Bodies of the engine's HTTP interface that are no type of the engine itself; both sides use
them."""

from __future__ import annotations

import msgspec


class RequestId(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """`kind`: "refused" (never succeeds), "error" (may be sent again), "unavailable" (an outage),
    or a WeightsError's."""

    error: str
    kind: str = "error"
