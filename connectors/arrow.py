"""Groups on the wire: one Arrow IPC stream a message, n trajectories as rows.

Built from numpy (no Python lists of tokens), read zero-copy: the arrays of a decoded group are
read-only views of the message. Arrow notices a truncated message but not a flipped byte, so every
message travels with a crc32c in a header (`checksum`); readers pass it to `decode_group`.

The schema's version is in its metadata; it evolves by adding nullable columns, so a reader ignores
columns it does not know and takes defaults for those it misses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, TypedDict

import google_crc32c
import msgspec
import numpy as np
import pyarrow as pa

from connectors.records import Group, Origin, Prompt, Segment, Trajectory, decode_as, encode

SCHEMA_VERSION: Final = "1"

_SEGMENT = pa.struct(
    [
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("incarnation", pa.int32()),
        ("number", pa.int32()),
    ]
)
_REWARD = pa.struct([("token", pa.int32()), ("value", pa.float32()), ("name", pa.string())])
_ORIGIN = pa.struct([("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64())])

SCHEMA: Final = pa.schema(
    [
        ("trajectory_id", pa.string()),
        ("group_id", pa.string()),
        ("task", pa.string()),
        ("source", pa.string()),
        ("behaviour", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("logprobs", pa.list_(pa.float32())),
        ("segments", pa.list_(_SEGMENT)),
        ("reward", pa.float32()),
        ("rewards", pa.list_(_REWARD)),
        ("reward_parts", pa.map_(pa.string(), pa.float32())),
        ("turns", pa.int32()),
        ("finish_reason", pa.string()),
        ("created_at", pa.float64()),
        ("finished_at", pa.float64()),
        ("origin", _ORIGIN),
        ("metadata", pa.map_(pa.string(), pa.string())),
    ]
)
_ARRAYS: Final = ("tokens", "loss_mask", "logprobs")
"""Columns of numbers a token. What the others hold becomes Python objects."""
_PLAIN: Final = pa.struct([field for field in SCHEMA if field.name not in _ARRAYS])
_INT32, _INT8, _FLOAT32 = pa.int32(), pa.int8(), pa.float32()


class _Part(msgspec.Struct, frozen=True):
    """One of `rewards`."""

    token: int
    value: float
    name: str


class _Plain(TypedDict, total=False):
    """The other columns of a row, as pyarrow gives them; what is null is left out and takes the
    default. Held to by msgspec: no other type, and no null within a value."""

    trajectory_id: str
    group_id: str
    task: str
    source: str
    behaviour: str
    segments: tuple[Segment, ...]
    reward: float
    rewards: tuple[_Part, ...]
    reward_parts: tuple[tuple[str, float], ...]
    turns: int
    finish_reason: str
    created_at: float
    finished_at: float
    origin: Origin
    metadata: tuple[tuple[str, str], ...]


# What pyarrow and the row builder raise on bytes that are no whole group: lengths read from garbage
# surface as OSError or MemoryError.
_UNREADABLE = (
    pa.ArrowException, StopIteration, LookupError, AttributeError, TypeError, ValueError, OSError,
    MemoryError, RecursionError,
)  # fmt: skip


class CorruptRecord(ValueError):
    """The bytes are no whole group: truncated, altered, or of another kind."""


def checksum(data: bytes | memoryview) -> int:
    """crc32c of the message, as in the `crc32c` header and in a manifest's coordinates."""
    return int(google_crc32c.value(bytes(data)))


