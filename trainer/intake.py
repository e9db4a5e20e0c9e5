"""The feed's reading side: records of `trajectories` into the ledger, their groups kept for a step.

trajectories ──▶ whole? ──▶ trainable? ──▶ signal? ──▶ ledger: arrived (kept until its step)
                   │            │             └─ no: dropped as filtered
                   │            └─ no: dead letter, dropped
                   └─ no: dead letter, closed as malformed

After a recovery it reads again what an announcement or a manifest ended before: a dead letter is
written once or more, never not at all, and a group is filtered as it was. A group that had arrived
and that no step took is asked again, for the settings may be others now; so is its age, of live
traffic.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from connectors.arrow import CorruptRecord, checksum, decode_group
from connectors.kafka.client import Cluster, OffsetGone, Producer, Reader, Record
from connectors.kafka.terminals import UnknownRecord, terminal, unreadable
from connectors.records import HEADER_WRITER, Closed, Coordinate, Group
from operators.staleness.lineage import stalest
from trainer.actions import FILTERED, STALE
from trainer.diagnostics import Lengths
from trainer.ledger import FeedCore

log = logging.getLogger(__name__)

WRITER: Final = "feed"
DROUGHT_STEPS: Final = 10
"""So many steps' worth of groups, all filtered one after the other, are a warning."""
QUEUED_STEPS: Final = 64
"""So many steps' worth of live traffic are read ahead."""


