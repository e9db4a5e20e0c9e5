"""The ledger: what is granted, arrived, trained and closed, as a deterministic state machine.

`FeedCore` has no clock, no I/O and no randomness: its state is a function of the state it started
from and the calls made since. `snapshot()` is that state as a `FeedState`, for the checkpoint.
Enter: announcements read from (or just written to) `policy`, terminals read from `trajectories`,
manifests read from `steps`. Leave: announcements to write and closed steps.

It promises that each granted prompt offset is open, trained or closed, exactly one of them; that
the first terminal of an offset counts and later ones are only counted; and that folding `policy`
and `steps` over an older snapshot (`recover`) gives every group the reservation it had.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from connectors.records import (
    Announcement,
    Coordinate,
    Manifest,
    Origin,
    Version,
    parse_group_id,
)
from operators.staleness.types import (
    Announced,
    Arrived,
    Closed,
    Committed,
    Event,
    Granted,
    Ledger,
    OpenGroup,
    StalenessPolicy,
)
from trainer.feed_state import UNREAD, ClosedStep, Counts, Entry, FeedState, fresh
from trainer.frontier import Frontier

__all__ = ["ClosedStep", "FeedCore", "FeedState", "LedgerBroken", "fresh", "recover"]


DROP_REASON = "stale"


class LedgerBroken(RuntimeError):
    """The log contradicts the ledger, or a policy broke its contract."""


class FeedCore:
    """The ledger of one run. `prompts_topic` is the full name: group ids start with it."""

    def __init__(
        self,
        policy: StalenessPolicy[Any],
        state: FeedState,
        *,
        prompts_topic: str,
        batch_size: int,
        group_size: int = 1,
    ) -> None:
        self.policy = policy
        self.prompts_topic = prompts_topic
        self.batch_size = batch_size
        self.group_size = group_size
        self.version = state.version
        self.published = state.published
        self.digest = state.digest
        self.epoch = state.epoch
        self.read = list(state.read)
        self.policy_offset = state.policy_offset
        self.limits = list(state.limits)
        self.open = {entry.group_id: entry for entry in state.open}
        self.committed: dict[str, None] = {}  # in the order the policy chose
        self._frontiers = [
            Frontier(at, above) for at, above in zip(state.frontier, state.settled, strict=True)
        ]
        self._unread: dict[str, UNREAD] = dict(state.unread)
        self._refunded = list(state.refunded)
        self._dropped = list(state.dropped)
        self._cancelled = set(state.cancelled)
        self._unpublished = list(state.unpublished)
        self._num_admitted = state.num_admitted
        self._num_arrived = state.num_arrived
        self._counts = Counter(
            {
                name: getattr(state.counts, name)
                for name in ("granted", "trained", "closed", "dropped", "duplicates", "ungranted")
            }
        )
        self._by_reason = Counter(state.counts.closed_by_reason)
        self._policy_state = self._resume_policy(state)

    # ------------------------------------------------------------------------------------ grants
    def propose(
        self, ends: Sequence[int], *, epoch: int, published: tuple[Version, str] | None = None
    ) -> Announcement | None:
        """The announcement that is due, or None when it would say nothing new. `ends`: end offset
        of each prompt partition; `published`: a version (with its digest) that engines now hold.

        Credits go round robin to the partitions that still hold ungranted prompts, so an idle one
        neither hoards credit nor starves the others. Changes nothing: apply the announcement, once
        it is in the log, like any other."""
        version, digest = published or (self.published, self.digest)
        if version is None:
            return None
        state = self.policy.observe(self._policy_state, Announced(version))
        ledger = self.ledger(published=version)
        limits = self._spread(self._in_groups(self.policy.credits(state, ledger)), ends)
        cancels = tuple(
            c for c in self.policy.cancel(state, ledger) if c.group_id not in self._cancelled
        )
        said = (self.published, self.digest, self.epoch, tuple(self.limits))
        if said == (version, digest, epoch, limits) and not cancels:
            return None
        return Announcement(
            epoch=epoch,
            version=version,
            digest=digest,
            limits=limits,
            cancels=cancels,
            closed=tuple(self._refunded),
        )

    def credits(self) -> int:
        """Groups that could be granted now if there were prompts."""
        if self.published is None:
            return 0
        return self._in_groups(self.policy.credits(self._policy_state, self.ledger()))

    def _in_groups(self, credits: int) -> int:
        if self.policy.unit == "trajectory":
            return credits // self.group_size
        return credits * self.batch_size if self.policy.unit == "batch" else credits

    def apply_announcement(self, offset: int, announcement: Announcement) -> None:
        """Folds one record of `policy`, read back or just written. In order: refunds it counts
        that were not observed yet, its version, the groups it grants (by partition, then offset).
        Records already applied and those of a lower epoch change nothing."""
        if offset < self.policy_offset:
            return
        self.policy_offset = offset + 1
        if announcement.epoch < self.epoch:
            return
        self.epoch = announcement.epoch
        for group_id in announcement.closed:
            self._close_unread(group_id)
        listed = set(announcement.closed)
        self._refunded = [g for g in self._refunded if g not in listed]
        self._observe(Announced(announcement.version))
        self.published, self.digest = announcement.version, announcement.digest
        self._unpublished = [u for u in self._unpublished if u[0] > announcement.version]
        self._grant(announcement)
        self._cancelled.update(c.group_id for c in announcement.cancels if c.group_id in self.open)

    def _grant(self, announcement: Announcement) -> None:
        if len(announcement.limits) != len(self.limits):
            raise LedgerBroken(
                f"an announcement limits {len(announcement.limits)} prompt partitions; "
                f"this run has {len(self.limits)}"
            )
        for partition, limit in enumerate(announcement.limits):
            if limit < self.limits[partition]:
                raise LedgerBroken(
                    f"the limit of prompts/{partition} went back from {self.limits[partition]} "
                    f"to {limit}"
                )
            for offset in range(self.limits[partition], limit):
                group_id = str(Origin(self.prompts_topic, partition, offset))
                self.open[group_id] = Entry(
                    group_id=group_id,
                    partition=partition,
                    offset=offset,
                    oldest=announcement.version,
                    newest=None,
                    admitted_at=announcement.version,
                    order=self._num_admitted,
                )
                self._num_admitted += 1
                self._counts["granted"] += 1
                self._observe(Granted(group_id, announcement.version))
            self.limits[partition] = limit

    def _spread(self, credits: int, ends: Sequence[int]) -> tuple[int, ...]:
        limits, turn = list(self.limits), self._counts["granted"]
        room = sum(max(0, end - limit) for end, limit in zip(ends, limits, strict=True))
        for _ in range(min(credits, room)):
            while limits[turn % len(limits)] >= ends[turn % len(limits)]:
                turn += 1
            limits[turn % len(limits)] += 1
            turn += 1
        return tuple(limits)

    # --------------------------------------------------------------------------------- terminals
    def arrived(
        self, coordinate: Coordinate, oldest: Version | None, newest: Version | None, num_rows: int
    ) -> bool:
        """A scored group was read at `coordinate`. True if it is the group's first terminal: it is
        ready now, and its true oldest version replaces the bound of its grant."""
        self.passed(coordinate.partition, coordinate.offset)
        entry = self._first_terminal(coordinate.group_id, None)
        if entry is None:
            return False
        entry = msgspec.structs.replace(
            entry,
            oldest=oldest if oldest is not None else entry.oldest,
            newest=newest if newest is not None else entry.oldest,
            ready_order=self._num_arrived,
            coordinate=coordinate,
            num_rows=num_rows,
        )
        self._num_arrived += 1
        self.open[entry.group_id] = entry
        self._observe(Arrived(entry.group_id, entry.oldest, entry.newest or entry.oldest))
        return True

    def closed(self, group_id: str, reason: str, *, at: tuple[int, int] | None = None) -> bool:
        """A `closed` terminal was read (`at` its partition and offset). True if it is the group's
        first terminal: its credit returns."""
        if at is not None:
            self.passed(*at)
        entry = self._first_terminal(group_id, reason)
        if entry is None:
            return False
        self._by_reason[reason] += 1
        self._settle(entry, "closed", read=True)
        self._refunded.append(group_id)
        self._observe(Closed(group_id, reason))
        return True

    def drop(self, group_id: str, reason: str = DROP_REASON) -> bool:
        """The feed gives up an open group, arrived or not: refunded like a closed one and listed in
        the next step's manifest. False if it is not open."""
        entry = self.open.get(group_id)
        if entry is None or group_id in self.committed:
            return False
        self._by_reason[reason] += 1
        self._counts["dropped"] += 1
        self._settle(entry, "dropped", read=entry.coordinate is not None)
        self._dropped.append(group_id)
        self._refunded.append(group_id)
        self._observe(Closed(group_id, reason))
        return True

    def passed(self, partition: int, offset: int) -> None:
        """The record at that offset of `trajectories` was read, whatever it was."""
        self.read[partition] = max(self.read[partition], offset + 1)

    def granted(self, group_id: str) -> bool:
        """Whether `group_id` names a prompt offset that was ever granted."""
        try:
            origin = parse_group_id(group_id)
        except ValueError:
            return False
        return (
            origin.topic == self.prompts_topic
            and 0 <= origin.partition < len(self.limits)
            and 0 <= origin.offset < self.limits[origin.partition]
        )

    def _first_terminal(self, group_id: str, reason: str | None) -> Entry | None:
        if not self.granted(group_id):
            self._counts["ungranted"] += 1
            return None
        if group_id in self._unread:
            self._read_again(group_id, self._unread.pop(group_id), reason)
            return None
        entry = self.open.get(group_id)
        if entry is None or entry.coordinate is not None:
            self._counts["duplicates"] += 1
            return None
        return entry

    def _read_again(self, group_id: str, ended: UNREAD, reason: str | None) -> None:
        """The first terminal of a group that an announcement or manifest settled before it was read
        (`reason` None: a scored group)."""
        self._num_arrived += reason is None
        if ended == "trained" and reason is not None:
            raise LedgerBroken(f"{group_id} was trained, but its first terminal says {reason}")
        if ended != "closed":
            return
        self._by_reason[reason or DROP_REASON] += 1
        if reason is None:  # scored, yet refunded: the feed that announced it had dropped it
            self._counts["dropped"] += 1
            self._dropped.append(group_id)

    def _close_unread(self, group_id: str) -> None:
        """An announcement counts a refund this ledger has not observed."""
        if not self.granted(group_id):
            raise LedgerBroken(f"an announcement refunds {group_id}, which was never granted")
        if group_id in self.committed:
            raise LedgerBroken(f"an announcement refunds {group_id}, which the open step trains")
        entry = self.open.get(group_id)
        if entry is None:
            return
        if entry.coordinate is not None:
            self.drop(group_id)
            return
        self._settle(entry, "closed", read=False)
        self._observe(Closed(group_id, ""))

    # ------------------------------------------------------------------------------------- steps
    def choose(self) -> ClosedStep | None:
        """Commits what the policy chooses; the closed step once it is full."""
        choice = self.policy.choose(self._policy_state, self.ledger())
        for group_id in choice.drop:
            self.drop(group_id)
        for group_id in choice.commit:
            entry = self.open.get(group_id)
            if entry is None or entry.coordinate is None or group_id in self.committed:
                raise LedgerBroken(f"{self.policy.name} committed {group_id}, which is not ready")
            if len(self.committed) == self.batch_size:
                raise LedgerBroken(f"{self.policy.name} committed more than the step's free slots")
            self.committed[group_id] = None
            self._observe(Committed(group_id, self.version.number + 1))
        return self._close_step() if len(self.committed) == self.batch_size else None

    def _close_step(self) -> ClosedStep:
        entries = sorted((self.open[g] for g in self.committed), key=lambda entry: entry.order)
        records = tuple(e.coordinate for e in entries if e.coordinate is not None)
        version, dropped = self.version, tuple(self._dropped)
        for entry in entries:
            self._settle(entry, "trained", read=True)
        self.committed, self._dropped = {}, []
        self._open_next(Version(version.incarnation, version.number + 1), len(entries))
        return ClosedStep(
            step=version.number + 1,
            version=version,
            records=records,
            dropped=dropped,
            snapshot=self.snapshot(),
        )

    def apply_manifest(self, manifest: Manifest) -> None:
        """Commits exactly what a step on the chain trained, whatever the policy would choose.
        Manifests of steps before the open one change nothing."""
        if manifest.step <= self.version.number:
            return
        if manifest.step != self.version.number + 1 or self.committed:
            raise LedgerBroken(
                f"manifest {manifest.step} cannot follow step {self.version.number}"
                + (" with a step half filled" if self.committed else "")
            )
        for record in manifest.records:
            entry = self.open.get(record.group_id)
            if entry is None or entry.coordinate not in (None, record):
                raise LedgerBroken(
                    f"step {manifest.step} trained {record.group_id} at trajectories/"
                    f"{record.partition}/{record.offset}; in the ledger it is "
                    + ("not open" if entry is None else f"at {entry.coordinate}")
                )
            self._observe(Committed(record.group_id, manifest.step))
            self._settle(entry, "trained", read=entry.coordinate is not None)
        for group_id in manifest.dropped:
            self._drop_recorded(group_id)
        self._open_next(manifest.version, len(manifest.records))

    def _drop_recorded(self, group_id: str) -> None:
        """A manifest lists a drop, so the next one need not."""
        if self.drop(group_id) or group_id in self._dropped:
            self._dropped.remove(group_id)
        elif self._unread.get(group_id) == "closed":
            self._unread[group_id] = "dropped"
            self._by_reason[DROP_REASON] += 1
            self._counts["dropped"] += 1

    def _open_next(self, version: Version, num_groups: int) -> None:
        self._unpublished.append((version, num_groups))
        self.version = version

    # ------------------------------------------------------------------------------------- state
    def ledger(self, *, published: Version | None = None) -> Ledger:
        """What the policy is asked with; `published` as if that version were announced."""
        at = published or self.published
        return Ledger(
            version=self.version,
            batch_size=self.batch_size,
            free_slots=self.batch_size - len(self.committed),
            group_size=self.group_size,
            groups=tuple(
                _open_group(entry, self.group_size)
                for entry in self.open.values()
                if entry.group_id not in self.committed
            ),
            num_granted=self._counts["granted"],
            num_trained=self._counts["trained"],
            num_closed=self._counts["closed"],
            num_unpublished=sum(n for v, n in self._unpublished if at is None or v > at),
        )

    def snapshot(self) -> FeedState:
        """The state; only between steps (LedgerBroken while the open one is partly filled)."""
        if self.committed:
            raise LedgerBroken("a snapshot is taken between steps, not while one fills")
        return FeedState(
            version=self.version,
            published=self.published,
            digest=self.digest,
            epoch=self.epoch,
            read=tuple(self.read),
            policy_offset=self.policy_offset,
            limits=tuple(self.limits),
            frontier=tuple(f.at for f in self._frontiers),
            settled=tuple(f.above for f in self._frontiers),
            open=tuple(self.open.values()),
            unread=dict(self._unread),
            refunded=tuple(self._refunded),
            dropped=tuple(self._dropped),
            cancelled=tuple(sorted(self._cancelled)),
            unpublished=tuple(self._unpublished),
            num_admitted=self._num_admitted,
            num_arrived=self._num_arrived,
            counts=self.counts(),
            policy_name=self.policy.name,
            policy=msgspec.to_builtins(self._policy_state),
        )

    def counts(self) -> Counts:
        return Counts(**self._counts, closed_by_reason=dict(self._by_reason))

    def audit_counts(self) -> dict[str, Any]:
        """The counts, with `open` and `credit_balance` (0 unless something leaked)."""
        counts = msgspec.structs.asdict(self.counts())
        settled = counts["trained"] + counts["closed"]
        balance = counts["granted"] - settled - len(self.open)
        return {**counts, "open": len(self.open), "credit_balance": balance}

    @property
    def num_dropped(self) -> int:
        return self._counts["dropped"]

    def is_settled(self, partition: int, offset: int) -> bool:
        return offset in self._frontiers[partition]

    def _settle(self, entry: Entry, how: UNREAD, *, read: bool) -> None:
        """`read`: whether the group's terminal was."""
        del self.open[entry.group_id]
        if not read:
            self._unread[entry.group_id] = how
        self._cancelled.discard(entry.group_id)
        self._frontiers[entry.partition].add(entry.offset)
        self._counts["trained" if how == "trained" else "closed"] += 1

    def _observe(self, event: Event) -> None:
        self._policy_state = self.policy.observe(self._policy_state, event)

    def _resume_policy(self, state: FeedState) -> Any:
        """The policy's state from the snapshot; under another policy than the snapshot's, what it
        makes of the groups that are open."""
        first = self.policy.start()
        if state.policy_name == self.policy.name:
            return msgspec.convert(state.policy, type=type(first))
        events: list[Event] = [] if state.published is None else [Announced(state.published)]
        for entry in state.open:
            events.append(Granted(entry.group_id, entry.admitted_at))
            if entry.coordinate is not None:
                events.append(Arrived(entry.group_id, entry.oldest, entry.newest or entry.oldest))
        for event in events:
            first = self.policy.observe(first, event)
        return first


def recover(
    core: FeedCore,
    announcements: Iterable[tuple[int, Announcement]],
    manifests: Iterable[Manifest],
) -> None:
    """Brings `core`, built from a checkpoint's snapshot, up to the log: `announcements` are those
    of `policy` from the snapshot's offset up to this trainer's `Begin`, `manifests` the chain after
    the checkpoint. A manifest comes after every announcement of a version below its own: those
    granted what it trains. Terminals are read again afterwards, from the snapshot's offsets."""
    waiting = deque(manifests)
    for offset, announcement in announcements:
        while waiting and waiting[0].version <= announcement.version:
            core.apply_manifest(waiting.popleft())
        core.apply_announcement(offset, announcement)
    for manifest in waiting:
        core.apply_manifest(manifest)


def _open_group(entry: Entry, group_size: int) -> OpenGroup:
    running = entry.coordinate is None
    return OpenGroup(
        group_id=entry.group_id,
        partition=entry.partition,
        offset=entry.offset,
        oldest=entry.oldest,
        newest=entry.newest,
        admitted_at=entry.admitted_at,
        state="running" if running else "ready",
        order=entry.order,
        ready_order=entry.ready_order,
        num_running=group_size if running else 0,
    )
