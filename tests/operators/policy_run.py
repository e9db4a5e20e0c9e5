"""A policy under test, with the ledger it is shown: step by step by hand, or in a closed loop whose
arrivals come in a random order."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from connectors.records import Version
from operators.staleness.types import (
    Announced,
    Arrived,
    Choice,
    Closed,
    Committed,
    Event,
    Granted,
    Ledger,
    OpenGroup,
    Requeued,
    StalenessPolicy,
)


def v(number: int) -> Version:
    return Version(0, number)


class Run:
    """The open step is `version`; `published` was announced last. Every event goes through the
    policy's state as a checkpoint would have it."""

    def __init__(self, subject: StalenessPolicy[Any], batch_size: int, group_size: int = 1) -> None:
        self.policy = subject
        self.batch_size = batch_size
        self.group_size = group_size
        self.state = subject.start()
        self.version = 0
        self.published = 0
        self.committed = 0
        self.num_granted = 0
        self.num_arrived = 0
        self.num_trained = 0
        self.closed: Counter[str] = Counter()  # by reason
        self.staleness: list[int] = []  # of each committed group's oldest token that is not masked
        self.open: dict[str, OpenGroup] = {}

    def ledger(self) -> Ledger:
        return Ledger(
            version=v(self.version),
            published=v(self.published),
            batch_size=self.batch_size,
            free_slots=self.batch_size - self.committed,
            group_size=self.group_size,
            groups=tuple(self.open.values()),
            num_granted=self.num_granted,
            num_trained=self.num_trained,
            num_closed=self.closed.total(),
            num_unpublished=(self.version - self.published) * self.batch_size,
        )

    def observe(self, event: Event) -> None:
        before = msgspec.json.encode(self.state)
        after = self.policy.observe(self.state, event)
        assert msgspec.json.encode(self.state) == before, "observe changed the state it was given"
        if self.state is not None:
            after = msgspec.json.decode(msgspec.json.encode(after), type=type(after))
        self.state = after

    def publish(self, number: int) -> None:
        self.published = number
        self.observe(Announced(v(number)))

    def credits(self) -> int:
        """In the policy's unit."""
        return self.policy.credits(self.state, self.ledger())

    def group_credits(self) -> int:
        credits = self.credits()
        if self.policy.unit == "trajectory":
            return credits // self.group_size
        return credits * self.batch_size if self.policy.unit == "batch" else credits

    def grant(self) -> str:
        group_id = f"p/0/{self.num_granted}"
        self.open[group_id] = OpenGroup(
            group_id=group_id,
            partition=0,
            offset=self.num_granted,
            oldest=v(self.published),
            newest=None,
            admitted_at=v(self.published),
            state="running",
            order=self.num_granted,
            num_running=self.group_size,
        )
        self.num_granted += 1
        self.observe(Granted(group_id, v(self.published)))
        return group_id

    def grant_all(self) -> list[str]:
        return [self.grant() for _ in range(max(0, self.group_credits()))]

    def arrive(self, group_id: str, oldest: int | None = None, newest: int | None = None) -> None:
        """`oldest`: its first token's version, that of its grant unless given."""
        group = self.open[group_id]
        first = group.oldest if oldest is None else v(oldest)
        last = first if newest is None else v(newest)
        self.open[group_id] = replace(
            group, oldest=first, newest=last, state="ready", ready_order=self.num_arrived,
            num_running=0,
        )  # fmt: skip
        self.num_arrived += 1
        self.observe(Arrived(group_id, first, last))

    def close(self, group_id: str, reason: str = "reward_failed") -> None:
        del self.open[group_id]
        self.closed[reason] += 1
        self.observe(Closed(group_id, reason))

    def choose(self) -> Choice:
        """Asks, commits, and goes on to the next step when this one is full."""
        choice = self.policy.choose(self.state, self.ledger())
        for group_id in choice.drop:
            self.close(group_id, "stale")
        for group_id in choice.commit:
            group = self.open.pop(group_id)
            assert group.state != "running", f"{group_id} was committed before it arrived"
            assert self.committed < self.batch_size, "more was committed than the step has room for"
            self.committed += 1
            self.num_trained += 1
            oldest = max(group.oldest, choice.mask_before or group.oldest)
            assert group.newest is not None
            assert group.newest >= oldest, f"{group_id} was committed with all its tokens masked"
            self.staleness.append(self.version - oldest.number)
            self.observe(Committed(group_id, self.version + 1))
        if self.committed == self.batch_size:
            self.version, self.committed = self.version + 1, 0
        return choice

    def cancel(self) -> None:
        """Obeys the policy's cancels at once: a closed group ends, one put back starts anew under
        the published version."""
        for cancel in self.policy.cancel(self.state, self.ledger()):
            if cancel.then == "close":
                self.close(cancel.group_id, "cancelled")
                continue
            group = self.open[cancel.group_id]
            self.open[cancel.group_id] = replace(group, oldest=v(self.published))
            self.observe(Requeued(cancel.group_id, v(self.published)))


@dataclass(kw_only=True)
class LoopResult:
    num_steps: int
    max_staleness: int
    closed: Counter[str]  # by reason: reward_failed, stale (dropped), cancelled
    stalled: bool


def closed_loop(
    subject: StalenessPolicy[Any],
    chance: random.Random,
    *,
    batch_size: int,
    group_size: int = 1,
    num_steps: int = 30,
    num_slow: int = 0,
    slowness: int = 10,
    publish_lag: float = 0.5,
    failures: float = 0.0,
    start_lag: float = 0.3,
) -> LoopResult:
    """The run until `num_steps` steps closed or nothing can happen any more (`stalled`).

    Arrivals come in a random order; the first `num_slow` groups and, by chance, one in twelve after
    them take `slowness` times as long. A closed step is published at once with chance
    1 - publish_lag, else some events later; a group starts later than its grant with chance
    `start_lag` (its first token is then fresher); it fails with chance `failures`.
    """
    run = Run(subject, batch_size, group_size)
    run.publish(0)
    left: dict[str, int] = {}  # events until a running group arrives
    first: dict[str, int] = {}  # version of its first token

    def settle() -> None:
        """Asks the policy until nothing changes any more."""
        before = None
        while before != (before := (run.num_granted, run.num_trained, run.closed.total())):
            run.cancel()
            if run.version - run.published < 2:  # one step trains, one is full and waits
                run.choose()
            for group_id in run.grant_all():
                slow = run.num_granted <= num_slow or chance.random() < 1 / 12
                left[group_id] = chance.randint(1, 4 * batch_size) * (slowness if slow else 1)
        for group_id in left.keys() - run.open.keys():
            del left[group_id]

    def pass_time() -> None:
        for group_id in left:
            if group_id not in first and chance.random() > start_lag:
                first[group_id] = run.published
            left[group_id] -= 1
        for group_id in [g for g, events in left.items() if events <= 0]:
            del left[group_id]
            began = max(first.pop(group_id, run.published), run.open[group_id].oldest.number)
            if chance.random() < failures:
                run.close(group_id)
            else:
                run.arrive(group_id, began, chance.randint(began, run.published))

    stalled = False
    while run.version < num_steps and not stalled:
        settle()
        if run.published < run.version and (not left or chance.random() > publish_lag):
            run.publish(run.published + 1)
        elif left:
            pass_time()
        else:
            stalled = True
    return LoopResult(
        num_steps=run.version,
        max_staleness=max(run.staleness, default=0),
        closed=run.closed,
        stalled=stalled,
    )
