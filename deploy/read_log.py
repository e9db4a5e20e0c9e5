"""`headwater log`: any topic of a run as plain values.

    records ──▶ decoded: one line a trajectory of an Arrow group, one a record of any other kind
                  │        what cannot be read is a line that says why
                  └──▶ --where, --last ──▶ printed, in one JSON object, or exported

A line has the record's `partition`, `offset`, `time`, `key` and `headers`, and its `value`, or
`unreadable` and the reason.
"""

from __future__ import annotations

import base64
import dataclasses
import difflib
import heapq
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from connectors.arrow import CorruptRecord
from connectors.config import ConfigError
from connectors.kafka.client import Cluster, Reader, Record
from connectors.kafka.terminals import UnknownRecord, terminal
from connectors.kafka.topics import partition_counts
from connectors.records import HEADER_KIND, Group, Trajectory
from deploy.log_range import Range, resolve
from deploy.log_where import Conditions

TERMINALS: Final = ("rollouts", "trajectories")
FOLLOW_S: Final = 0.5
Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """One record. `lines`: those wanted; `rows[i]`: the row of `batch` that line i shows, where the
    record is a group; `unreadable`: why it cannot be read, or None."""

    record: Record
    lines: list[Line]
    rows: Sequence[int] = ()
    batch: pa.RecordBatch | None = None
    unreadable: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """`name` in full. `terminals`: it holds groups and their ends."""

    name: str
    num_partitions: int
    terminals: bool


def find_topic(cluster: Cluster, name: str) -> Topic:
    """The topic `name` of the run's namespace, or of that full name. ConfigError if there is
    none."""
    counts = partition_counts(dataclasses.replace(cluster, namespace=""))
    own = {t.removeprefix(cluster.namespace) for t in counts if t.startswith(cluster.namespace)}
    full = cluster.topic(name) if name in own else name
    if full not in counts:
        close = difflib.get_close_matches(name, own, n=1)
        known = f"did you mean {close[0]}?" if close else f"the run has {', '.join(sorted(own))}"
        raise ConfigError(f"there is no topic {name}; {known}")
    base = full.rpartition(".")[2]
    return Topic(name=full, num_partitions=counts[full], terminals=base in TERMINALS)


def find_range(cluster: Cluster, topic: Topic, since: Sequence[str], until: Sequence[str]) -> Range:
    """ConfigError when `--from` and `--to` mean nothing in this topic."""
    partitions = dict.fromkeys(range(topic.num_partitions), 0)
    with closing(Reader(cluster, topic.name, partitions)) as reader:
        return resolve(reader, since, until)


def read(
    cluster: Cluster,
    topic: Topic,
    span: Range,
    where: Conditions | None = None,
    *,
    follow: bool = False,
    stop: threading.Event | None = None,
) -> Iterator[Decoded]:
    """What is in `span`, in offset order a partition, and with `follow` what comes behind it; until
    `stop` is set. A record of which nothing is wanted is left out, an unreadable one never is."""
    with closing(Reader(cluster, topic.name, span.first)) as reader:
        while follow or any(at < span.stop[p] for p, at in reader.positions().items()):
            if stop is not None and stop.is_set():
                return
            for record in reader.poll(FOLLOW_S):
                if follow or record.offset < span.stop[record.partition]:
                    found = _wanted(decode(record, topic), where)
                    if found.lines:
                        yield found


def last(found: Iterable[Decoded], count: int) -> list[Decoded]:
    """The last `count` lines by time, each in a record of its own."""
    kept: dict[int, deque[tuple[tuple[int, int, int, int], Decoded]]] = {}
    for decoded in found:
        at = decoded.record
        newest = kept.setdefault(at.partition, deque(maxlen=count))
        for i in range(len(decoded.lines)):
            newest.append(((at.timestamp_ms, at.partition, at.offset, i), _only(decoded, [i])))
    return [one for _, one in heapq.nlargest(count, (k for d in kept.values() for k in d))][::-1]


def newest(span: Range, count: int) -> Range:
    """The part of `span` in which the last `count` lines are when every record is wanted."""
    first = {p: max(at, span.stop[p] - count) for p, at in span.first.items()}
    return dataclasses.replace(span, first=first)


def decode(record: Record, topic: Topic) -> Decoded:
    """All of a record's lines."""
    try:
        if topic.terminals or record.headers.get(HEADER_KIND) in ("group", "closed"):
            ended = terminal(record)
            if isinstance(ended, Group):
                return _group(record, ended)
        value = _value(record.value, topic)
    except (CorruptRecord, UnknownRecord, ValueError) as error:
        line = {**_envelope(record), "bytes": len(record.value), "unreadable": str(error)}
        return Decoded(record=record, lines=[line], unreadable=str(error))
    return Decoded(record=record, lines=[{**_envelope(record), "value": value}])


def shortened(value: Any, longest: int = 8) -> Any:
    """`value` with long arrays cut, for a terminal."""
    if isinstance(value, Mapping):
        return {key: shortened(v, longest) for key, v in value.items()}
    if isinstance(value, list):
        cut = [shortened(v, longest) for v in value[:longest]]
        return [*cut, f"... {len(value)} in all"] if len(value) > longest else cut
    return value


def _wanted(decoded: Decoded, where: Conditions | None) -> Decoded:
    if where is None or decoded.unreadable is not None:
        return decoded
    return _only(decoded, [i for i, line in enumerate(decoded.lines) if where.match(line)])


def _only(decoded: Decoded, indices: Sequence[int]) -> Decoded:
    return dataclasses.replace(
        decoded,
        lines=[decoded.lines[i] for i in indices],
        rows=[decoded.rows[i] for i in indices] if decoded.rows else (),
    )


def _group(record: Record, group: Group) -> Decoded:
    with pa.ipc.open_stream(record.value) as reader:
        batch = reader.read_next_batch()
    prompt = msgspec.to_builtins(group.prompt)
    envelope = _envelope(record)
    lines = [
        {**envelope, "value": {**_columns(row), "prompt": prompt}} for row in group.trajectories
    ]
    return Decoded(record=record, lines=lines, rows=range(len(lines)), batch=batch)


def _columns(row: Trajectory) -> dict[str, Any]:
    found = {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}
    for name, value in found.items():
        if isinstance(value, np.ndarray):
            found[name] = value.tolist()
        elif isinstance(value, tuple):
            found[name] = [msgspec.to_builtins(element) for element in value]
        elif isinstance(value, msgspec.Struct):
            found[name] = msgspec.to_builtins(value)
    found["rewards"] = [
        dict(zip(("token", "value", "name"), r, strict=True)) for r in found["rewards"]
    ]
    return found


def _value(data: bytes, topic: Topic) -> Any:
    """JSON; in `dead-letters`, which keep what could not be processed, anything. ValueError for
    anything else."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        if not topic.name.endswith("dead-letters"):
            raise ValueError(f"no JSON: {error}") from error
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _envelope(record: Record) -> Line:
    at = datetime.fromtimestamp(record.timestamp_ms / 1000, UTC)
    return {
        "partition": record.partition,
        "offset": record.offset,
        "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "key": None if record.key is None else record.key.decode(errors="replace"),
        "headers": dict(record.headers),
    }
