"""`deadline`: the commit rule against its literal reading, what cannot be in time against a
matching, start times against every order of steps there is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from operators.staleness import policy
from operators.staleness.feasible import infeasible
from operators.staleness.types import Ledger, OpenGroup, StalenessPolicy
from tests.operators.policy_run import v
from tests.operators.test_deadline import chosen, ledger_of, run_of


@st.composite
def ledgers(draw: st.DrawFn) -> tuple[Ledger, int]:
    """Any ledger, feasible or not, with a bound."""
    batch_size = draw(st.integers(1, 4))
    group = st.tuples(st.integers(-6, 0), st.sampled_from(["running", "ready"]))
    groups = draw(st.lists(group, max_size=12))
    ledger = ledger_of(
        [(v(start), state) for start, state in groups], version=v(0), batch_size=batch_size,
        free_slots=draw(st.integers(0, batch_size)),
    )  # fmt: skip
    return ledger, draw(st.integers(0, 6))


def invariant(deadlines: Sequence[int], free_slots: int, batch_size: int) -> bool:
    """As written, at version 0."""
    return all(
        sum(d <= x for d in deadlines) <= free_slots + x * batch_size for x in range(-10, 40)
        if x >= 0 or any(d <= x for d in deadlines)
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(ledgers())
def test_it_commits_exactly_what_the_invariant_allows(drawn: tuple[Ledger, int]) -> None:
    ledger, bound = drawn
    late = {g.group_id for g in infeasible(ledger, bound)}
    choice = chosen(ledger, bound=bound, lookahead=0)
    deadline = {g.group_id: g.oldest.number + bound for g in ledger.groups}
    assert set(choice.drop) == {g.group_id for g in ledger.ready if g.group_id in late}
    left, places = {g: d for g, d in deadline.items() if g not in late}, ledger.free_slots
    expected = []
    for group in sorted(ledger.ready, key=lambda g: (deadline[g.group_id], g.ready_order)):
        without = [d for g, d in left.items() if g != group.group_id]
        if group.group_id in left and places and invariant(without, places - 1, ledger.batch_size):
            expected.append(group.group_id)
            del left[group.group_id]
            places -= 1
    assert choice.commit == tuple(expected)
    held = {g.group_id for g in ledger.ready} - set(expected) - late
    assert set(ledger.held(choice)) == (held if places else set())


def matched(ledger: Ledger, bound: int) -> int:
    """The most groups that can be trained in time: a maximum matching of groups and places by
    augmenting paths."""
    places = [0] * ledger.free_slots
    places += [s + 1 for s in range(len(ledger.groups)) for _ in range(ledger.batch_size)]
    holder: dict[int, int] = {}

    def place(group: int, tried: set[int]) -> bool:
        for at, step in enumerate(places):
            if step > ledger.groups[group].oldest.number + bound or at in tried:
                continue
            tried.add(at)
            if at not in holder or place(holder[at], tried):
                holder[at] = group
                return True
        return False

    return sum(place(group, set()) for group in range(len(ledger.groups)))


@settings(max_examples=150, deadline=None)
@given(ledgers())
def test_it_gives_up_as_few_as_can_be_and_the_rest_fit(drawn: tuple[Ledger, int]) -> None:
    ledger, bound = drawn
    late = infeasible(ledger, bound)
    assert len(late) == len(ledger.groups) - matched(ledger, bound)
    rest = [g.oldest.number + bound for g in ledger.groups if g not in late]
    assert invariant(rest, ledger.free_slots, ledger.batch_size)


@settings(max_examples=80, deadline=None)
@given(ledgers())
def test_training_what_is_in_time_changes_nothing_about_who_is_late(
    drawn: tuple[Ledger, int],
) -> None:
    ledger, bound = drawn
    late = infeasible(ledger, bound)
    choice = chosen(ledger, bound=bound, lookahead=0)
    after = replace(
        ledger,
        groups=tuple(g for g in ledger.groups if g.group_id not in choice.commit),
        free_slots=ledger.free_slots - len(choice.commit),
    )
    assert infeasible(after, bound) == late


@settings(max_examples=60, deadline=None)
@given(
    batch_size=st.integers(1, 4),
    bound=st.integers(0, 4),
    back=st.integers(0, 4),
    seed=st.integers(0, 2**20),
)
def test_the_invariant_holds_whatever_happens_in_whatever_order(
    batch_size: int, bound: int, back: int, seed: int
) -> None:
    run, chance = (
        run_of(batch_size, bound=bound, lookahead=max(0, bound - back)),
        random.Random(seed),
    )
    for _ in range(100):
        act = chance.choice(["grant", "arrive", "arrive", "arrive", "fail", "choose", "publish"])
        running = [g for g in run.open.values() if g.state == "running"]
        if act == "grant" and run.credits():
            for _ in range(chance.randint(1, run.credits())):
                run.grant()
        elif act == "arrive" and running:
            group = chance.choice(running)
            run.arrive(group.group_id, chance.randint(group.oldest.number, run.published))
        elif act == "fail" and running:
            run.close(chance.choice(running).group_id)
        elif act == "choose":
            assert run.choose().drop == ()
        elif act == "publish" and run.published < run.version:
            run.publish(chance.randint(run.published + 1, run.version))
        ledger = run.ledger()
        deadlines = [g.oldest.number + bound - run.version for g in ledger.groups]
        assert invariant(deadlines, ledger.free_slots, batch_size)
        assert infeasible(ledger, bound) == ()
    assert max(run.staleness, default=0) <= bound


# ----------------------------------------------------------- against every order of steps there is
def every_schedule(
    jobs: Sequence[tuple[int, int]], batch_size: int, train: int, step: int = 0, start: int = 0
) -> Iterator[tuple[int, ...]]:
    """The start times of each way to train all of `jobs` (ready at, last step), B a step, in time;
    a step takes `train`."""
    if not jobs:
        yield ()
        return
    for batch in itertools.combinations(range(len(jobs)), batch_size):
        if any(jobs[j][1] < step for j in batch):
            continue
        begins = max(start, *(jobs[j][0] for j in batch))
        rest = [job for j, job in enumerate(jobs) if j not in batch]
        for later in every_schedule(rest, batch_size, train, step + 1, begins + train):
            yield (begins, *later)


def start_times(
    subject: StalenessPolicy[Any], jobs: Sequence[tuple[int, int]], batch_size: int, train: int
) -> list[int]:
    """Those of the policy, which sees a job's deadline but not when it will be ready. The next step
    fills while one trains."""
    assert subject.bound is not None
    open_ = {
        str(i): OpenGroup(
            group_id=str(i), partition=0, offset=i, oldest=v(last - subject.bound), newest=None,
            admitted_at=v(last - subject.bound), state="running", order=i,
        )
        for i, (_, last) in enumerate(jobs)
    }  # fmt: skip
    starts: list[int] = []
    committed, free_at, full_at = 0, 0, None
    for now in range(200):
        for order, (ready_at, _) in enumerate(jobs):
            if ready_at == now:
                open_[str(order)] = replace(open_[str(order)], state="ready", ready_order=order)
        while True:
            if full_at is not None and now >= free_at:
                starts.append(now)
                free_at, full_at = now + train, None
            if full_at is not None or not open_:
                break
            ledger = replace(
                ledger_of([], version=v(len(starts)), batch_size=batch_size,
                          free_slots=batch_size - committed),
                groups=tuple(open_.values()),
            )  # fmt: skip
            choice = subject.choose(subject.start(), ledger)
            assert choice.drop == ()
            for group_id in choice.commit:
                assert jobs[int(group_id)][1] >= len(starts), "beyond its deadline"
                del open_[group_id]
            committed += len(choice.commit)
            if committed < batch_size:
                break
            committed, full_at = 0, now
    return starts


def check_start_times(seed: int, num_instances: int) -> int:
    """How many of the instances can be trained in time."""
    chance, num_feasible = random.Random(seed), 0
    for _ in range(num_instances):
        batch_size, num_steps = chance.choice([(1, 4), (1, 5), (2, 3), (3, 2), (2, 4)])
        train = chance.randint(1, 4)
        jobs = [
            (chance.randint(0, 12), chance.randint(0, num_steps))
            for _ in range(batch_size * num_steps)
        ]
        schedules = list(every_schedule(jobs, batch_size, train))
        if not schedules:
            continue
        num_feasible += 1
        best = [min(times) for times in zip(*schedules, strict=True)]
        subject = policy("deadline", bound=num_steps, lookahead=0)
        assert start_times(subject, jobs, batch_size, train) == best, jobs
    return num_feasible


def test_no_step_starts_later_than_under_the_best_order_there_is() -> None:
    assert check_start_times(seed=0, num_instances=300) > 30
