"""Groups and their ends as records of `rollouts` and `trajectories`: key, headers and bytes.

A terminal is what a granted prompt ends in: a `Group`, or a `Closed` with the reason. Its key is
the group id, its headers say the kind and the value's checksum."""

from __future__ import annotations

import msgspec

from connectors.arrow import CorruptRecord, checksum, decode_group, encode_group
from connectors.kafka.client import Cluster, Record
from connectors.kafka.dead_letters import dead_letter, fits
from connectors.kafka.sink import Outgoing
from connectors.records import HEADER_CRC, HEADER_KIND, Closed, Group, Origin, decode_as, encode


class UnknownRecord(ValueError):
    """The record's `kind` is none of a terminal's."""


def outgoing(cluster: Cluster, terminal: Group | Closed) -> Outgoing:
    """The record of a terminal; that of its `too_large` end when the topic would not take it."""
    made = _record(terminal)
    if isinstance(terminal, Closed) or fits(cluster, made):
        return made
    message = f"{len(made.value)} bytes do not fit in {cluster.max_message_bytes}"
    return _record(Closed.now(terminal.group_id, "too_large", message, terminal.task))


def terminal(record: Record) -> Group | Closed:
    """What `outgoing` wrote. CorruptRecord when it is not whole, UnknownRecord for another kind."""
    kind = record.headers.get(HEADER_KIND)
    if kind not in ("group", "closed"):
        raise UnknownRecord(f"kind {kind!r} is neither group nor closed")
    said, crc = record.headers.get(HEADER_CRC), checksum(record.value)
    if said != f"{crc:08x}":
        raise CorruptRecord(f"checksum {crc:08x} where the header says {said}")
    ended = decode_group(record.value) if kind == "group" else _closed(record.value)
    if ended.group_id.encode() != record.key:
        raise CorruptRecord(f"{kind} {ended.group_id} under the key {record.key!r}")
    return ended


def unreadable(
    cluster: Cluster, record: Record, error: CorruptRecord | UnknownRecord
) -> tuple[str, Outgoing]:
    """The code of what `terminal` raised, and the dead letter of the record."""
    code = "corrupt_record" if isinstance(error, CorruptRecord) else "unknown_record"
    origin = Origin(record.topic, record.partition, record.offset)
    return code, dead_letter(cluster, origin, record.value, code=code, message=str(error))


def _closed(value: bytes) -> Closed:
    try:
        ended: Closed = decode_as(value, Closed)
    except msgspec.DecodeError as error:
        raise CorruptRecord(f"no closed group: {error}") from error
    return ended


def _record(terminal: Group | Closed) -> Outgoing:
    if isinstance(terminal, Group):
        kind, value = "group", encode_group(terminal)
    else:
        kind, value = "closed", encode(terminal)
    headers = {HEADER_KIND: kind, HEADER_CRC: f"{checksum(value):08x}"}
    return Outgoing(key=terminal.group_id, value=value, headers=headers)
