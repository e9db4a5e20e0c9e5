"""bytewax sources over a topic: `(str(partition), Item)`, one source part a partition.

A granted source obeys the trainer: it reads `policy` itself and emits no offset at or above its
partition's limit. An announced cancel comes out as an item, after that of the prompt it is of.
Which offsets are still being worked on is not its business (the async operator's snapshot has
them); its own snapshot is offsets only, and a cancel may come out again after a restart. An offset
the broker skipped comes out as an item without a record, so that every granted offset reaches its
terminal.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition

from connectors.kafka.ahead import ReadAhead
from connectors.kafka.client import Cluster, NoRecord, OffsetGone, Reader, Record
from connectors.kafka.orders import Orders
from connectors.kafka.tail import PolicyFold
from connectors.kafka.topics import num_partitions
from connectors.records import Announcement, Cancel, Origin, Version, parse_group_id

log = logging.getLogger(__name__)

MAX_BATCH = 100
"""Items one call emits: the worker must get back to its other operators."""
POLL_S: Final = 0.02
"""Pause between two calls, unless there is more than one call emits. What comes in it comes
together, and so passes the operators and the sink together: a call costs more than a record."""

StopFlag = threading.Event
STOP: Final = StopFlag()
"""Set by the SIGTERM handler: sources end, the snapshot is written, the process exits 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """`record` None: the broker holds none at this offset. `min_version`: of the first announcement
    that granted the offset; None where nothing is granted. `resubmitted`: a dead worker had it in
    flight. `cancel`: no prompt, but what was announced of one that came before, in the announcement
    of `min_version`. `orders`: of an item in work, what is announced of it meanwhile."""

    origin: Origin
    record: Record | None
    min_version: Version | None = None
    resubmitted: bool = False
    cancel: Cancel | None = None
    orders: Orders | None = None


SourceState = tuple[int, int, int, int]
"""Next offset to emit; offset of `policy` to read again from; epoch and limit before that."""


class LogSource(FixedPartitionedSource):  # type: ignore[misc]
    """`topic` without namespace. A new run starts at the log's start, or at `first` of each
    partition; a resumed one where it stopped. It ends before `end` of each partition, if given.

    OffsetGone when retention removed where it is to start; but granted offsets below the log's
    start come out as items without a record when a new run starts at `first`, and with `trimmed`
    what lies below the log's start had been processed when it was removed: it is passed over."""

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        *,
        granted: bool,
        stop: StopFlag = STOP,
        first: Mapping[int, int] | None = None,
        end: Mapping[int, int] | None = None,
        trimmed: bool = False,
    ) -> None:
        self._cluster, self._topic, self._granted, self._stop = cluster, topic, granted, stop
        self._first, self._end, self._trimmed = first, end, trimmed

    def list_parts(self) -> list[str]:
        count = num_partitions(self._cluster, self._topic)
        return [str(partition) for partition in range(count)]

    def build_part(
        self, step_id: str, for_part: str, resume_state: SourceState | None
    ) -> SourcePart:
        topic, partition = self._cluster.topic(self._topic), int(for_part)
        reader = Reader(self._cluster, topic, {partition: 0})
        start, end = reader.starts()[partition], reader.ends()[partition]
        skips = self._granted and resume_state is None
        if resume_state is None:
            first = start if self._first is None else self._first[partition]
            resume_state = (first, 0, -1, 0)
        position = resume_state[0]
        if self._trimmed and position < start:
            log.info("%s/%d: %d to %d were trimmed", topic, partition, position, start - 1)
            position = start
        if position > end or (position < start and not skips):
            reader.close()
            raise OffsetGone(
                f"{topic}/{partition}: cannot go on at offset {position}, the log holds {start} to "
                f"{end}: retention or a new log removed what was not processed"
            )
        reader.seek(partition, max(position, start))
        grants = None
        if self._granted:
            grants = _Grants(self._cluster, topic, partition, resume_state)
        until = None if self._end is None else self._end[partition]
        ahead = ReadAhead(reader, partition)
        return SourcePart(ahead, topic, partition, position, grants, self._stop, until)


class SourceOf(FixedPartitionedSource):  # type: ignore[misc]
    """Several sources as one input step; `Item.origin` says which topic an item is of.

    bytewax times epochs a part, and a part that ended one waits until the whole dataflow has. Two
    input steps, started at different moments, so stall each other for up to an epoch in every
    epoch; the parts of one step start together."""

    def __init__(self, sources: Mapping[str, LogSource]) -> None:
        """`sources` by name; part `p` of source `s` is `s/p`."""
        self._sources = sources

    def list_parts(self) -> list[str]:
        return [f"{name}/{part}" for name, s in self._sources.items() for part in s.list_parts()]

    def build_part(
        self, step_id: str, for_part: str, resume_state: SourceState | None
    ) -> SourcePart:
        name, part = for_part.split("/")
        return self._sources[name].build_part(step_id, part, resume_state)


