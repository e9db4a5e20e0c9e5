"""Dead letters: the original bytes of a record that cannot be processed, and the reason."""

from __future__ import annotations

import msgspec

from connectors.kafka.client import Cluster
from connectors.kafka.sink import Outgoing
from connectors.records import Origin

MESSAGE_BYTES = 1000
"""Of the reason kept in the header."""


def dead_letter(
    cluster: Cluster, origin: Origin, value: bytes, *, code: str, message: str
) -> Outgoing:
    """For a `LogSink` on `dead-letters`, in the origin's partition. `code` is one of
    `DEAD_LETTER_CODES`. A value that no longer fits is replaced by a reference to it (JSON with
    `origin` and `bytes`, header `reference`)."""
    short = message.encode()[:MESSAGE_BYTES].decode(errors="ignore")
    headers = {"code": code, "message": short, "origin": str(origin)}
    letter = Outgoing(key=str(origin), value=value, headers=headers)
    if fits(cluster, letter):
        return letter
    reference = msgspec.json.encode({"origin": str(origin), "bytes": len(value)})
    return Outgoing(key=str(origin), value=reference, headers={**headers, "reference": "true"})


def fits(cluster: Cluster, outgoing: Outgoing) -> bool:
    """Whether the topic takes it: a larger group closes as `too_large`, a larger dead letter
    becomes a reference."""
    headers = sum(len(k.encode()) + len(v.encode()) + 10 for k, v in outgoing.headers.items())
    overhead = 256  # of the batch, the record and the writer header
    size = len(outgoing.value) + len(outgoing.key.encode()) + headers + overhead
    return size <= cluster.largest_record_bytes
