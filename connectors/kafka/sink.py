"""A bytewax sink that writes each key once into its topic, whatever is killed.

bytewax replays what followed its last snapshot, so a restarted sink reads back what its dead run
wrote after that snapshot and leaves those keys out when they are generated again. Regeneration may
take longer than the next snapshot: keys read back and not yet generated again stay in the snapshot,
else a second kill would write them twice. A regenerated record may differ from the one written; the
written one stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field

from bytewax.outputs import FixedPartitionedSink, StatefulSinkPartition

from connectors.kafka.client import Cluster, Producer, Reader
from connectors.kafka.topics import num_partitions
from connectors.records import HEADER_WRITER


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """`key` is unique among what one writer puts into a topic. The sink adds the writer header."""

    key: str
    value: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


SinkState = tuple[int, tuple[str, ...]]
"""End offset at the snapshot; keys written by a dead run and not generated again by then."""


class LogSink(FixedPartitionedSink):  # type: ignore[misc]
    """Takes `(str(partition), Outgoing)`; `topic` without namespace. `writer` names the stage;
    records of other writers in the same topic are left alone."""

    def __init__(self, cluster: Cluster, topic: str, writer: str) -> None:
        self._cluster, self._topic, self._writer = cluster, topic, writer
        self._producer: Producer | None = None

    def list_parts(self) -> list[str]:
        count = num_partitions(self._cluster, self._topic)
        # bytewax indexes the parts in the order of their names, so "10" must not precede "2"
        return [f"{partition:05d}" for partition in range(count)]

    def part_fn(self, item_key: str) -> int:
        return int(item_key)

    def build_part(self, step_id: str, for_part: str, resume_state: SinkState | None) -> SinkPart:
        where = self._cluster.topic(self._topic), int(for_part)
        return SinkPart(self._cluster, *where, self._writer, resume_state, self._connected)

    def _connected(self) -> Producer:
        """One connection for all parts: one thread sends what they write, in one request."""
        if self._producer is None or self._producer.closed:
            self._producer = Producer(self._cluster)
            return self._producer
        return self._producer.sibling()


class SinkPart(StatefulSinkPartition):  # type: ignore[misc]
    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        partition: int,
        writer: str,
        state: SinkState | None,
        connected: Callable[[], Producer],
    ) -> None:
        """`topic` with namespace; `connected` is called before the first record is written: most
        parts of `dead-letters` never write one."""
        self._topic, self._partition, self._writer = topic, partition, writer
        self._connected = connected
        self._producer: Producer | None = None
        since, keys = state or (0, ())
        self._unmatched = set(keys)
        self._end = self._read_back(cluster, since)

    def write_batch(self, values: list[Outgoing]) -> None:
        """Returns at once: the worker goes on while the broker stores it."""
        for outgoing in values:
            if outgoing.key in self._unmatched:
                self._unmatched.remove(outgoing.key)
                continue
            self._producer = self._producer or self._connected()
            self._producer.send(
                self._topic,
                self._partition,
                outgoing.value,
                key=outgoing.key.encode(),
                headers={**outgoing.headers, HEADER_WRITER: self._writer},
            )

    def snapshot(self) -> SinkState:
        """Once everything is acknowledged; a delivery error is raised. What was written after a
        snapshot that never came to be is generated again, or read back."""
        self._flush()
        return (self._end, tuple(sorted(self._unmatched)))

    def close(self) -> None:
        self._flush()
        if self._producer is not None:
            self._producer.close()

    def _flush(self) -> None:
        if self._producer is not None and (offsets := self._producer.flush()):
            self._end = offsets[-1] + 1

    def _read_back(self, cluster: Cluster, since: int) -> int:
        """Adds the keys this writer wrote at or after `since`; the partition's end offset."""
        with closing(Reader(cluster, self._topic, {self._partition: 0})) as reader:
            ends = reader.ends()
            # What retention removed was read by everyone long ago.
            reader.seek(self._partition, max(since, reader.starts()[self._partition]))
            for record in reader.read_to(ends):
                if record.headers.get(HEADER_WRITER) == self._writer and record.key is not None:
                    self._unmatched.add(record.key.decode())
        return ends[self._partition]
