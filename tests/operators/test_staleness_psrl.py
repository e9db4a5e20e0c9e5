"""psrl-roc against a literal reading of reserve, occupy and consume, by hand, and in random arrival
orders."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from connectors.records import Cancel, Fork, Version
from operators.staleness import policy, policy_for
from operators.staleness.preset import RunShape
from operators.staleness.types import (
    Announced,
    Arrived,
    Choice,
    Closed,
    Granted,
    Ledger,
    OpenGroup,
    StalenessPolicy,
)
from tests.operators.policy_run import Run, v
from tests.operators.random_runs import random_acts, random_loops


def roc(eta: int, entries: int, retry: str | None = None, threshold: int = 4) -> Any:
    return policy(
        "psrl-roc",
        staleness=eta,
        staleness_buffer_entries=entries,
        proactive_filter=retry,
        proactive_filter_threshold=threshold,
    )


def started(eta: int, batch_size: int, subject: StalenessPolicy[Any] | None = None) -> Run:
    run = Run(subject or roc(eta, batch_size), batch_size)
    run.publish(0)
    return run


def buffers(run: Run) -> dict[int, set[str]]:
    kept: dict[int, set[str]] = {}
    for group_id, place in run.state.places.items():
        kept.setdefault(max(place.buffer, run.version), set()).add(group_id)
    return kept


class EntryArrays:
    """The rule as written: a buffer is B entries, filled with running groups from the back and with
    finished ones from the front."""

    def __init__(self, eta: int, batch_size: int) -> None:
        self.eta, self.batch_size = eta, batch_size
        self.buffers: dict[int, list[str | None]] = {}
        self.start: dict[str, int] = {}
        self.order: dict[str, int] = {}
        self.finished: set[str] = set()

    def follow(self, run: Run, before: dict[str, OpenGroup]) -> None:
        """What happened in the run since `before`."""
        for buffer_id in [b for b in self.buffers if b < run.version]:
            assert all(g not in run.open for g in self.buffers.pop(buffer_id)), "consumed whole"
        for buffer_id in range(run.version, run.published + self.eta + 1):
            self.buffers.setdefault(buffer_id, [None] * self.batch_size)
        for group_id in before.keys() - run.open.keys():
            self.erase(group_id)
        for group in run.open.values():
            if group.group_id not in self.start:
                self.reserve(group.group_id, run.published, group.order)
            if group.state == "ready" and group.group_id not in self.finished:
                self.occupy(group.group_id)

    def empty(self, run: Run) -> int:
        return sum(buffer.count(None) for buffer in self.buffers.values())

    def reserve(self, group_id: str, start: int, order: int) -> None:
        self.start[group_id], self.order[group_id] = start, order
        latest = max(b for b in self.buffers if b <= start + self.eta and None in self.buffers[b])
        buffer = self.buffers[latest]
        buffer[max(i for i, entry in enumerate(buffer) if entry is None)] = group_id

    def erase(self, group_id: str) -> int | None:
        for number, buffer in self.buffers.items():
            if group_id in buffer:
                buffer[buffer.index(group_id)] = None
                return number
        return None

    def occupy(self, group_id: str) -> None:
        left = self.erase(group_id)
        assert left is not None
        for number in sorted(b for b in self.buffers if b < left):
            movable = [
                entry
                for entry in self.buffers[number]
                if entry and entry not in self.finished and self.start[entry] + self.eta >= left
            ]
            if movable:
                youngest = max(movable, key=self.order.__getitem__)
                self.erase(youngest)
                self.buffers[left][self.buffers[left].index(None)] = youngest
                break
        self.finished.add(group_id)
        earliest = self.buffers[min(b for b in self.buffers if None in self.buffers[b])]
        earliest[earliest.index(None)] = group_id

    def due(self, run: Run) -> set[str]:
        buffer = self.buffers.get(run.version, [None])
        whole = all(entry in self.finished for entry in buffer)
        return {entry for entry in buffer if entry} if whole else set()


def test_it_grants_and_trains_what_entries_in_buffers_say() -> None:
    num_steps, num_moved = 0, 0
    for seed in range(60):
        chance = random.Random(seed)
        eta, size = chance.randint(0, 2), chance.randint(1, 3)
        run, rule = started(eta, size), EntryArrays(eta, size)
        before: dict[str, OpenGroup] = {}
        reserved: dict[str, int] = {}
        for _ in random_acts(run, chance):
            rule.follow(run, before)
            before = dict(run.open)
            assert run.credits() == rule.empty(run)
            kept = {n: {g for g in b if g} for n, b in rule.buffers.items() if any(b)}
            assert buffers(run) == kept
            assert set(run.policy.choose(run.state, run.ledger()).commit) == rule.due(run)
            now = {g: p.buffer for g, p in run.state.places.items() if p.running}
            num_moved += sum(now.get(g, n) > n for g, n in reserved.items())
            reserved = now
        num_steps += run.version
    assert num_steps > 300
    assert num_moved > 50, "running groups were moved to later buffers"


def test_reservations_fill_the_latest_buffer_first() -> None:
    run = started(1, 2)
    assert run.credits() == 4
    a, b, c = run.grant(), run.grant(), run.grant()
    assert buffers(run) == {1: {a, b}, 0: {c}}
    assert run.credits() == 1


def test_a_finished_group_comes_forward_and_a_running_one_takes_its_entry() -> None:
    """eta = 1, B = 1: A is planned for step 2 and B for step 1; A finishes first."""
    run = started(1, 1)
    a, b = run.grant_all()
    assert buffers(run) == {1: {a}, 0: {b}}
    run.arrive(a)
    assert buffers(run) == {0: {a}, 1: {b}}
    assert run.choose().commit == (a,)
    assert run.choose() == Choice()
    run.arrive(b)
    assert run.choose().commit == (b,)
    assert run.staleness == [0, 1]


def test_a_running_group_moves_no_further_back_than_it_may() -> None:
    run = started(1, 1)
    a, b = run.grant_all()
    run.arrive(a)
    run.choose()
    run.publish(1)
    (c,) = run.grant_all()
    assert buffers(run) == {1: {b}, 2: {c}}
    run.arrive(c)
    assert buffers(run) == {1: {b}, 2: {c}}, "B started at version 0: not beyond step 2"
    assert run.choose() == Choice(), "stuck: the trainer waits for B"
    run.arrive(b)
    assert run.choose().commit == (b,)
    assert run.choose().commit == (c,)


def test_a_step_takes_its_buffer_whole() -> None:
    run = started(0, 3)
    a, b, c = run.grant_all()
    run.arrive(c)
    run.arrive(a)
    assert run.choose() == Choice()
    run.arrive(b)
    assert run.choose().commit == (a, b, c)


def test_the_entry_of_a_group_that_fails_is_granted_again() -> None:
    run = started(1, 1)
    a, b = run.grant_all()
    run.close(b)
    assert run.credits() == 1
    c = run.grant()
    assert buffers(run) == {1: {a}, 0: {c}}
    run.arrive(c)
    assert run.choose().commit == (c,)


def test_strictness_holds_and_nothing_is_dropped_or_stalls() -> None:
    def draw(chance: random.Random, batch_size: int) -> dict[str, Any]:
        return {"staleness": chance.randint(0, 3), "staleness_buffer_entries": batch_size}

    reached = set()
    for subject, result in random_loops("psrl-roc", draw):
        assert subject.bound is not None
        assert result.max_staleness <= subject.bound
        assert not result.stalled
        assert result.closed["stale"] == result.closed["cancelled"] == 0
        reached.add(subject.bound - result.max_staleness)
    assert 0 in reached


@pytest.mark.parametrize("chosen", ["retry", "truncate"])
def test_strictness_holds_and_nothing_stalls_with_a_filter(chosen: str) -> None:
    def draw(chance: random.Random, batch_size: int) -> dict[str, Any]:
        return {
            "staleness": chance.randint(0, 3),
            "staleness_buffer_entries": batch_size,
            "proactive_filter": chosen,
            "proactive_filter_threshold": chance.randint(1, 3),
        }

    num_closed = 0
    for subject, result in random_loops("psrl-roc", draw, num_runs=80):
        assert subject.bound is not None
        assert result.max_staleness <= subject.bound
        assert not result.stalled
        num_closed += result.closed["cancelled"]
    assert (num_closed > 0) == (chosen == "truncate")


# ------------------------------------------------------------------------------------ the filter
def stuck(chosen: str | None, *, threshold: int = 4, num_slow: int = 1) -> tuple[Run, list[str]]:
    """eta = 1, B = 2, version 1 is published, step 2 trains: groups of version 0 are slow, and two
    of version 1 take the entries of step 3."""
    run = started(1, 2, roc(1, 2, chosen, threshold))
    groups = run.grant_all()
    for group_id in groups[: 4 - num_slow]:
        run.arrive(group_id)
    run.choose()
    run.publish(1)
    run.grant_all()
    return run, groups[4 - num_slow :]


def test_without_a_filter_a_stuck_step_waits() -> None:
    run, _ = stuck(None)
    assert run.policy.cancel(run.state, run.ledger()) == ()


def test_retry_puts_a_stuck_group_back_and_lets_a_finished_one_pass() -> None:
    run, (slow,) = stuck("retry")
    expected = (Cancel(slow, "requeue", "cancelled"),)
    assert run.policy.cancel(run.state, run.ledger()) == expected
    assert run.policy.cancel(run.state, run.ledger()) == expected, "until it is obeyed"
    run.cancel()
    assert run.policy.cancel(run.state, run.ledger()) == ()
    fresh = [g for g in run.open.values() if g.admitted_at == v(1)]
    run.arrive(fresh[0].group_id)
    assert fresh[0].group_id in run.choose().commit, "it is in the entry the slow group had"
    assert run.version == 2


def test_a_group_that_finished_before_it_was_put_back_trains_in_time_or_not_at_all() -> None:
    run, (slow,) = stuck("retry")
    run.arrive(slow, oldest=0)
    assert slow in run.choose().commit

    run, (slow,) = stuck("retry")
    fresh = next(g.group_id for g in run.open.values() if g.admitted_at == v(1))
    run.arrive(fresh)
    run.choose()
    run.arrive(slow, oldest=0)
    assert run.version == 2
    assert run.choose().drop == (slow,), "two versions old: eta is 1"


def test_truncate_closes_a_stuck_group() -> None:
    run, (slow,) = stuck("truncate")
    expected = (Cancel(slow, "close", "cancelled"),)
    assert run.policy.cancel(run.state, run.ledger()) == expected
    run.cancel()
    assert run.credits() == 1
    fresh = run.grant()
    assert run.policy.cancel(run.state, run.ledger()) == (), "it can still move"
    run.arrive(fresh)
    assert fresh in run.choose().commit


@pytest.mark.parametrize("chosen", ["retry", "truncate"])
def test_a_step_that_waits_for_more_groups_than_the_threshold_is_left_alone(chosen: str) -> None:
    run, _ = stuck(chosen, threshold=1, num_slow=2)
    assert run.policy.cancel(run.state, run.ledger()) == ()
    run, slow = stuck(chosen, threshold=2, num_slow=2)
    cancels = run.policy.cancel(run.state, run.ledger())
    assert {c.group_id for c in cancels} == set(slow)


@pytest.mark.parametrize("chosen", ["retry", "truncate"])
def test_a_step_whose_buffer_has_a_free_entry_is_not_stuck(chosen: str) -> None:
    run = started(1, 2, roc(1, 2, chosen))
    a, b, failing, slow = run.grant_all()
    run.arrive(a)
    run.arrive(b)
    run.choose()
    run.close(failing)
    run.publish(1)
    fresh = [run.grant(), run.grant()]
    assert buffers(run) == {1: {slow}, 2: set(fresh)}
    assert run.policy.cancel(run.state, run.ledger()) == ()
    last = run.grant()
    assert buffers(run) == {1: {slow, last}, 2: set(fresh)}
    assert [c.group_id for c in run.policy.cancel(run.state, run.ledger())] == [slow]


# ------------------------------------------------------------------ what no PSRL run has to survive
def test_what_is_too_old_after_eta_was_lowered_is_dropped_and_training_goes_on() -> None:
    run = started(2, 1)
    groups = run.grant_all()
    for group_id in groups:
        run.arrive(group_id)
    run.choose()
    run.policy = roc(0, 1)
    assert run.choose().drop == tuple(groups[1:])
    run.publish(1)
    run.arrive(run.grant_all()[0])
    assert len(run.choose().commit) == 1


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (3, 1)])
def test_a_changed_batch_size_goes_on_from_what_is_open(before: int, after: int) -> None:
    run = started(1, before)
    run.grant_all()
    run.batch_size, run.policy = after, roc(1, after)
    for _ in range(12):
        run.grant_all()
        for group in [g for g in run.open.values() if g.state == "running"]:
            run.arrive(group.group_id)
        run.choose()
        run.publish(run.version)
    assert run.version > 6
    assert max(run.staleness) <= 1


def test_groups_granted_under_another_policy_are_taken_over() -> None:
    run = Run(policy("n-step-off", n=3), 2)
    run.publish(0)
    groups = run.grant_all()
    assert len(groups) == 8
    for group_id in groups[1:5]:
        run.arrive(group_id)
    run.policy = roc(1, 2)
    run.state = run.policy.start()
    run.observe(Announced(v(0)))
    for group in run.open.values():
        run.observe(Granted(group.group_id, group.admitted_at))
        if group.state == "ready":
            run.observe(Arrived(group.group_id, group.oldest, group.oldest))
    assert run.credits() == 0
    assert len(run.choose().commit) == 2
    for group in [g for g in run.open.values() if g.state == "running"]:
        run.arrive(group.group_id)
    assert len(run.choose().commit) == 2
    assert len(run.choose().drop) == 4, "their start, version 0, is two behind"
    run.publish(2)
    assert len(run.grant_all()) == 4


def test_a_group_it_never_saw_may_close() -> None:
    run = started(1, 2)
    run.observe(Closed("p/0/99", "no_record"))
    assert run.credits() == 4


def test_after_a_rollback_the_open_step_gets_groups_and_what_is_too_old_does_not_train() -> None:
    """eta = 1, B = 1. Version 4 was published when the run goes back to 2. A group of (0, 4) is now
    (2 - 2) + (4 - 2) = 2 away."""
    subject = roc(1, 1)
    state = subject.start()
    for event in (Announced(v(4)), Granted("old", v(4)), Arrived("old", v(4), v(4))):
        state = subject.observe(state, event)
    version = Version(1, 2)
    state = subject.observe(state, Announced(version))
    old = OpenGroup(
        group_id="old", partition=0, offset=0, oldest=v(4), newest=v(4), admitted_at=v(4),
        state="ready", order=0, ready_order=0,
    )  # fmt: skip
    ledger = Ledger(
        version=version, published=version, batch_size=1, free_slots=1, group_size=1, groups=(old,),
        num_granted=1, num_trained=0, num_closed=0, num_unpublished=0,
        lineage={1: Fork(parent=0, number=2, reason="rollback")},
    )  # fmt: skip
    assert subject.choose(state, ledger) == Choice(drop=("old",))
    state = subject.observe(state, Closed("old", "stale"))
    state = subject.observe(state, Granted("new", version))
    state = subject.observe(state, Arrived("new", version, version))
    assert state.places["new"].buffer == 2


def test_a_run_gives_the_number_of_entries() -> None:
    run = Run(policy_for("psrl-roc", SHAPE), 16)
    run.publish(0)
    assert (run.credits(), run.policy.bound) == (16, 0)
    assert policy("psrl-roc").bound == 0
    assert not run.policy.auditable


SHAPE = RunShape(batch_size=16, group_size=4, num_slots=64)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"staleness": -1}, "staleness must be an integer of at least 0, got -1"),
        ({"staleness": 1.0}, "staleness must be an integer of at least 0, got 1.0"),
        ({"staleness_buffer_entries": 0},
         "staleness_buffer_entries must be an integer of at least 1, got 0"),
        ({"proactive_filter": "drop"},
         "proactive_filter must be one of None, 'retry', 'truncate', got 'drop'"),
        ({"proactive_filter_threshold": 0},
         "proactive_filter_threshold must be an integer of at least 1, got 0"),
        ({"eta": 1}, "unknown parameter 'eta'; known: proactive_filter, "
         "proactive_filter_threshold, staleness, staleness_buffer_entries"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_one_clear_line(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^psrl-roc: {re.escape(message)}$"):
        policy("psrl-roc", **parameters)


def test_a_buffer_of_another_size_than_the_runs_batch_is_refused() -> None:
    message = "psrl-roc: staleness_buffer_entries is 16 in this run, got 8"
    with pytest.raises(ValueError, match=f"^{message}$"):
        policy_for("psrl-roc", SHAPE, staleness_buffer_entries=8)