class Intake:
    """Used by the feed's thread. `untrainable`: why a whole group can enter no step, or None;
    `no_signal`: whether one that could is to be filtered."""

    def __init__(
        self,
        cluster: Cluster,
        core: FeedCore,
        producer: Producer,
        untrainable: Callable[[Group], str | None],
        no_signal: Callable[[Group], bool] = lambda group: False,
    ) -> None:
        """Goes on where `core` has read to, and reads again the groups that had arrived by then.
        One whose record is gone or is not what it was, or that can enter no step any more, is
        dropped, and named in the log."""
        self._cluster, self._core = cluster, core
        self._producer, self._untrainable, self._no_signal = producer, untrainable, no_signal
        self._drought = Drought(DROUGHT_STEPS * (core.batch_size + core.traffic.num_places))
        self._lengths = Lengths()
        read = dict(enumerate(core.read))
        self._reader = Reader(cluster, cluster.topic("trajectories"), read)
        for partition, start in self._reader.starts().items():
            if read[partition] < start:
                self._pass_over(partition, start)
        self._groups: dict[str, Group] = {}
        for entry in list(core.accounts.open.values()):
            if entry.coordinate is not None:
                self._read_again(entry.coordinate)
        for queued in list(core.traffic.queue.values()):
            self._read_again(queued.coordinate)
        self._recheck()

    def _recheck(self) -> None:
        core = self._core
        if late := core.traffic.recheck(core.version, core.lineage):
            log.error(
                "%d groups of live traffic are too old by now (after a rollback or a lowered "
                "bound): dropped as stale (%s)", len(late), ", ".join(late[:3]),
            )  # fmt: skip

    def catch_up(self) -> None:
        """Takes in what the log holds already. Whoever asks the policy sooner shows it groups as
        running that ended long ago."""
        for record in self._reader.read_to(self._reader.ends()):
            self._take_in(record)
            if self._is_sated():
                for partition, offset in enumerate(self._core.read):
                    self._reader.seek(partition, offset)
                return

    def read(self, timeout_s: float) -> bool:
        """Takes in what is there within `timeout_s`; whether there was anything."""
        if self._is_sated():
            time.sleep(timeout_s)
            return False
        records = self._reader.poll(timeout_s)
        for record in records:
            self._take_in(record)
        return bool(records)

    def _is_sated(self) -> bool:
        """Whether the queue of live traffic is long enough for now, so that the rest, such as an
        imported log, waits in the topic and not in memory. Not while prompts run: their terminals
        lie behind it."""
        core = self._core
        most = QUEUED_STEPS * max(core.traffic.num_places, 1)
        return len(core.traffic.queue) >= most and not core.num_running()

    def groups(self, records: Sequence[Coordinate]) -> tuple[Group, ...]:
        """The groups of a closed step; they and those that are open no more are forgotten."""
        taken = tuple(self._groups.pop(record.group_id) for record in records)
        is_open = self._core.is_open
        self._groups = {g: group for g, group in self._groups.items() if is_open(g)}
        return taken

    def mean_length(self) -> float | None:
        """Generated tokens a sample of all groups that were read since the last call, whatever
        became of them; None without any. After a recovery some are read, and counted, again."""
        lengths, self._lengths = self._lengths, Lengths()
        return lengths.mean()

    def lag(self) -> dict[int, int]:
        """Records of `trajectories` not read yet, by partition."""
        return {p: end - self._core.read[p] for p, end in self._reader.ends().items()}

    def close(self) -> None:
        self._reader.close()

    def _pass_over(self, partition: int, start: int) -> None:
        """Retention removed terminals that were not read: nobody knows whose. Groups that are open
        in the partition would be waited for in vain."""
        core, at = self._core, self._core.read[partition]
        running = [
            entry.group_id
            for entry in core.accounts.open.values()
            if entry.partition == partition and entry.coordinate is None
        ]
        log.error(
            "trajectories/%d: offsets %d to %d are gone, nobody had read them; the %d groups of "
            "the partition that were waited for are dropped as no_record",
            partition, at, start - 1, len(running),
        )  # fmt: skip
        for group_id in running:
            core.drop(group_id, "no_record")
        core.passed(partition, start - 1)
        self._reader.seek(partition, start)

    def _read_again(self, record: Coordinate) -> None:
        group_id = record.group_id
        at = f"trajectories/{record.partition}/{record.offset} ({group_id})"
        try:
            found = self._reader.read_at(record.partition, record.offset)
        except OffsetGone as error:
            log.error("%s is gone, its group is dropped: %s", at, error)
            self._core.drop(group_id, "no_record")
            return
        try:
            group = decode_group(found.value, record.crc)
        except CorruptRecord as error:
            log.error("%s is not the record it was, its group is dropped: %s", at, error)
            self._core.drop(group_id, "malformed")
            self._dead_letter(found, error)
            return
        reason, why = self._refused(group)
        if reason is None:
            self._groups[group_id] = group
        else:
            self._core.drop(group_id, reason)
        if why is not None:
            self._untrained(found, group_id, why)

    def _take_in(self, record: Record) -> None:
        core, at = self._core, (record.partition, record.offset)
        try:
            ended = terminal(record)
        except (CorruptRecord, UnknownRecord) as error:
            group_id = (record.key or b"").decode(errors="replace")
            first = core.awaits(group_id)
            core.closed(group_id, "malformed", at=at)
            if first or not core.expected(group_id):
                self._dead_letter(record, error)
            return
        if isinstance(ended, Closed):
            core.closed(ended.group_id, ended.reason, at=at)
            return
        coordinate = Coordinate(*at, checksum(record.value), ended.group_id)
        versions = {s.version for t in ended.trajectories for s in t.segments}
        oldest = stalest(versions, core.version, core.lineage)
        reason = why = None
        if core.awaits(ended.group_id):
            reason, why = self._refused(ended)
            self._lengths.add(ended)
        is_open = core.arrived(
            coordinate, oldest, ended.newest, len(ended.trajectories), drop_reason=reason or STALE
        )
        if reason is not None:
            core.drop(ended.group_id, reason)
        elif is_open:
            self._groups[ended.group_id] = ended
        if why is not None:
            self._untrained(record, ended.group_id, why)

    def _refused(self, group: Group) -> tuple[str | None, str | None]:
        """Why a group that arrives enters no step, and what is wrong with it if anything is."""
        if (why := self._impossible(group) or self._untrainable(group)) is not None:
            return "malformed", why
        filtered = self._no_signal(group)
        self._drought.saw(filtered)
        return (FILTERED if filtered else None), None

    def _impossible(self, group: Group) -> str | None:
        """No engine can have been given a version that no step made yet."""
        newest, made = group.newest, self._core.version
        if newest is None or newest <= made:
            return None
        return f"tokens of version {newest}, the next step trains at {made}"

    def _untrained(self, record: Record, group_id: str, why: str) -> None:
        log.warning("%s cannot be trained: %s", group_id, why)
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


class Drought:
    """Says once in the log that the last `most` groups were all filtered: nothing is learnt from
    the prompts that go. One that is not filtered ends it."""

    def __init__(self, most: int) -> None:
        self._most, self._count = most, 0

    def saw(self, filtered: bool) -> None:
        if not filtered and self._count >= self._most:
            log.warning("a group carries a signal again, after %d filtered ones", self._count)
        self._count = self._count + 1 if filtered else 0
        if self._count == self._most:
            log.warning(
                "the last %d groups were all filtered: in each the advantages are 0, so nothing is "
                "learnt from the prompts that go (they may be too easy or too hard; see the "
                "rewards, or turn trainer.filter_groups off)",
                self._count,
            )
