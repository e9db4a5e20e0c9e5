"""The feed's reading side: records of `trajectories` into the ledger, their groups kept for a step.

trajectories ──▶ whole? ──▶ trainable? ──▶ ledger: arrived (the group is kept until its step)
                    │           └─ no: dead letter, dropped
                    └─ no: dead letter, closed as malformed
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from connectors.arrow import CorruptRecord, checksum, decode_group
from connectors.kafka.client import Cluster, Producer, Reader, Record
from connectors.kafka.terminals import UnknownRecord, terminal, unreadable
from connectors.records import HEADER_WRITER, Closed, Coordinate, Group
from trainer.accounts import LedgerBroken
from trainer.ledger import FeedCore

log = logging.getLogger(__name__)

WRITER = "feed"


class Intake:
    """Used by the feed's thread. `untrainable`: why a whole group can enter no step, or None."""

    def __init__(
        self,
        cluster: Cluster,
        core: FeedCore,
        producer: Producer,
        untrainable: Callable[[Group], str | None],
    ) -> None:
        """Goes on where `core` has read to, and reads again the groups that had arrived by then.
        LedgerBroken when one is not the record it was, OffsetGone when it is not there."""
        self._cluster, self._core = cluster, core
        self._producer, self._untrainable = producer, untrainable
        read = dict(enumerate(core.read))
        self._reader = Reader(cluster, cluster.topic("trajectories"), read)
        self._groups = {
            entry.group_id: self._read_again(entry.coordinate)
            for entry in core.accounts.open.values()
            if entry.coordinate is not None
        }

    def read(self, timeout_s: float) -> bool:
        """Takes in what is there within `timeout_s`; whether there was anything."""
        records = self._reader.poll(timeout_s)
        for record in records:
            self._take_in(record)
        return bool(records)

    def groups(self, records: Sequence[Coordinate]) -> tuple[Group, ...]:
        """The groups of a closed step; they and those that are open no more are forgotten."""
        taken = tuple(self._groups.pop(record.group_id) for record in records)
        still_open = self._core.accounts.open
        self._groups = {g: group for g, group in self._groups.items() if g in still_open}
        return taken

    def lag(self) -> dict[int, int]:
        """Records of `trajectories` not read yet, by partition."""
        return {p: end - self._core.read[p] for p, end in self._reader.ends().items()}

    def close(self) -> None:
        self._reader.close()

    def _read_again(self, record: Coordinate) -> Group:
        data = self._reader.read_at(record.partition, record.offset).value
        try:
            return decode_group(data, record.crc)
        except CorruptRecord as error:
            raise LedgerBroken(
                f"trajectories/{record.partition}/{record.offset} is not the record it was: {error}"
            ) from error

    def _take_in(self, record: Record) -> None:
        core, at = self._core, (record.partition, record.offset)
        try:
            ended = terminal(record)
        except (CorruptRecord, UnknownRecord) as error:
            group_id = (record.key or b"").decode(errors="replace")
            first = core.closed(group_id, "malformed", at=at)
            if first or not core.accounts.granted(group_id):
                self._dead_letter(record, error)
            return
        if isinstance(ended, Closed):
            core.closed(ended.group_id, ended.reason, at=at)
            return
        coordinate = Coordinate(*at, checksum(record.value), ended.group_id)
        if not core.arrived(coordinate, ended.oldest, ended.newest, len(ended.trajectories)):
            return
        if (why := self._untrainable(ended)) is None:
            self._groups[ended.group_id] = ended
            return
        log.warning("%s cannot be trained: %s", ended.group_id, why)
        core.drop(ended.group_id, "malformed")
        self._dead_letter(record, CorruptRecord(why))

    def _dead_letter(self, record: Record, error: CorruptRecord | UnknownRecord) -> None:
        _, letter = unreadable(self._cluster, record, error)
        self._producer.append(
            self._cluster.topic("dead-letters"),
            record.partition,
            letter.value,
            key=letter.key.encode(),
            headers={**letter.headers, HEADER_WRITER: WRITER},
        )
