"""The ledger: what is granted, arrived, trained and closed, as a deterministic state machine.

`FeedCore` has no clock, no I/O and no randomness: its state is a function of the state it started
from and the calls made since. `snapshot()` is that state as a `FeedState`, for the checkpoint.
Enter: announcements read from (or just written to) `policy`, terminals read from `trajectories`,
manifests and forks read from `steps`. Leave: announcements to write and closed steps.

Its accounts (`trainer.accounts`) know each granted group; here is what the policy makes of them.
Groups of live traffic, which nobody grants and the policy never sees, are `trainer.traffic`'s: a
step is full when the policy's part of it is, or, where it has none, when live traffic fills it.

It promises that folding `policy` and `steps` over an older snapshot (`trainer.refold`) gives every
group the reservation it had. So it does for the state of an auditable policy, which hangs on those
two alone. Another's may also hang on the order of arrivals and on the engines' load: after a
recovery it has seen what arrived since the snapshot later than it did, and goes on from the load
that the snapshot holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from connectors.records import Announcement, Begin, Coordinate, Manifest, Version
from operators.staleness.types import (
    Announced,
    Arrived,
    Closed,
    Committed,
    EngineLoad,
    Event,
    Granted,
    Ledger,
    Requeued,
    StalenessPolicy,
)
from trainer.accounts import Accounts, LedgerBroken
from trainer.actions import FILTERED, STALE, drop_reasons, drops, listed, told
from trainer.feed_state import ClosedStep, FeedState
from trainer.grants import group_credits, spread
from trainer.shown import Shown, resumed
from trainer.traffic import Allowance, Traffic


class FeedCore:
    """The ledger of one run. `accounts` say what each granted group came to; `committed` are those
    of the step that fills, in the order the policy chose; `too_old` what it dropped when it was
    last asked; `actions` what it did since the last step, counted by `holds` and
    `cancels/THEN/REASON`; the closed step counts `drops/REASON` and `traffic/REASON` too.

    `batch_size`: groups a step that the policy grants and chooses; 0: it is asked nothing.
    `allowance`: what live traffic has beside them, None: nothing."""

    def __init__(
        self,
        policy: StalenessPolicy[Any],
        state: FeedState,
        *,
        prompts_topic: str,
        batch_size: int,
        group_size: int = 1,
        allowance: Allowance | None = None,
    ) -> None:
        self.policy = policy
        self.batch_size = batch_size
        self.group_size = group_size
        self.accounts = Accounts(state, prompts_topic)
        self.traffic = Traffic(state.traffic, allowance)
        self.version = state.version
        self.published = state.published
        self.digest = state.digest
        self.epoch = state.epoch
        self.read = list(state.read)
        self.policy_offset = state.policy_offset
        self.lineage = dict(state.lineage)
        self.committed: dict[str, None] = {}
        self.too_old: tuple[str, ...] = ()
        self.actions = Counter(state.actions)
        self._ever_held: set[str] = set()
        self._shown = Shown(group_size)
        self._mask_before: Version | None = None
        self._unpublished = list(state.unpublished)
        self._policy_state = resumed(policy, state)

    # ------------------------------------------------------------------------------------ grants
    def propose(
        self, ends: Sequence[int], *, epoch: int, published: tuple[Version, str] | None = None
    ) -> Announcement | None:
        """The announcement that is due, or None when it would say nothing new. `ends`: end offset
        of each prompt partition; `published`: a version (with its digest) that engines now hold.
        Changes nothing: apply the announcement, once it is in the log, like any other."""
        version, digest = published or (self.published, self.digest)
        if version is None:
            return None
        state = self.policy.observe(self._policy_state, Announced(version))
        ledger = self.ledger(published=version)
        credits, turn = group_credits(self.policy, state, ledger), ledger.num_granted
        limits = spread(credits, self.accounts.limits, ends, turn)
        cancels = tuple(
            cancel
            for cancel in (self.policy.cancel(state, ledger) if self.batch_size else ())
            if self.accounts.may_cancel(cancel, version)
        )
        said = (self.published, self.digest, self.epoch, tuple(self.accounts.limits))
        if said == (version, digest, epoch, limits) and not cancels:
            return None
        return Announcement(
            epoch=epoch,
            version=version,
            digest=digest,
            limits=limits,
            cancels=cancels,
            closed=tuple(self.accounts.refunded),
        )

    def credits(self) -> int:
        """Groups that could be granted now if there were prompts."""
        if self.published is None:
            return 0
        return group_credits(self.policy, self._policy_state, self.ledger())

    def apply_announcement(self, offset: int, announcement: Announcement) -> None:
        """Folds one record of `policy`, read back or just written. In order: refunds it counts
        that were not observed yet, its version, the groups it grants (by partition, then offset),
        its cancels. Records already applied and those of a lower epoch change nothing."""
        if offset < self.policy_offset:
            return
        self.policy_offset = offset + 1
        if announcement.epoch < self.epoch:
            return
        self.epoch = announcement.epoch
        for group_id in announcement.closed:
            self._close_unread(group_id)
        self.accounts.forget_refunds(set(announcement.closed))
        self._observe(Announced(announcement.version))
        self.published, self.digest = announcement.version, announcement.digest
        self._unpublished = [u for u in self._unpublished if u[0] > announcement.version]
        for group_id in self.accounts.grant(announcement.limits, announcement.version):
            self._observe(Granted(group_id, announcement.version))
        for cancel in announcement.cancels:
            if cancel.then == "requeue" and self.accounts.may_cancel(cancel, announcement.version):
                self._observe(Requeued(cancel.group_id, announcement.version))
            self.accounts.cancel(cancel, announcement.version)
            self.actions[f"cancels/{cancel.then}/{cancel.reason}"] += 1

    def loaded(self, load: EngineLoad) -> None:
        """What the engines reported. An auditable policy hears nothing of it."""
        if not self.policy.auditable:
            self._observe(load)

    # --------------------------------------------------------------------------------- terminals
    def awaits(self, group_id: str) -> bool:
        """Whether the next terminal of the group is its first, and no step trained it."""
        books = self.traffic if self.traffic.owns(group_id) else self.accounts
        return books.awaits(group_id)

    def is_open(self, group_id: str) -> bool:
        """Granted, or in the queue, and not ended."""
        return group_id in self.accounts.open or group_id in self.traffic.queue

    def expected(self, group_id: str) -> bool:
        """Whether it is one that was granted, or of live traffic."""
        return self.traffic.owns(group_id) or self.accounts.granted(group_id)

    def arrived(
        self,
        coordinate: Coordinate,
        oldest: Version | None,
        newest: Version | None,
        num_rows: int,
        *,
        drop_reason: str = STALE,
    ) -> bool:
        """A scored group was read at `coordinate`. True if it is the group's first terminal: it is
        ready now, and its true oldest version replaces the bound of its grant. `drop_reason`: what
        it was dropped for, if it was by a feed whose manifest never came. One of live traffic is
        ready if it is in time, too."""
        self.passed(coordinate.partition, coordinate.offset)
        if self.traffic.owns(coordinate.group_id):
            return self.traffic.arrive(coordinate, oldest, self.version, self.lineage)
        entry = self.accounts.arrive(coordinate, oldest, newest, num_rows, drop_reason=drop_reason)
        if entry is None:
            return False
        self._observe(Arrived(entry.group_id, entry.oldest, entry.newest or entry.oldest))
        return True

    def closed(self, group_id: str, reason: str, *, at: tuple[int, int] | None = None) -> bool:
        """A `closed` terminal was read (`at` its partition and offset). True if it is the group's
        first terminal: its credit returns."""
        if at is not None:
            self.passed(*at)
        if self.traffic.owns(group_id):
            return self.traffic.close(group_id, reason)
        if not self.accounts.close(group_id, reason):
            return False
        self._observe(Closed(group_id, reason))
        return True

    def drop(self, group_id: str, reason: str = STALE) -> bool:
        """The feed gives up an open group, arrived or not: listed in the next step's manifest and,
        if it was granted, refunded like a closed one. False if it is not open."""
        if self.traffic.owns(group_id):
            return self.traffic.drop(group_id, reason)
        if group_id in self.committed or not self.accounts.drop(group_id, reason):
            return False
        self._observe(Closed(group_id, reason))
        return True

    def passed(self, partition: int, offset: int) -> None:
        """The record at that offset of `trajectories` was read, whatever it was."""
        self.read[partition] = max(self.read[partition], offset + 1)

    def _close_unread(self, group_id: str) -> None:
        """An announcement counts a refund this ledger has not observed."""
        if not self.accounts.granted(group_id):
            raise LedgerBroken(f"an announcement refunds {group_id}, which was never granted")
        if group_id in self.committed:
            raise LedgerBroken(f"an announcement refunds {group_id}, which the open step trains")
        entry = self.accounts.open.get(group_id)
        if entry is None:
            return
        if entry.coordinate is not None:
            self.drop(group_id)
            return
        self.accounts.settle(entry, "closed", read=False)
        self._observe(Closed(group_id, ""))

    # ------------------------------------------------------------------------------------- steps
    def choose(self) -> ClosedStep | None:
        """Commits what the policy chooses; the closed step once it is full. Live traffic is waited
        for only where there is nothing else."""
        if self.batch_size:
            self._ask()
            full = len(self.committed) == self.batch_size
        else:
            full = len(self.traffic.queue) >= self.traffic.num_places
        return self._close_step() if full else None

    def _ask(self) -> None:
        """Does what the policy chooses."""
        ledger = self.ledger()
        choice = self.policy.choose(self._policy_state, ledger)
        self.too_old, held = choice.drop, frozenset(ledger.held(choice))
        self.actions["holds"] += len(held - self._ever_held)
        self._ever_held |= held
        self._mask_before = max(self._mask_before, choice.mask_before, key=_or_none)
        for group_id in choice.drop:
            self.drop(group_id)
        for group_id in choice.commit:
            entry = self.accounts.open.get(group_id)
            if entry is None or entry.coordinate is None or group_id in self.committed:
                raise LedgerBroken(f"{self.policy.name} committed {group_id}, which is not ready")
            if len(self.committed) == self.batch_size:
                raise LedgerBroken(f"{self.policy.name} committed more than the step's free slots")
            self.committed[group_id] = None
            self._observe(Committed(group_id, self.version.number + 1))

    def _close_step(self) -> ClosedStep:
        entries = sorted(
            (self.accounts.open[g] for g in self.committed), key=lambda entry: entry.order
        )
        granted = tuple(e.coordinate for e in entries if e.coordinate is not None)
        records = granted + self.traffic.take()
        version, dropped = self.version, (self.accounts.dropped, self.traffic.dropped)
        actions, mask_before = +self.actions + drops(*dropped), self._mask_before
        for entry in entries:
            self.accounts.settle(entry, "trained", read=True)
        self.committed, self.accounts.dropped, self.traffic.dropped = {}, {}, {}
        self.actions.clear()
        self._open_next(Version(version.incarnation, version.number + 1), len(entries))
        return ClosedStep(
            step=version.number + 1,
            version=version,
            records=records,
            dropped=listed(*dropped),
            actions=actions,
            mask_before=mask_before,
            snapshot=self.snapshot(),
        )

    def apply_manifest(self, manifest: Manifest) -> None:
        """Commits exactly what a step on the chain trained, whatever the policy would choose, and
        takes off what was done for it: what the log says was done beyond that is the next step's.
        Manifests of steps before the open one change nothing."""
        if manifest.step <= self.version.number:
            return
        if manifest.step != self.version.number + 1 or self.committed:
            raise LedgerBroken(
                f"manifest {manifest.step} cannot follow step {self.version.number}"
                + (" with a step half filled" if self.committed else "")
            )
        num_granted = 0
        for record in manifest.records:
            if self.traffic.owns(record.group_id):
                self.traffic.trained(record)
            else:
                self._trained(record, manifest.step)
                num_granted += 1
        for group_id, reason in drop_reasons(manifest).items():
            if self.traffic.owns(group_id):
                self.traffic.drop_recorded(group_id, reason)
                continue
            self.drop(group_id, reason)
            self.accounts.drop_recorded(group_id, reason)
        self.actions -= told(manifest)
        self._open_next(manifest.version, num_granted)

    def _trained(self, record: Coordinate, step: int) -> None:
        entry = self.accounts.open.get(record.group_id)
        if entry is None or entry.coordinate not in (None, record):
            raise LedgerBroken(
                f"step {step} trained {record.group_id} at trajectories/{record.partition}/"
                f"{record.offset}; in the ledger it is "
                + ("not open" if entry is None else f"at {entry.coordinate}")
            )
        self._observe(Committed(record.group_id, step))
        self.accounts.settle(entry, "trained", read=entry.coordinate is not None)

    def apply_fork(self, begin: Begin) -> None:
        """Folds a begin that forked the run: what it excludes is dropped, and the next step trains
        in its incarnation, unless a later rollback gave that up: then it lies beyond all steps."""
        for group_id in begin.excluded:
            if self.traffic.owns(group_id):
                self.traffic.exclude(group_id)
            else:
                self.drop(group_id, FILTERED)
        if begin.fork is not None and begin.fork.number == self.version.number:
            self.version = Version(begin.incarnation, self.version.number)

    def _open_next(self, version: Version, num_groups: int) -> None:
        self._unpublished.append((version, num_groups))
        self.version = version
        self._ever_held.clear()
        self._mask_before = None

    # ------------------------------------------------------------------------------------- state
    @property
    def policy_state(self) -> Any:
        return self._policy_state

    def num_running(self) -> int:
        """Open groups that have not arrived."""
        return sum(entry.coordinate is None for entry in self.accounts.open.values())

    def num_ready(self) -> int:
        """Arrived ones that the open step has not taken."""
        return len(self.accounts.open) - self.num_running() - len(self.committed)

    def ledger(self, *, published: Version | None = None) -> Ledger:
        """What the policy is asked with; `published` as if that version were announced."""
        at, counts = published or self.published, self.accounts.counts()
        return Ledger(
            version=self.version,
            published=at or self.version,
            batch_size=self.batch_size,
            free_slots=self.batch_size - len(self.committed),
            group_size=self.group_size,
            groups=self._shown.groups(self.accounts.open, self.committed),
            num_granted=counts.granted,
            num_trained=counts.trained,
            num_closed=counts.closed,
            num_unpublished=sum(n for v, n in self._unpublished if at is None or v > at),
            lineage=self.lineage,
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
            unpublished=tuple(self._unpublished),
            actions=dict(+self.actions),
            lineage=dict(self.lineage),
            policy_name=self.policy.name,
            policy=msgspec.to_builtins(self._policy_state),
            traffic=self.traffic.state(),
            **self.accounts.fields(),
        )

    def _observe(self, event: Event) -> None:
        self._policy_state = self.policy.observe(self._policy_state, event)


def _or_none(version: Version | None) -> Version:
    """For comparing: below all others."""
    return Version(-1, -1) if version is None else version