def encode_group(group: Group) -> bytes:
    """One message. ValueError for a group without trajectories."""
    rows = group.trajectories
    if not rows:
        raise ValueError(f"{group.group_id}: a group without trajectories has no record")
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(t.tokens) for t in rows], out=offsets[1:])
    starts = pa.array(offsets)
    arrays = {
        "tokens": _lists(starts, [t.tokens for t in rows], _INT32),
        "loss_mask": _lists(starts, [t.loss_mask for t in rows], _INT8),
        "logprobs": _lists(starts, [t.logprobs for t in rows], _FLOAT32),
    }
    # In one call: each one costs more than what it converts.
    plain = pa.array([_plain(t) for t in rows], _PLAIN)
    arrays |= zip(_PLAIN.names, plain.flatten(), strict=True)
    schema = SCHEMA.with_metadata({"version": SCHEMA_VERSION, "prompt": encode(group.prompt)})
    batch = pa.RecordBatch.from_arrays([arrays[n] for n in SCHEMA.names], schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def decode_group(data: bytes, crc: int | None = None) -> Group:
    """The group in `data`; CorruptRecord if truncated, altered (with `crc` given) or no group."""
    if crc is not None and (got := checksum(data)) != crc:
        raise CorruptRecord(f"its checksum is {got:08x} where {crc:08x} was expected")
    try:
        with pa.ipc.open_stream(data) as reader:
            batch = reader.read_next_batch()
            metadata = reader.schema.metadata or {}
        prompt: Prompt = decode_as(metadata[b"prompt"], Prompt)
        rows = _rows(dict(zip(batch.schema.names, batch.columns, strict=True)))
    except _UNREADABLE as error:
        raise CorruptRecord(f"no whole group of {len(data)} bytes: {error}") from error
    if not rows:
        raise CorruptRecord("a group message without rows")
    return Group(group_id=rows[0].group_id, prompt=prompt, trajectories=tuple(rows))


def num_sampled(data: bytes) -> int:
    """Sampled tokens of a group's message: what its segments cover. 0 if it is no whole group."""
    try:
        with pa.ipc.open_stream(data) as reader:
            segments = reader.read_next_batch().column("segments").flatten()
        starts, ends = (segments.field(name).to_numpy() for name in ("start", "end"))
        return int((ends - starts).sum())
    except _UNREADABLE:
        return 0


def _plain(row: Trajectory) -> dict[str, Any]:
    """What is not one of _ARRAYS, as pyarrow takes it."""
    return {
        "trajectory_id": row.trajectory_id,
        "group_id": row.group_id,
        "task": row.task,
        "source": row.source,
        "behaviour": row.behaviour,
        "segments": [
            {"start": s.start, "end": s.end, "incarnation": s.incarnation, "number": s.number}
            for s in row.segments
        ],
        "reward": row.reward,
        "rewards": [{"token": t, "value": value, "name": name} for t, value, name in row.rewards],
        "reward_parts": list(row.reward_parts.items()),
        "turns": row.turns,
        "finish_reason": row.finish_reason,
        "created_at": row.created_at,
        "finished_at": row.finished_at,
        "origin": {
            "topic": row.origin.topic,
            "partition": row.origin.partition,
            "offset": row.origin.offset,
        },
        "metadata": list(row.metadata.items()),
    }


def _lists(starts: pa.Array, arrays: Sequence[Any], kind: pa.DataType) -> pa.ListArray:
    return pa.ListArray.from_arrays(starts, pa.array(np.concatenate(arrays), kind))


def _views(name: str, column: pa.ListArray) -> list[Any]:
    if column.type != SCHEMA.field(name).type:
        raise TypeError(f"column {name} is of type {column.type}")
    values = column.values
    if column.null_count or values.null_count:
        raise TypeError(f"a null in column {name}")
    array = values.to_numpy()
    return [array[a:b] for a, b in pairwise(column.offsets.to_numpy().tolist())]


def _rows(columns: Mapping[str, pa.Array]) -> list[Trajectory]:
    arrays = [_views(name, columns[name]) for name in _ARRAYS]
    names = [name for name in _Plain.__annotations__ if name in columns]
    plain = msgspec.convert(
        [
            {name: value for name, value in zip(names, row, strict=True) if value is not None}
            for row in zip(*(columns[name].to_pylist() for name in names), strict=True)
        ],
        list[_Plain],
    )
    rows = []
    for tokens, mask, logprobs, found in zip(*arrays, plain, strict=True):
        values: dict[str, Any] = {"segments": (), **found}
        values["rewards"] = tuple((r.token, r.value, r.name) for r in found.get("rewards", ()))
        for name in ("reward_parts", "metadata"):
            values[name] = dict(values.get(name, ()))
        rows.append(Trajectory(tokens=tokens, loss_mask=mask, logprobs=logprobs, **values))
    return rows
