"""What consumer groups have committed: one offset a group and partition, kept for good.

DATA/offsets/ is a log like a partition's, with its promises: each commit is one record batch, a
record a partition (key: group, topic, partition; value: what is committed, nothing for what is
deleted), and the last record of a key counts. When the log holds much that no longer counts,
everything that does is written again at its end and what lies before it goes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kafka.record import MemoryRecords
from kafka.record.default_records import DefaultRecordBatchBuilder

from connectors.broker.batch import MAGIC
from connectors.broker.configs import LogConfig
from connectors.broker.errors import CorruptLog
from connectors.broker.log import Log
from connectors.broker.notices import notice
from connectors.broker.partition import Partition

COMPACT_AFTER = 10_000  # records that no longer count, besides as many as count
SEGMENT_BYTES = 1 << 20
MAX_BATCH_BYTES = 1 << 30  # a commit is one batch, however large its request was
READ_BYTES = 1 << 20

Where = tuple[str, int]
"""Topic and partition."""


class Committed(NamedTuple):
    offset: int
    leader_epoch: int
    metadata: str


class Offsets:
    """Whoever stores does so one call after another."""

    def __init__(self, folder: Path, *, sync: bool) -> None:
        """Reads what is stored. CorruptLog if any but a torn tail is damaged; OSError."""
        config = LogConfig(segment_bytes=SEGMENT_BYTES, max_batch_bytes=MAX_BATCH_BYTES)
        log = Log(folder, config, sync=sync)
        if log.repair is not None:
            notice(str(log.repair))
        self._partition = Partition(log)
        self._groups: dict[str, dict[Where, Committed]] = {}
        for group, where, committed in _stored(log):
            self._apply(group, {where: committed})

    def __iter__(self) -> Iterator[str]:
        """The groups that have committed something."""
        return iter(self._groups)

    def of(self, group: str) -> Mapping[Where, Committed]:
        return self._groups.get(group, {})

    async def store(self, group: str, changes: Mapping[Where, Committed | None]) -> None:
        """Returns when all of `changes` are stored, None for what is deleted; OSError when the disk
        refuses, then none of them is."""
        if not changes:
            return
        await self._partition.append(_batch(group, changes))
        self._apply(group, changes)
        log = self._partition.log
        num_counting = sum(len(committed) for committed in self._groups.values())
        if log.end_offset - log.start_offset > 2 * num_counting + COMPACT_AFTER:
            await self._compact()

    def _apply(self, group: str, changes: Mapping[Where, Committed | None]) -> None:
        committed = self._groups.setdefault(group, {})
        for where, change in changes.items():
            if change is None:
                committed.pop(where, None)
            else:
                committed[where] = change
        if not committed:
            del self._groups[group]

    async def _compact(self) -> None:
        start = self._partition.log.end_offset
        try:
            for group, committed in self._groups.items():
                await self._partition.append(_batch(group, committed))
            await self._partition.trim(start)
        except OSError as error:
            # What was to be stored is; the next one tries again.
            notice(f"{self._partition.log.folder}: cannot be compacted: {error.strerror}")


def _batch(group: str, changes: Mapping[Where, Committed | None]) -> bytes:
    builder = DefaultRecordBatchBuilder(
        magic=MAGIC,
        compression_type=0,
        is_transactional=False,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=MAX_BATCH_BYTES,
    )
    for number, ((topic, partition), change) in enumerate(changes.items()):
        key = json.dumps([group, topic, partition]).encode()
        value = None if change is None else json.dumps(change).encode()
        builder.append(number, timestamp=0, key=key, value=value, headers=[])
    return bytes(builder.build())


def _stored(log: Log) -> Iterator[tuple[str, Where, Committed | None]]:
    """Every record, in the order of writing."""
    offset = log.start_offset
    while (data := log.read(offset, READ_BYTES)) is not None:
        batches = MemoryRecords(data.read())
        while (batch := batches.next_batch()) is not None:
            for record in batch:
                yield _decoded(log, record)
                offset = record.offset + 1


def _decoded(log: Log, record: Any) -> tuple[str, Where, Committed | None]:
    try:
        group, topic, partition = json.loads(record.key)
        committed = None if record.value is None else Committed(*json.loads(record.value))
    except (ValueError, TypeError) as error:
        raise CorruptLog(
            f"{log.folder}: the record at offset {record.offset} is no committed offset"
        ) from error
    return group, (topic, partition), committed
