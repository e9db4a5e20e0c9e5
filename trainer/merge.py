"""Steps from another run's log, in an order that is a pure function of that log.

    policy of the run ──▶ prompts in the order they were granted ──▶ head
    trajectories ───────▶ first terminal of the head ──▶ trained, or passed over
                                                          └──▶ B trained ones are a step

The head is the first granted prompt that has not ended here. A group keeps its prompt's partition,
so only that partition is read until the head's terminal comes: which records have been read when a
step closes, and with them the state in a checkpoint, depend on the log alone, not on when its
records arrived. Groups read on the way wait as coordinates; whether one can be trained is asked
when it is the head, so after a recovery too by the settings of now, but for what a manifest says of
it already.

It passes over, and counts, what the log closed; what can enter no step, as a dead letter; what
carries no signal under the shadow's own settings, whatever the run filtered; what a fork of the
shadow excludes; and, where `source.limits` says so, prompts that have no terminal in these
`trajectories`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from connectors.arrow import CorruptRecord, checksum, decode_group
from connectors.config import Source
from connectors.kafka.client import Cluster, OffsetGone, Producer, Reader, Record
from connectors.kafka.tail import PolicyTail
from connectors.kafka.terminals import UnknownRecord, terminal, unreadable
from connectors.records import (
    HEADER_WRITER,
    Announcement,
    Closed,
    Coordinate,
    Group,
    Manifest,
    Version,
    parse_group_id,
)
from trainer.accounts import Accounts, LedgerBroken
from trainer.actions import FILTERED, drop_reasons, drops, listed
from trainer.ages import ages_of
from trainer.feed_state import Counts, Entry, FeedState
from trainer.recovery import Recovered
from trainer.step_input import StepInput

log = logging.getLogger(__name__)

WRITER: Final = "shadow"
INCARNATIONS: Final = 1 << 31
"""More than there are."""
POLL_S: Final = 0.2
MAX_FETCHED: Final = 100
"""Records asked for at once; the next ones come when these are used up."""


@dataclass(slots=True)
class _Partition:
    """`trajectories`, one partition: `read` is the next offset to observe."""

    reader: Reader
    read: int
    fetched: deque[Record] = field(default_factory=deque)


class Merge:
    """What a shadow trainer takes its steps from, in place of a feed. One thread.

    `own`: the shadow's namespace, where dead letters go. It goes on from the checkpoint's state in
    `recovered`; the steps after that are merged again, and compared. `at_end` is called when
    everything in the log is merged; None waits for more."""

    def __init__(
        self,
        own: Cluster,
        source: Source,
        recovered: Recovered,
        *,
        batch_size: int,
        untrainable: Callable[[Group], str | None] = lambda group: None,
        no_signal: Callable[[Group], bool] = lambda group: False,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        """OffsetGone when retention passed what is needed, LedgerBroken when the log is not the one
        that the steps were merged from."""
        state = recovered.state
        self._own, self._source = own, source
        self._batch_size, self._at_end = batch_size, at_end
        self._untrainable, self._no_signal = untrainable, no_signal
        granted, trained = (replace(own, namespace=n) for n in (source.grants, source.namespace))
        self._accounts = Accounts(state, granted.topic("prompts"))
        self._policy_offset, self._epoch = state.policy_offset, state.epoch
        self._announced: deque[tuple[int, Announcement]] = deque()
        self._batch: list[tuple[Coordinate, Group]] = []
        self._groups: dict[str, Group] = {}  # of arrived ones, some: the others are read again
        self._said: dict[str, str | None] = {}  # by manifests: trained (None), or why dropped
        self._version = state.version
        self._excluded = {
            group_id: fork.incarnation
            for fork in recovered.chain.forks
            for group_id in fork.excluded
        }
        topic = trained.topic("trajectories")
        with ExitStack() as clients:
            opened = clients.enter_context
            self._producer = opened(closing(Producer(own)))
            self._points = opened(closing(Reader(own, topic, {})))
            self._tail = opened(
                closing(PolicyTail(granted, offset=self._policy_offset, epoch=self._epoch))
            )
            self._partitions = [
                _Partition(opened(closing(Reader(own, topic, {p: read}))), read)
                for p, read in enumerate(state.read)
            ]
            self._repeat(recovered.manifests)
            self._clients = clients.pop_all()
        self._version = recovered.version

    def take(self, timeout_s: float) -> StepInput | None:
        """The next step; None when the log has none within `timeout_s`. OffsetGone when retention
        was faster, LedgerBroken when a record is not the one that was read."""
        if not self._fill(time.monotonic() + timeout_s):
            return None
        version = self._version
        records, groups, dropped = self._close()
        return StepInput(
            step=self._version.number,
            version=version,
            records=records,
            groups=groups,
            dropped=listed(dropped),
            actions=drops(dropped),
            snapshot=self.state,
            ages=ages_of(groups, version, {}),
        )

    @property
    def state(self) -> FeedState:
        """After the last step."""
        return FeedState(
            version=self._version,
            published=None,
            digest="",
            epoch=self._epoch,
            read=tuple(partition.read for partition in self._partitions),
            policy_offset=self._policy_offset,
            policy_name=WRITER,
            **self._accounts.fields(),
        )

    @property
    def step(self) -> int:
        """The last one."""
        return self._version.number

    @property
    def counts(self) -> Counts:
        """Of the steps that closed; `granted` counts prompts looked at."""
        counts = self._accounts.counts()
        return msgspec.structs.replace(counts, trained=counts.trained - len(self._batch))

    def close(self) -> None:
        self._clients.close()

    # ------------------------------------------------------------------------------------- steps
    def _repeat(self, manifests: Sequence[Manifest]) -> None:
        """Merges what was trained after the checkpoint once more."""
        for manifest in manifests:
            self._said |= {
                **drop_reasons(manifest),
                **dict.fromkeys(r.group_id for r in manifest.records),
            }
        for manifest in manifests:
            self._version = Version(manifest.version.incarnation, manifest.step - 1)
            while not self._fill(time.monotonic() + POLL_S):
                if self._is_end():
                    raise LedgerBroken(f"the log has no records for step {manifest.step} any more")
            records, *_ = self._close()
            if records != manifest.records:
                other = next(
                    (a for a, b in zip(records, manifest.records, strict=False) if a != b), records
                )
                raise LedgerBroken(
                    f"step {manifest.step} trained other records than the log now gives ({other}): "
                    f"it is not the log of {self._source.run} that this shadow began on, or it now "
                    "filters otherwise"
                )
        self._said = {}

    def _close(self) -> tuple[tuple[Coordinate, ...], tuple[Group, ...], dict[str, str]]:
        """Ends the step that is full: its records, their groups, and what was dropped since the
        last one for what reason."""
        records = tuple(record for record, _ in self._batch)
        groups = tuple(group for _, group in self._batch)
        self._batch = []
        accounts = self._accounts
        dropped = dict(accounts.dropped)
        accounts.dropped.clear()
        accounts.forget_refunds(tuple(accounts.refunded))
        self._version = Version(self._version.incarnation, self._version.number + 1)
        return records, groups, dropped

    def _fill(self, deadline: float) -> bool:
        """Whether the step is full by then."""
        while len(self._batch) < self._batch_size:
            if not self._advance() and self._at_end is not None and self._is_end():
                self._at_end()
                return False
            if time.monotonic() > deadline:
                return len(self._batch) == self._batch_size
        return True

    # -------------------------------------------------------------------------------- the merging
    def _advance(self) -> bool:
        """Brings the head on; False when the log has nothing for it yet."""
        accounts = self._accounts
        head = next(iter(accounts.open.values()), None)
        if head is None:
            return self._grant(POLL_S)
        if self._excluded.get(head.group_id, INCARNATIONS) <= self._version.incarnation:
            return accounts.drop(head.group_id, FILTERED)
        if head.coordinate is not None:
            return self._choose(head, head.coordinate)
        if self._is_absent(head):
            accounts.close(head.group_id, "no_record")
            return True
        return self._read(head.partition)

    def _choose(self, head: Entry, record: Coordinate) -> bool:
        """Takes the head into the step, or drops it."""
        group = self._group(record)
        if (reason := self._refused(group, record)) is not None:
            return self._accounts.drop(head.group_id, reason)
        self._accounts.settle(head, "trained", read=True)
        self._batch.append((record, group))
        return True

    def _refused(self, group: Group, record: Coordinate) -> str | None:
        """Why it enters no step: of one that a manifest names, what that says."""
        if group.group_id in self._said:
            return self._said[group.group_id]
        if (why := self._untrainable(group)) is not None:
            log.warning("%s cannot be trained: %s", group.group_id, why)
            self._dead_letter(self._read_at(record), CorruptRecord(why))
            return "malformed"
        return FILTERED if self._no_signal(group) else None

    def _grant(self, timeout_s: float) -> bool:
        """Opens what the next announcement grants; False when there is none yet."""
        if not self._announced:
            self._announced += self._tail.poll(timeout_s)
        if not self._announced:
            return False
        offset, announcement = self._announced.popleft()
        self._accounts.grant(announcement.limits, announcement.version)
        self._policy_offset, self._epoch = offset + 1, announcement.epoch
        return True

    def _is_absent(self, head: Entry) -> bool:
        limits, ends, p = self._source.limits, self._source.ends, head.partition
        return bool(limits) and head.offset < limits[p] and self._partitions[p].read >= ends[p]

    def _read(self, p: int) -> bool:
        """Takes in the next record of partition `p`; False when there is none yet."""
        partition = self._partitions[p]
        if not partition.fetched:
            with _advice():
                partition.fetched += partition.reader.poll(POLL_S, MAX_FETCHED)
        if not partition.fetched:
            passed = partition.reader.positions()[p]  # offsets without a record
            moved, partition.read = passed > partition.read, max(partition.read, passed)
            return moved
        record = partition.fetched.popleft()
        self._take_in(record)
        partition.read = record.offset + 1
        return True

    def _take_in(self, record: Record) -> None:
        accounts, at = self._accounts, (record.partition, record.offset)
        self._grant_before((record.key or b"").decode(errors="replace"))
        try:
            ended = terminal(record)
        except (CorruptRecord, UnknownRecord) as error:
            group_id = (record.key or b"").decode(errors="replace")
            if accounts.close(group_id, "malformed") or not accounts.granted(group_id):
                self._dead_letter(record, error)
            return
        if isinstance(ended, Closed):
            accounts.close(ended.group_id, ended.reason)
            return
        coordinate = Coordinate(*at, checksum(record.value), ended.group_id)
        entry = accounts.arrive(coordinate, ended.oldest, ended.newest, len(ended.trajectories))
        if entry is not None and len(self._groups) < 2 * self._batch_size:
            self._groups[ended.group_id] = ended

    def _grant_before(self, group_id: str) -> None:
        """A terminal lies in the log after the grant of its prompt: opens it."""
        try:
            prompt = parse_group_id(group_id)
        except ValueError:
            return
        limits = self._accounts.limits
        if prompt.topic != self._accounts.prompts_topic or prompt.partition >= len(limits):
            return
        while prompt.offset >= limits[prompt.partition]:
            if not self._grant(POLL_S) and self._tail.position >= self._tail.end():
                return  # never granted: it only counts

    def _is_end(self) -> bool:
        """Whether the log holds nothing more for the head."""
        head = next(iter(self._accounts.open.values()), None)
        if head is None:
            return not self._announced and self._tail.position >= self._tail.end()
        partition = self._partitions[head.partition]
        end = partition.reader.ends()[head.partition]
        return not partition.fetched and partition.reader.positions()[head.partition] >= end

    # -------------------------------------------------------------------------------- the records
    def _group(self, record: Coordinate) -> Group:
        if (held := self._groups.pop(record.group_id, None)) is not None:
            return held
        try:
            return decode_group(self._read_at(record).value, record.crc)
        except CorruptRecord as error:
            raise LedgerBroken(
                f"trajectories/{record.partition}/{record.offset} is not the record it was: {error}"
            ) from error

    def _read_at(self, record: Coordinate) -> Record:
        with _advice():
            return self._points.read_at(record.partition, record.offset)

    def _dead_letter(self, record: Record, error: CorruptRecord | UnknownRecord) -> None:
        _, letter = unreadable(self._own, record, error)
        self._producer.append(
            self._own.topic("dead-letters"),
            record.partition,
            letter.value,
            key=letter.key.encode(),
            headers={**letter.headers, HEADER_WRITER: WRITER},
        )


@contextmanager
def _advice() -> Iterator[None]:
    try:
        yield
    except OffsetGone as error:
        raise OffsetGone(
            f"{error}; this shadow cannot go on: start another one in a new folder, which begins "
            "at what is left"
        ) from error
