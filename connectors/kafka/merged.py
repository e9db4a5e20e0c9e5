"""A bytewax source over several topics at once: partition p of all of them is one part, whose
records come in the order in which they were written, as far as their timestamps tell.

What a part joins needs that: after a long stop one topic, read alone, would run days ahead of the
other. Up to the end a partition has when the part is built, a topic that is behind holds the others
up; after it, whatever comes goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition

from connectors.kafka.ahead import ReadAhead
from connectors.kafka.client import Cluster, OffsetGone, Reader
from connectors.kafka.source import MAX_BATCH, POLL_S, STOP, Item, StopFlag
from connectors.kafka.topics import num_partitions
from connectors.records import Origin

MergedState = dict[str, int]
"""The next offset to emit, by topic without namespace."""


class MergedSource(FixedPartitionedSource):  # type: ignore[misc]
    """Emits `(str(partition), Item)`; `topics` without namespace have equally many partitions.
    OffsetGone when retention removed where a resumed part is to go on."""

    def __init__(self, cluster: Cluster, topics: Sequence[str], *, stop: StopFlag = STOP) -> None:
        self._cluster, self._topics, self._stop = cluster, topics, stop

    def list_parts(self) -> list[str]:
        count = num_partitions(self._cluster, self._topics[0])
        return [str(partition) for partition in range(count)]

    def build_part(
        self, step_id: str, for_part: str, resume_state: MergedState | None
    ) -> MergedPart:
        known = resume_state or {}
        tails = [_Tail(self._cluster, t, int(for_part), known.get(t)) for t in self._topics]
        return MergedPart(tails, for_part, self._stop)


class _Tail:
    """One partition, read ahead. `head`: the next item, if it is known."""

    def __init__(self, cluster: Cluster, topic: str, partition: int, position: int | None) -> None:
        self.topic, self._name, self._partition = topic, cluster.topic(topic), partition
        reader = Reader(cluster, self._name, {partition: 0})
        start, self._end = reader.starts()[partition], reader.ends()[partition]
        self.position = start if position is None else position
        if not start <= self.position <= self._end:
            reader.close()
            raise OffsetGone(
                f"{self._name}/{partition}: cannot go on at offset {self.position}, the log holds "
                f"{start} to {self._end}: retention or a new log removed what was not processed"
            )
        reader.seek(partition, self.position)
        self._ahead = ReadAhead(reader, partition)
        self.head: Item | None = None

    def look(self) -> None:
        if self.head is None and self._ahead.has(self.position):
            record = self._ahead.take(self.position)
            self.head = Item(
                origin=Origin(self._name, self._partition, self.position), record=record
            )

    @property
    def is_behind(self) -> bool:
        """Whether it held more, when it was opened, than has come yet."""
        return self.head is None and self.position < self._end

    @property
    def written_at(self) -> int:
        record = self.head.record if self.head is not None else None
        return record.timestamp_ms if record is not None else -1

    def take(self) -> Item:
        item, self.head = self.head, None
        if item is None:
            raise RuntimeError("nothing was looked for")
        self.position += 1
        return item

    def close(self) -> None:
        self._ahead.close()


class MergedPart(StatefulSourcePartition):  # type: ignore[misc]
    def __init__(self, tails: Sequence[_Tail], key: str, stop: StopFlag) -> None:
        self._tails, self._key, self._stop = tails, key, stop
        self._full = False  # the last call emitted as many as it may

    def next_batch(self) -> list[tuple[str, Item]]:
        """Never blocks; empty when nothing is there yet."""
        if self._stop.is_set():
            raise StopIteration
        items: list[tuple[str, Item]] = []
        while len(items) < MAX_BATCH and (tail := self._next()) is not None:
            items.append((self._key, tail.take()))
        self._full = len(items) >= MAX_BATCH
        return items

    def next_awake(self) -> datetime | None:
        return datetime.now(UTC) + timedelta(seconds=0.0 if self._full else POLL_S)

    def snapshot(self) -> MergedState:
        return {tail.topic: tail.position for tail in self._tails}

    def close(self) -> None:
        for tail in self._tails:
            tail.close()

    def _next(self) -> _Tail | None:
        for tail in self._tails:
            tail.look()
        if any(tail.is_behind for tail in self._tails):
            return None
        ready = [tail for tail in self._tails if tail.head is not None]
        return min(ready, key=lambda tail: tail.written_at, default=None)
