"""Groups and their ends as records: key, headers and bytes in `rollouts` and `trajectories`."""

from __future__ import annotations

import time

import msgspec

from connectors.arrow import CorruptRecord, checksum, decode_group, encode_group
from connectors.kafka.client import Cluster, Record
from connectors.kafka.dead_letters import fits
from connectors.kafka.sink import Outgoing
from connectors.records import HEADER_CRC, HEADER_KIND, Closed, Group, decode_as, encode


class UnknownRecord(ValueError):
    """The record's `kind` is none this stage knows."""


def outgoing(cluster: Cluster, terminal: Group | Closed) -> Outgoing:
    """The record of a terminal; that of its `too_large` end when the topic would not take it."""
    made = _record(terminal)
    if isinstance(terminal, Closed) or fits(cluster, made):
        return made
    message = f"{len(made.value)} bytes do not fit in {cluster.max_message_bytes}"
    return _record(closed(terminal.group_id, "too_large", message, terminal.task))


def terminal(record: Record) -> Group | Closed:
    """What `outgoing` wrote. CorruptRecord when it is not whole, UnknownRecord for another kind."""
    kind = record.headers.get(HEADER_KIND)
    if kind == "group":
        group = decode_group(record.value, _crc(record))
        if record.key is not None and group.group_id.encode() != record.key:
            raise CorruptRecord(f"group {group.group_id} under the key {record.key!r}")
        return group
    if kind == "closed":
        crc = _crc(record)
        if crc is not None and checksum(record.value) != crc:
            raise CorruptRecord("the checksum differs from the header's")
        try:
            end: Closed = decode_as(record.value, Closed)
        except msgspec.DecodeError as error:
            raise CorruptRecord(f"no closed group: {error}") from error
        return end
    raise UnknownRecord(f"kind {kind!r} is neither group nor closed")


def closed(group_id: str, reason: str, message: str, task: str = "") -> Closed:
    return Closed(
        group_id=group_id, reason=reason, message=message, task=task, closed_at=time.time()
    )


def _record(terminal: Group | Closed) -> Outgoing:
    is_group = isinstance(terminal, Group)
    value = encode_group(terminal) if isinstance(terminal, Group) else encode(terminal)
    headers = {
        HEADER_KIND: "group" if is_group else "closed",
        HEADER_CRC: f"{checksum(value):08x}",
    }
    return Outgoing(key=terminal.group_id, value=value, headers=headers)


def _crc(record: Record) -> int | None:
    text = record.headers.get(HEADER_CRC)
    if text is None:
        return None
    try:
        return int(text, 16)
    except ValueError as error:
        raise CorruptRecord(f"the checksum header is {text!r}") from error