class SourcePart(StatefulSourcePartition):  # type: ignore[misc]
    def __init__(
        self,
        ahead: ReadAhead,
        topic: str,
        partition: int,
        position: int,
        grants: _Grants | None,
        stop: StopFlag,
        until: int | None = None,
    ) -> None:
        self._ahead, self._topic, self._partition = ahead, topic, partition
        self._until = until
        self._position = position  # the next offset to emit
        self._grants = grants
        self._stop = stop
        self._full = False  # the last call emitted as many as it may

    def next_batch(self) -> list[tuple[str, Item]]:
        """Never blocks; empty when nothing is granted or nothing is there yet."""
        if self._stop.is_set() or self._position == self._until:
            raise StopIteration
        items = [(str(self._partition), item) for item in self._emit()]
        if self._grants is not None:
            key = str(self._partition)
            items += [(key, item) for item in self._grants.cancelled(self._position)]
        self._full = len(items) >= MAX_BATCH
        return items

    def next_awake(self) -> datetime | None:
        return datetime.now(UTC) + timedelta(seconds=0.0 if self._full else POLL_S)

    def snapshot(self) -> SourceState:
        if self._grants is None:
            return (self._position, 0, -1, 0)
        return (self._position, *self._grants.resume_from())

    def close(self) -> None:
        self._ahead.close()
        if self._grants is not None:
            self._grants.close()

    def _emit(self) -> Iterator[Item]:
        last = self._position + MAX_BATCH
        if self._grants is not None:
            last = min(last, self._grants.limit())
        if self._until is not None:
            last = min(last, self._until)
        while self._position < last and self._ahead.has(self._position):
            yield self._item(self._ahead.take(self._position))

    def _item(self, record: Record | None) -> Item:
        offset = self._position
        version = self._grants.version_of(offset) if self._grants is not None else None
        self._position += 1
        return Item(
            origin=Origin(self._topic, self._partition, offset), record=record, min_version=version
        )


class _Grants:
    """The limits announced for one partition, as far as offsets below them are to be emitted, and
    the cancels."""

    def __init__(self, cluster: Cluster, topic: str, partition: int, state: SourceState) -> None:
        self._position, policy_offset, epoch, self._limit = state
        self._topic, self._partition = topic, partition
        self._fold = PolicyFold(offset=policy_offset, epoch=epoch)
        self._ahead = ReadAhead(Reader(cluster, cluster.topic("policy"), {0: policy_offset}), 0)
        # (limit, version, offset in `policy`, epoch, limit before), ascending
        self._open: deque[tuple[int, Version, int, int, int]] = deque()
        self._cancels: list[Item] = []

    def limit(self) -> int:
        """Absolute offset below which prompts are granted now. It never falls: a grant is kept."""
        for offset, announcement in self._fold.take_in(self._ahead.take_all()):
            limit = announcement.limits[self._partition]
            if limit > self._limit:
                grant = (limit, announcement.version, offset, announcement.epoch, self._limit)
                self._open.append(grant)
                self._limit = limit
            self._cancels += self._cancels_of(announcement)
        return self._limit

    def cancelled(self, position: int) -> list[Item]:
        """The cancels of prompts below `position`, each once. The others wait: the grants of their
        prompts are open still, so a restarted source reads them again."""
        found = [item for item in self._cancels if item.origin.offset < position]
        self._cancels = [item for item in self._cancels if item.origin.offset >= position]
        return found

    def _cancels_of(self, announcement: Announcement) -> Iterator[Item]:
        """Of this partition. Groups whose refund it counts need no more work either: the trainer
        has given up those that have not ended."""
        given_up = [Cancel(g, "close", "cancelled") for g in announcement.closed]
        for cancel in (*announcement.cancels, *given_up):
            origin = parse_group_id(cancel.group_id)
            if (origin.topic, origin.partition) == (self._topic, self._partition):
                yield Item(
                    origin=origin, record=None, min_version=announcement.version, cancel=cancel
                )

    def version_of(self, offset: int) -> Version:
        """Offsets are asked for in ascending order, each below `limit()`."""
        self._position = offset + 1
        while self._open[0][0] <= offset:
            self._open.popleft()
        return self._open[0][1]

    def resume_from(self) -> tuple[int, int, int]:
        """Where a restarted source must read `policy` from to know the same limits and versions."""
        for limit, _, policy_offset, epoch, before in self._open:
            if limit > self._position:
                return (policy_offset, epoch, before)
        return (self._fold.position, self._fold.epoch, self._limit)

    def close(self) -> None:
        self._ahead.close()


class ItemReader:
    """`refetch` of an async operator: the item at one offset again, after a restart. `topic`
    without namespace; one thread. OffsetGone when retention passed the offset in the meantime; with
    `trimmed` its work had been done, and it comes without a record."""

    def __init__(self, cluster: Cluster, topic: str, *, trimmed: bool = False) -> None:
        self._cluster, self._topic, self._trimmed = cluster, cluster.topic(topic), trimmed
        self._reader: Reader | None = None

    def __call__(self, partition: int, offset: int) -> Item:
        if self._reader is None:
            self._reader = Reader(self._cluster, self._topic, {partition: 0})
        record: Record | None
        try:
            record = self._reader.read_at(partition, offset)
        except NoRecord:
            record = None
        except OffsetGone:
            if not self._trimmed or offset >= self._start(partition):
                raise
            record = None
        return Item(origin=Origin(self._topic, partition, offset), record=record)

    def _start(self, partition: int) -> int:
        with closing(Reader(self._cluster, self._topic, {partition: 0})) as reader:
            return reader.starts()[partition]
