"""The ledger's surroundings, simulated: logs, sources, engines, a trainer and crashes, in any
interleaving, under any policy."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from connectors.records import (
    Announcement,
    Begin,
    Cancel,
    Closed,
    Coordinate,
    Fork,
    Manifest,
    StepRecord,
    Version,
    decode_as,
    encode,
    parse_group_id,
)
from operators.staleness.lineage import lag, stalest
from operators.staleness.types import StalenessPolicy
from trainer import actions
from trainer.feed_state import ClosedStep, FeedState, fresh
from trainer.ledger import FeedCore
from trainer.overdue import recorded
from trainer.refold import recover
from trainer.step_log import Chain

TOPIC = "test.prompts"


def gid(partition: int, offset: int) -> str:
    return f"{TOPIC}/{partition}/{offset}"


def v(number: int) -> Version:
    return Version(0, number)


def manifest(step: ClosedStep, epoch: int = 0, **more: Any) -> Manifest:
    return Manifest(
        step=step.step,
        epoch=epoch,
        version=Version(step.version.incarnation, step.step),
        records=step.records,
        micro_batches=(),
        seed=0,
        digest_before="",
        digest="",
        dropped=step.dropped,
        metrics=actions.metrics(step.actions),
        **more,
    )


@dataclass(frozen=True)
class Scored:
    """A group in `trajectories`: it has a token of each of the two versions."""

    at: Coordinate
    oldest: Version
    newest: Version


class World:
    """The logs and everything around the feed. The feed is `core`; a crash replaces it. `drops`:
    the policy may drop groups though nothing was rolled back. `no_signal`: which groups are
    filtered when they are read; then some are dropped, too."""

    def __init__(
        self,
        make: Callable[[], StalenessPolicy[Any]],
        batch_size: int,
        num_partitions: int,
        *,
        group_size: int = 1,
        drops: bool = False,
    ) -> None:
        self.make, self.drops = make, drops
        self.no_signal: Callable[[str], bool] = lambda group_id: False
        self.bound = make().bound
        self.batch_size, self.group_size = batch_size, group_size
        self.ends = [0] * num_partitions
        self.trajectories: list[list[Scored | Closed]] = [[] for _ in range(num_partitions)]
        self.policy_log: list[Announcement | int] = []  # an int is the begin of that epoch
        self.steps_log: list[StepRecord] = []
        self.checkpoints: list[bytes] = [encode(fresh(num_partitions))]
        self.min_version: dict[str, Version] = {}  # of granted groups
        self.started: dict[str, Version] = {}
        self.scored: dict[str, tuple[Version, Version]] = {}  # oldest and newest version
        self.orders: list[tuple[Cancel, Version]] = []  # announced, not obeyed yet
        self.num_cancelled: Counter[str] = Counter()  # that running groups obeyed
        self.held: list[Version] = []  # by engines, ever
        self.max_staleness = self.num_masked = 0
        self.excluded: set[str] = set()
        self.limits = [0] * num_partitions
        self.begin()
        self.restart(0)

    @property
    def chain(self) -> Chain:
        found = Chain()
        for offset, record in enumerate(self.steps_log):
            found.observe(offset, record)
        assert found.breaks == []
        return found

    def begin(self, fork: Fork | None = None, excluded: tuple[str, ...] = ()) -> None:
        """Of a new trainer, or of a command that forks the run."""
        self.epoch = len(self.steps_log)
        chain = self.chain
        self.steps_log.append(
            Begin(
                epoch=None,
                writer="w",
                resumed_step=0,
                started_at=0.0,
                incarnation=chain.incarnation if fork is None else chain.highest + 1,
                fork=fork,
                excluded=excluded,
            )
        )
        self.policy_log.append(self.epoch)

    def restart(self, back: int) -> None:
        """A new trainer recovers from the newest checkpoint on the chain but for `back`."""
        self.begin()
        chain = self.chain
        while True:
            state = decode_as(self.checkpoints[-1], FeedState)
            step = state.version.number
            if step <= chain.step and chain.version_at(step) == state.version:
                back -= 1
                if back < 0 or step == 0:
                    break
            self.checkpoints.pop()  # given up, or damaged: also for those who come later
        self.core = self.core_from(state)
        announcements = [
            (offset, record)
            for offset, record in enumerate(self.policy_log)
            if offset >= state.policy_offset and isinstance(record, Announcement)
        ]
        recover(self.core, announcements, chain)
        assert self.core.version == chain.version
        self.core = self.core_from(decode_as(encode(self.core.snapshot()), FeedState))
        self.steps: list[ClosedStep] = []
        self.snapshots: dict[int, bytes] = {}
        self.in_engines: Version | None = None

    def core_from(self, state: FeedState) -> FeedCore:
        return FeedCore(
            self.make(),
            state,
            prompts_topic=TOPIC,
            batch_size=self.batch_size,
            group_size=self.group_size,
        )

    def rollback(self, number: int, excluded: tuple[str, ...]) -> None:
        self.begin(Fork(parent=self.chain.incarnation, number=number, reason="rollback"), excluded)
        self.excluded |= set(excluded)
        self.restart(0)

    def rebuild(self) -> None:
        chain = self.chain
        self.begin(Fork(parent=chain.incarnation, number=chain.step, reason="rebuild"))
        self.restart(0)

    # ---------------------------------------------------------------------------- feed, publisher
    def announce(self, publish: bool, apply: bool = True) -> None:
        if publish:
            self.in_engines = self.chain.version
            self.held.append(self.in_engines)
        if self.in_engines is None:
            return
        said = (self.in_engines, f"digest-{self.in_engines}")
        due = self.core.propose(self.ends, epoch=self.epoch, published=said)
        if due is None:
            return
        self.policy_log.append(due)
        if apply:
            self.core.apply_announcement(len(self.policy_log) - 1, due)
        for partition, limit in enumerate(due.limits):
            assert limit <= self.ends[partition], "granted beyond the end"
            for offset in range(self.limits[partition], limit):
                self.min_version[gid(partition, offset)] = due.version
            self.limits[partition] = limit
        self.orders += [(cancel, due.version) for cancel in due.cancels]
        self.orders += [(Cancel(g, "close", "cancelled"), due.version) for g in due.closed]

    def read(self, partition: int, count: int) -> None:
        core, log = self.core, self.trajectories[partition]
        at = core.read[partition]
        for offset in range(at, min(at + count, len(log))):
            record = log[offset]
            if isinstance(record, Closed):
                core.closed(record.group_id, record.reason, at=(partition, offset))
            else:
                versions = (record.oldest, record.newest)
                oldest = stalest(versions, core.version, core.lineage)
                self.arrive(record, oldest)
            core.passed(partition, offset)

    def arrive(self, record: Scored, oldest: Version | None) -> None:
        core, group_id = self.core, record.at.group_id
        filtered = core.accounts.awaits(group_id) and self.no_signal(group_id)
        reason = actions.FILTERED if filtered else actions.STALE
        core.arrived(record.at, oldest, record.newest, self.group_size, drop_reason=reason)
        if filtered:
            core.drop(group_id, reason)

    def choose(self) -> None:
        step = self.core.choose()
        if step is not None:
            assert len(step.records) == self.batch_size
            self.steps.append(step)

    # ------------------------------------------------------------------------- sources and engine
    def waiting(self) -> list[str]:
        return [g for g in self.min_version if g not in self.started]

    def running(self) -> list[str]:
        done = {g for log in self.trajectories for g in map(group_of, log)}
        return [g for g in self.started if g not in done]

    def start(self, group_id: str, chance: random.Random) -> None:
        """On an engine that holds the grant's version or any newer one that was ever trained."""
        fresh_enough = [held for held in self.held if held >= self.min_version[group_id]]
        self.started[group_id] = chance.choice([fresh_enough[0], chance.choice(fresh_enough)])

    def obey(self) -> None:
        """The rollout stage hears of the oldest order that it has not heard of."""
        if not self.orders:
            return
        cancel, version = self.orders.pop(0)
        if any(cancel.group_id == group_of(r) for log in self.trajectories for r in log):
            return
        if cancel.then == "close":
            self.started.setdefault(cancel.group_id, version)
            self.end(cancel.group_id, cancel.reason)
        elif self.min_version[cancel.group_id] < version:
            self.min_version[cancel.group_id] = version
            self.started.pop(cancel.group_id, None)
        self.num_cancelled[cancel.then] += 1

    def end(self, group_id: str, reason: str | None, chance: random.Random | None = None) -> None:
        """Its newest token is of a version that engines got after its first, by `chance`."""
        partition = parse_group_id(group_id).partition
        log = self.trajectories[partition]
        if reason is not None:
            log.append(Closed(group_id=group_id, reason=reason))
            return
        oldest = self.started[group_id]
        newer = [v for v in self.held if v.incarnation == oldest.incarnation and v >= oldest]
        newest = chance.choice([oldest, newer[-1]]) if chance is not None else oldest
        self.scored.setdefault(group_id, (oldest, newest))
        log.append(Scored(Coordinate(partition, len(log), 7, group_id), *self.scored[group_id]))

    # ------------------------------------------------------------------------------------ trainer
    def train(self) -> None:
        step, chain = self.steps.pop(0), self.chain
        assert step.version == chain.version
        trained = {r.group_id for m in chain.manifests for r in m.records}
        for record in step.records:
            assert record.group_id not in trained | self.excluded, "trained twice, or excluded"
            for version in self.scored[record.group_id]:
                if step.mask_before is not None and version < step.mask_before:
                    continue
                staleness = lag(step.version, version, chain.lineage)
                self.max_staleness = max(self.max_staleness, staleness)
                assert staleness >= 0
                assert self.bound is None or staleness <= self.bound, (
                    f"{record.group_id} is {staleness} old"
                )
        versions = {v for r in step.records for v in self.scored[r.group_id]}
        masked = {v: 0.0 for v in versions if step.mask_before and v < step.mask_before}
        self.num_masked += len(masked)
        self.steps_log.append(manifest(step, self.epoch, settings=recorded(masked)))
        self.snapshots[step.step] = encode(step.snapshot)

    def check(self) -> None:
        core = self.core
        counts = core.accounts.audit_counts()
        assert counts["credit_balance"] == 0
        if not self.drops and all(f.reason == "rebuild" for f in self.chain.lineage.values()):
            assert counts["dropped"] == 0
        for partition, limit in enumerate(core.accounts.limits):
            for offset in range(limit):
                is_open = gid(partition, offset) in core.accounts.open
                assert is_open != core.accounts.is_settled(partition, offset)
            assert not core.accounts.is_settled(partition, limit)

    def drain(self) -> None:
        """Everything goes on until nothing moves; only the lack of prompts may be the cause."""
        for turn in range(10_000):
            before = self.progress()
            self.announce(publish=True)
            while self.orders:
                self.obey()
            for group_id in self.waiting():
                self.start(group_id, random.Random(turn))
            for k, group_id in enumerate(self.running()):
                self.end(group_id, "reward_failed" if (turn + k) % 5 == 0 else None)
            for partition in range(len(self.ends)):
                self.read(partition, 10_000)
            self.choose()
            if self.steps:
                self.train()
            self.check()
            if self.progress() == before:
                break
        assert list(self.core.accounts.limits) == self.ends, "prompts remain, and nothing moves"
        self.account()

    def progress(self) -> tuple[Any, ...]:
        return (
            len(self.steps_log),
            tuple(self.limits),
            len(self.started),
            len(self.core.committed),
            self.core.accounts.audit_counts(),
        )

    def account(self) -> None:
        """Each granted group has one fate, by the log alone and by the ledger."""
        chain = self.chain
        trained = Counter(r.group_id for m in chain.manifests for r in m.records)
        assert set(trained.values()) <= {1}
        first: dict[str, Any] = {}
        for log in self.trajectories:
            for record in log:
                first.setdefault(group_of(record), record)
        closed = {g for g, record in first.items() if isinstance(record, Closed)}
        assert not closed & set(trained)
        counts = self.core.accounts.audit_counts()
        assert counts["trained"] == len(trained)
        ended = closed | set(trained)
        dropped = set(self.min_version) - set(self.core.accounts.open) - ended
        assert counts["closed"] == len(closed) + len(dropped)
        assert counts["dropped"] == len(dropped)
        assert sum(counts["dropped_by_reason"].values()) == len(dropped)
        assert sum(counts["closed_by_reason"].values()) == len(closed) + len(dropped)
        said = Counter(first[g].reason for g in closed)
        assert self.core.accounts.counts().ended_by_reason == said
        assert set(self.core.accounts.open) <= set(self.min_version) - ended
        listed = [g for m in chain.manifests for g in m.dropped]
        assert len(listed) == len(set(listed))
        assert dropped <= {*listed, *self.core.accounts.dropped}
        self.account_actions(chain)
        extra = sum(len(log) for log in self.trajectories) - len(first)
        assert counts["duplicates"] == extra
        assert counts["ungranted"] == 0

    def account_actions(self, chain: Chain) -> None:
        """What was done is in the manifests, each once, or will be in the next one."""
        done = sum(map(actions.told, chain.manifests), +self.core.actions)
        done += actions.drops(self.core.accounts.dropped)
        unlisted = self.core.accounts.dropped
        num_dropped = sum(len(m.dropped) for m in chain.manifests) + len(unlisted)
        assert sum(n for name, n in done.items() if name.startswith("drops/")) == num_dropped
        cancels = Counter(
            f"cancels/{cancel.then}/{cancel.reason}"
            for said in self.policy_log
            if isinstance(said, Announcement)
            for cancel in said.cancels
        )
        assert {name: n for name, n in done.items() if name.startswith("cancels/")} == cancels


def group_of(record: Scored | Closed) -> str:
    return record.group_id if isinstance(record, Closed) else record.at.group_id
