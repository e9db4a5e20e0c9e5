"""The simulated run of `ledger_world` with live traffic in it: sessions end whenever they like, of
any version that engines ever held."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from connectors.records import Closed, Coordinate, Version, encode, parse_group_id
from operators.staleness.lineage import lag
from operators.staleness.types import StalenessPolicy
from tests.trainer.ledger_acts import act
from tests.trainer.ledger_world import Scored, World, group_of, manifest
from trainer import actions
from trainer.actions import FILTERED
from trainer.feed_state import FeedState
from trainer.ledger import FeedCore
from trainer.traffic import Allowance

CALLS = "test.agent-traffic"
Make = Callable[[], StalenessPolicy[Any]]


def is_session(group_id: str) -> bool:
    return group_id.startswith(CALLS)


class TrafficWorld(World):
    """`batch_size` groups a step are granted (it may be 0), up to `num_places` are live traffic's,
    within `traffic_bound`."""

    def __init__(
        self,
        make: Make,
        batch_size: int,
        num_partitions: int,
        *,
        num_places: int,
        bound: int,
        drops: bool = False,
    ) -> None:
        self.num_places, self.traffic_bound, self.highest_bound = num_places, bound, bound
        self.next_call = [0] * num_partitions
        super().__init__(make, batch_size, num_partitions, drops=drops)

    def core_from(self, state: FeedState) -> FeedCore:
        return FeedCore(
            self.make(),
            state,
            prompts_topic="test.prompts",
            batch_size=self.batch_size,
            group_size=self.group_size,
            allowance=self.allowance,
        )

    @property
    def allowance(self) -> Allowance:
        return Allowance(
            num_places=self.num_places, bound=self.traffic_bound, topics=(CALLS, "test.feedback")
        )

    def restart(self, back: int) -> None:
        """As the feed does when it starts."""
        super().restart(back)
        self.core.traffic.recheck(self.core.version, self.core.lineage)

    def rollback(self, number: int, excluded: tuple[str, ...]) -> None:
        ended = {group_of(record) for log in self.trajectories for record in log}
        sessions = sorted(g for g in ended if is_session(g))
        chance = random.Random(number + len(sessions))
        some = [g for g in sessions if chance.random() < 0.1]
        trained = {r.group_id for m in self.chain.manifests[:number] for r in m.records}
        super().rollback(number, (*excluded, *(g for g in some if g not in trained)))

    # ------------------------------------------------------------------------------------ sessions
    def session(self, chance: random.Random) -> None:
        """One ends: its terminal is in `trajectories`."""
        if not self.held:
            return
        partition = chance.randrange(len(self.trajectories))
        self.next_call[partition] += chance.randint(1, 5)
        group_id = f"{CALLS}/{partition}/{self.next_call[partition]}"
        if chance.random() < 0.1:
            self.trajectories[partition].append(Closed(group_id=group_id, reason="capped"))
            return
        recent = self.held[-min(len(self.held), chance.choice([1, 3, 12])) :]
        self.write(partition, group_id, chance.choice(recent), chance.choice(recent))

    def write(self, partition: int, group_id: str, one: Version, other: Version) -> None:
        log = self.trajectories[partition]
        self.scored[group_id] = (one, other)
        log.append(Scored(Coordinate(partition, len(log), 7, group_id), one, other))

    def second(self, chance: random.Random) -> None:
        """Terminal of a session that has one."""
        partition = chance.randrange(len(self.trajectories))
        log = self.trajectories[partition]
        sessions = [r for r in log if is_session(group_of(r))]
        if not sessions:
            return
        again = chance.choice(sessions)
        if isinstance(again, Closed):
            log.append(again)
        else:
            self.write(partition, again.at.group_id, again.oldest, again.newest)

    def end(self, group_id: str, reason: str | None, chance: random.Random | None = None) -> None:
        if not is_session(group_id):
            super().end(group_id, reason, chance)
            return
        partition = parse_group_id(group_id).partition
        if reason is None and group_id in self.scored:
            self.write(partition, group_id, *self.scored[group_id])
        else:
            closed = Closed(group_id=group_id, reason=reason or "capped")
            self.trajectories[partition].append(closed)

    def arrive(self, record: Scored, oldest: Version | None) -> None:
        core, group_id = self.core, record.at.group_id
        if not is_session(group_id):
            super().arrive(record, oldest)
            return
        filtered = core.awaits(group_id) and self.no_signal(group_id)
        core.arrived(record.at, oldest, record.newest, 1)
        if filtered:
            core.drop(group_id, FILTERED)

    # --------------------------------------------------------------------------------------- steps
    def choose(self) -> None:
        step = self.core.choose()
        if step is None:
            return
        num_sessions = sum(is_session(r.group_id) for r in step.records)
        assert len(step.records) - num_sessions == self.batch_size
        assert num_sessions <= self.num_places
        assert self.batch_size or num_sessions == self.num_places
        self.steps.append(step)

    def train(self) -> None:
        step, chain = self.steps.pop(0), self.chain
        trained = {r.group_id for m in chain.manifests for r in m.records}
        for record in step.records:
            group_id = record.group_id
            assert group_id not in trained | self.excluded, "trained twice, or excluded"
            bound = self.traffic_bound if is_session(group_id) else self.bound
            ages = [lag(step.version, v, chain.lineage) for v in self.scored[group_id]]
            assert min(ages) >= 0
            assert bound is None or max(ages) <= bound, f"{group_id} is {max(ages)} old"
            if is_session(group_id):
                self.max_staleness = max(self.max_staleness, *ages)
        settings = self.core.traffic.settings()
        self.steps_log.append(manifest(step, self.epoch, settings=settings))
        self.snapshots[step.step] = encode(step.snapshot)

    def rebound(self, chance: random.Random) -> None:
        """A trainer starts again under another bound."""
        self.traffic_bound = chance.randint(0, self.highest_bound)
        self.restart(0)

    def tick(self) -> None:
        """The feed reads, a step is trained and published."""
        for partition, log in enumerate(self.trajectories):
            self.read(partition, len(log))
        self.choose()
        if self.steps:
            self.train()
            self.checkpoints.append(self.snapshots[self.chain.step])
        self.announce(publish=True)

    # --------------------------------------------------------------------------------------- books
    def drain(self) -> None:
        if not self.batch_size:
            self.ends = list(self.core.accounts.limits)
        super().drain()

    def progress(self) -> tuple[Any, ...]:
        return (*super().progress(), self.core.traffic.counts(), len(self.core.traffic.queue))

    def account(self) -> None:
        """Each session that ended has one fate: by the log alone and by the ledger."""
        chain, traffic = self.chain, self.core.traffic
        trained = [r.group_id for m in chain.manifests for r in m.records if is_session(r.group_id)]
        assert len(trained) == len(set(trained))
        listed = {
            group_id: reason
            for m in chain.manifests
            for group_id, reason in actions.drop_reasons(m).items()
            if is_session(group_id)
        }
        num_listed = sum(is_session(g) for m in chain.manifests for g in m.dropped)
        assert len(listed) == num_listed, "listed twice"
        dropped = {**listed, **traffic.dropped}
        assert len(dropped) == len(listed) + len(traffic.dropped)
        first: dict[str, Scored | Closed] = {}
        for record in (r for log in self.trajectories for r in log if is_session(group_of(r))):
            first.setdefault(group_of(record), record)
        closed = {g: r.reason for g, r in first.items() if isinstance(r, Closed)}
        assert not set(trained) & (set(dropped) | set(closed))
        queued = set(traffic.queue)
        assert not queued & (set(trained) | set(dropped) | set(closed))
        assert {*trained, *dropped, *closed, *queued} == set(first), "a session is lost"
        counts = traffic.counts()
        assert counts.trained == len(trained)
        assert counts.closed_by_reason == dict(Counter(closed.values()))
        told = Counter(reason for g, reason in dropped.items() if g not in closed)
        assert counts.dropped_by_reason == dict(told)


def traffic_act(world: TrafficWorld, chance: random.Random, *, with_rollbacks: bool) -> None:
    """One thing happens somewhere; mostly about sessions."""
    name = chance.choice(["session"] * 8 + ["tick"] * 6 + ["second", "rebound"] + ["run"] * 24)
    if name == "session":
        for _ in range(chance.randint(1, 4)):
            world.session(chance)
    elif name == "tick":
        world.tick()
    elif name == "second":
        world.second(chance)
    elif name == "rebound" and chance.random() < 0.2:
        world.rebound(chance)
    else:
        act(world, chance, with_rollbacks=with_rollbacks)
