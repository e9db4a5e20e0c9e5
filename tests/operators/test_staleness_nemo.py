"""NeMo-RL's samplers against a literal reading of them, by hand, and in random arrival orders."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from connectors.records import Cancel, Fork, Version
from operators.staleness import policy, policy_for
from operators.staleness.preset import RunShape
from operators.staleness.types import Choice, Ledger, OpenGroup, StalenessPolicy
from tests.operators.policy_run import Run, closed_loop
from tests.operators.random_runs import Draw, random_acts, random_loops

GATED = ("nemo-weight-fifo", "nemo-ready-first", "nemo-in-order")
NAMES = ("nemo-windowed", *GATED)


def nemo(
    name: str, eta: int, *, inflight: int | None = 99, buffered: int | None = 99, least: int = 1,
    **more: Any,
) -> StalenessPolicy[Any]:  # fmt: skip
    return policy(
        name,
        **{
            "max_lookahead_versions" if name == "nemo-in-order" else "max_staleness_versions": eta,
            "max_inflight_prompts": inflight,
            "max_buffered_rollouts": buffered,
            "min_groups_for_streaming_train": least,
            **more,
        },
    )


class Literal:
    """The samplers as written: batch d is admitted unless d - 1 >= v + eta, each prompt of it takes
    a permit of both kinds; a slot's start is the version at its reservation. No group fails here,
    so the i-th slot is of batch i // B."""

    def __init__(self, run: Run, name: str, eta: int, inflight: int, buffered: int, least: int):
        self.run, self.name, self.eta = run, name, eta
        self.inflight, self.buffered, self.least = inflight, buffered, least

    def room(self) -> int:
        run = self.run
        permits = min(self.inflight - len(self.running()), self.buffered - len(run.open))
        if self.name == "nemo-windowed":
            too_late = run.published < run.version - self.eta
            return 0 if too_late else max(0, permits)
        dispatched = -1
        while dispatched < run.published + self.eta:
            dispatched += 1
        return max(0, min(permits, (dispatched + 1) * run.batch_size - run.num_granted))

    def running(self) -> list[OpenGroup]:
        return [g for g in self.run.open.values() if g.state == "running"]

    def evicted(self) -> list[str]:
        oldest = max(0, self.run.version - self.eta)
        slots = [g for g in self.run.open.values() if g.state == "ready"]
        if self.name not in ("nemo-windowed", "nemo-weight-fifo"):
            return []
        return [g.group_id for g in slots if g.admitted_at.number < oldest]

    def selected(self) -> list[str]:
        """One poll after the other until none selects anything."""
        slots = [g for g in self.run.open.values() if g.group_id not in self.evicted()]
        remaining = self.run.batch_size - self.run.committed
        taken: list[str] = []
        while remaining:
            picked = [g for g in slots if g.state == "ready" and self.fits(g, slots)]
            if len(picked) < min(self.least, remaining):
                break
            taken += [g.group_id for g in picked[:remaining]]
            remaining = self.run.batch_size - self.run.committed - len(taken)
            slots = [g for g in slots if g.group_id not in taken]
        return taken

    def fits(self, slot: OpenGroup, slots: list[OpenGroup]) -> bool:
        version, start = self.run.version, slot.admitted_at.number
        oldest = max(0, version - self.eta)
        window = [g.admitted_at.number for g in slots if oldest <= g.admitted_at.number <= version]
        return {
            "nemo-windowed": start in window,
            "nemo-weight-fifo": bool(window) and start == min(window),
            "nemo-ready-first": start <= version,
            "nemo-in-order": slot.order // self.run.batch_size == version,
        }[self.name]


@pytest.mark.parametrize("name", NAMES)
def test_it_admits_evicts_and_selects_what_the_rule_says(name: str) -> None:
    num_steps = 0
    for seed in range(40):
        chance = random.Random(seed)
        size, eta = chance.randint(1, 3), chance.randint(0, 2)
        permits = {
            "inflight": chance.choice([2 * size, 99]),
            "buffered": size * (eta + 1) + chance.choice([0, 2]),
            "least": chance.choice([1, size]),
        }
        run = Run(nemo(name, eta, **permits), size)
        rule = Literal(run, name, eta, **permits)
        for _ in random_acts(run, chance, failures=False):
            assert run.credits() == rule.room()
            choice = run.policy.choose(run.state, run.ledger())
            assert list(choice.drop) == rule.evicted()
            assert list(choice.commit) == rule.selected()
        num_steps += run.version
    assert num_steps > 300


# ---------------------------------------------------------------------------------------- windowed
def test_windowed_admits_beyond_the_gate_as_long_as_there_are_permits() -> None:
    run = Run(nemo("nemo-windowed", 1, inflight=5, buffered=7), 2)
    run.publish(0)
    groups = run.grant_all()
    assert len(groups) == 5, "the gate would say (1 + 1) * 2 = 4"
    for group_id in groups[:3]:
        run.arrive(group_id)
    assert run.credits() == 2, "2 run, 3 are ready: 5 of 7 are in the buffer"
    run.choose()
    assert run.credits() == 3, "2 were consumed; 2 of 5 run"


def test_windowed_aborts_what_runs_and_evicts_what_is_ready_once_it_is_too_old() -> None:
    run = Run(nemo("nemo-windowed", 1), 1)
    run.publish(0)
    running, ready, first, second = (run.grant() for _ in range(4))
    for group_id in (first, ready):
        run.arrive(group_id)
    assert run.choose().commit == (ready,), "the first in dispatch order"
    run.publish(1)
    assert run.policy.cancel(run.state, run.ledger()) == ()
    assert run.choose().commit == (first,), "one version old"
    run.arrive(second)
    assert run.policy.cancel(run.state, run.ledger()) == (Cancel(running, "close", "stale"),)
    assert run.choose() == Choice(drop=(second,))


def test_windowed_takes_the_freshest_first_when_told_to() -> None:
    for freshest_first in (False, True):
        run = Run(nemo("nemo-windowed", 1, least=2, sample_freshest_first=freshest_first), 2)
        run.publish(0)
        old = [run.grant() for _ in range(3)]
        for group_id in old[:2]:
            run.arrive(group_id)
        run.choose()
        run.publish(1)
        new = [run.grant() for _ in range(2)]
        for group_id in (old[2], *new):
            run.arrive(group_id)
        expected = (*new,) if freshest_first else (old[2], new[0])
        assert run.choose().commit == expected


def test_windowed_starts_nothing_that_would_be_too_old_when_the_weights_on_their_way_arrive() -> (
    None
):
    run = Run(nemo("nemo-windowed", 0), 1)
    run.publish(0)
    run.arrive(run.grant())
    run.choose()
    assert run.credits() == 0
    run.publish(1)
    assert run.credits() == 99


def test_a_step_waits_for_as_many_groups_as_it_is_to_take_at_once() -> None:
    for name in NAMES:
        run = Run(nemo(name, 1, least=2), 3)
        run.publish(0)
        first, second, third = (run.grant() for _ in range(3))
        run.arrive(second)
        assert run.choose() == Choice(), name
        run.arrive(first)
        assert run.choose().commit == (first, second)
        run.arrive(third)
        assert run.choose().commit == (third,), "it lacks one only"


# ------------------------------------------------------------------------------------- weight-fifo
def test_weight_fifo_drains_the_oldest_version_and_waits_for_what_still_runs_of_it() -> None:
    run = Run(nemo("nemo-weight-fifo", 1), 1)
    run.publish(0)
    first, slow = run.grant_all()
    run.arrive(first)
    run.choose()
    run.publish(1)
    (fresh,) = run.grant_all()
    run.arrive(fresh)
    assert run.choose() == Choice(), "a group of version 0 still runs"
    run.arrive(slow)
    assert run.choose().commit == (slow,)
    assert run.choose().commit == (fresh,)


def due(run: Run) -> tuple[str, ...]:
    return run.policy.choose(run.state, run.ledger()).commit


def straddling(least: int) -> Run:
    """B = 4, eta = 1, three in flight: when version 1 is published, three groups of version 0 are
    left, and the other five of the (1 + 1) * 4 are of version 1."""
    run = Run(nemo("nemo-weight-fifo", 1, inflight=3, least=least), 4)
    run.publish(0)
    for group_id in run.grant_all():
        run.arrive(group_id)
    run.arrive(run.grant_all()[0])
    run.choose()
    run.grant_all()
    run.publish(1)
    while groups := [g.group_id for g in run.open.values() if g.state == "running"]:
        run.arrive(groups[0])
        run.grant_all()
    return run


def test_weight_fifo_stalls_when_a_batch_straddles_two_versions() -> None:
    run = straddling(least=4)
    assert [g.admitted_at.number for g in run.open.values()] == [0] * 3 + [1] * 5
    assert all(g.state == "ready" for g in run.open.values())
    assert (run.choose(), run.credits()) == (Choice(), 0), "nothing runs, and nothing may start"


def test_weight_fifo_does_not_stall_there_when_it_may_take_single_groups() -> None:
    run = straddling(least=1)
    starts = [g.admitted_at.number for g in run.open.values() if g.group_id in set(due(run))]
    assert starts == [0, 0, 0, 1], "the rest of version 0, then one of version 1"


def failing(subject: StalenessPolicy[Any]) -> Run:
    """B = 2, eta = 1: of version 0's second batch one group fails after version 1 is published."""
    run = Run(subject, 2)
    run.publish(0)
    groups = run.grant_all()
    for group_id in groups[:3]:
        run.arrive(group_id)
    run.choose()
    run.publish(1)
    run.close(groups[3])
    for group_id in run.grant_all():
        run.arrive(group_id)
    return run


def test_weight_fifo_stalls_when_a_failure_leaves_its_oldest_version_short() -> None:
    run = failing(nemo("nemo-weight-fifo", 1, least=2))
    assert [g.admitted_at.number for g in run.open.values()] == [0, 1, 1, 1]
    assert (run.choose(), run.credits()) == (Choice(), 0)


def test_weight_fifo_does_not_stall_there_with_what_a_run_gives() -> None:
    run = failing(policy_for("nemo-weight-fifo", RunShape(batch_size=2, group_size=1, num_slots=8)))
    starts = [g.admitted_at.number for g in run.open.values() if g.group_id in set(due(run))]
    assert starts == [0, 1]


def test_weight_fifo_stalls_in_some_random_runs_that_wait_for_a_batch_but_keeps_its_bound() -> None:
    num_stalled = 0
    for seed in range(40):
        result = closed_loop(
            nemo("nemo-weight-fifo", 1, inflight=3, least=4), random.Random(seed), batch_size=4
        )
        assert result.max_staleness <= 1
        num_stalled += result.stalled
    assert num_stalled > 10


# ------------------------------------------------------------------------------------- ready-first
def test_ready_first_lets_a_slow_group_be_overtaken_without_end() -> None:
    run = Run(nemo("nemo-ready-first", 1), 1)
    run.publish(0)
    slow, other = run.grant_all()
    for step in range(1, 6):
        run.arrive(other)
        run.choose()
        run.publish(step)
        (other,) = run.grant_all()
    run.arrive(slow)
    assert run.choose() == Choice(commit=(slow,)), "nothing is evicted"
    assert run.staleness[-1] == 5 > 1
    assert run.policy.bound is None


def test_ready_first_goes_far_beyond_the_staleness_it_names() -> None:
    result = closed_loop(
        nemo("nemo-ready-first", 2), random.Random(1), batch_size=2, num_slow=2, slowness=60,
        num_steps=60,
    )  # fmt: skip
    assert result.max_staleness > 10
    assert not result.stalled
    assert result.closed["stale"] == 0


# ---------------------------------------------------------------------------------------- in-order
def test_in_order_is_n_step_off_where_its_permits_do_not_bind() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        n, size = chance.randint(0, 2), chance.randint(1, 3)
        run = Run(nemo("nemo-in-order", n, inflight=None, buffered=None), size)
        plain = policy("n-step-off", n=n)
        for _ in random_acts(run, chance):
            assert run.credits() == plain.credits(run.state, run.ledger())
            asked = run.policy.choose(run.state, run.ledger())
            assert asked == plain.choose(run.state, run.ledger())


def test_in_order_starts_no_more_than_its_permits_allow() -> None:
    run = Run(nemo("nemo-in-order", 1, inflight=3, buffered=4), 2)
    run.publish(0)
    groups = run.grant_all()
    assert len(groups) == 3
    run.arrive(groups[1])
    run.arrive(groups[2])
    assert run.credits() == 1, "one runs; three are in the buffer"
    assert run.choose().commit == (groups[1],)
    run.arrive(groups[0])
    assert run.choose().commit == (groups[0],)
    assert run.choose().commit == (groups[2],), "the first of the next step"


def test_in_order_grants_an_early_place_again_though_a_lowered_bound_left_the_buffer_overfull() -> (
    None
):
    run = Run(nemo("nemo-in-order", 3), 2)
    run.publish(0)
    first, *others = run.grant_all()
    run.policy = nemo("nemo-in-order", 1, inflight=None, buffered=4)
    run.close(first)
    assert (len(run.open), run.credits()) == (7, 1)
    replacement = run.grant()
    run.arrive(replacement)
    run.arrive(others[0])
    assert set(run.choose().commit) == {replacement, others[0]}


# --------------------------------------------------------------------------------------------- all
def unlimited(name: str, least: int | None = None) -> Draw:
    def draw(chance: random.Random, batch_size: int) -> dict[str, Any]:
        eta = "max_lookahead_versions" if name == "nemo-in-order" else "max_staleness_versions"
        return {
            eta: chance.randint(0, 2),
            "max_inflight_prompts": chance.choice([None, batch_size]),
            "max_buffered_rollouts": None,
            "min_groups_for_streaming_train": least or batch_size,
            "num_prompts_per_step": batch_size,
        }

    return draw


@pytest.mark.parametrize(
    ("name", "least"),
    [("nemo-windowed", None), ("nemo-weight-fifo", 1), ("nemo-in-order", None)],
)
def test_the_strict_ones_keep_their_bound_and_never_stall(name: str, least: int | None) -> None:
    reached = set()
    for subject, result in random_loops(name, unlimited(name, least)):
        assert subject.bound is not None
        assert result.max_staleness <= subject.bound
        assert not result.stalled
        if name != "nemo-windowed":
            assert result.closed["stale"] == 0, "nothing that was granted is dropped"
        reached.add(subject.bound - result.max_staleness)
    assert 0 in reached


def test_ready_first_never_stalls() -> None:
    for _, result in random_loops("nemo-ready-first", unlimited("nemo-ready-first"), num_runs=60):
        assert not result.stalled


@pytest.mark.parametrize("name", ["nemo-windowed", "nemo-weight-fifo", "nemo-in-order"])
def test_what_is_too_old_after_the_bound_was_lowered_is_dropped_and_training_goes_on(
    name: str,
) -> None:
    run = Run(nemo(name, 3), 1)
    run.publish(0)
    groups = [run.grant() for _ in range(4)]
    for group_id in groups:
        run.arrive(group_id)
    run.choose()
    run.choose()
    run.publish(2)
    run.policy = nemo(name, 1)
    assert run.choose() == Choice(drop=(groups[2], groups[3])), "two versions old"
    run.arrive(run.grant_all()[0])
    assert len(run.choose().commit) == 1


@pytest.mark.parametrize("name", ["nemo-windowed", "nemo-weight-fifo"])
def test_what_a_rollback_made_too_old_does_not_train(name: str) -> None:
    """Back from version 4 to 2: a group of (0, 4) is (2 - 2) + (4 - 2) = 2 away from (1, 2)."""
    states: list[tuple[int, Any]] = [(2, "ready"), (4, "ready"), (4, "running")]
    ledger = Ledger(
        version=Version(1, 2), published=Version(1, 2), batch_size=1, free_slots=1, group_size=1,
        groups=tuple(
            OpenGroup(
                group_id=f"g{i}", partition=0, offset=i, oldest=Version(0, m), newest=None,
                admitted_at=Version(0, m), state=state, order=i, ready_order=i,
            )
            for i, (m, state) in enumerate(states)
        ),
        num_granted=5, num_trained=2, num_closed=0, num_unpublished=0,
        lineage={1: Fork(parent=0, number=2, reason="rollback")},
    )  # fmt: skip
    subject = nemo(name, 1)
    assert subject.choose(None, ledger) == Choice(commit=("g0",), drop=("g1",))
    aborted = (Cancel("g2", "close", "stale"),) if name == "nemo-windowed" else ()
    assert subject.cancel(None, ledger) == aborted


SHAPE = RunShape(batch_size=16, group_size=4, num_slots=64)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_gives_what_its_configuration_leaves_out(name: str) -> None:
    run = Run(policy_for(name, SHAPE), 16)
    run.publish(0)
    assert run.credits() == 32, "two batches in the buffer, all in flight"
    assert policy_for(name, SHAPE, max_inflight_prompts=5).auditable is False


@pytest.mark.parametrize("name", GATED)
def test_a_gated_samplers_grants_can_be_audited_where_only_the_gate_limits_them(name: str) -> None:
    assert policy_for(name, SHAPE).auditable
    assert not policy_for("nemo-windowed", SHAPE).auditable


@pytest.mark.parametrize("name", NAMES)
def test_the_frameworks_own_defaults_fit_a_batch_of_32(name: str) -> None:
    run = Run(policy(name, num_prompts_per_step=32), 32)
    run.publish(0)
    assert run.credits() == 32
    assert policy(name).bound == (None if name == "nemo-ready-first" else 1)


Named = Callable[..., StalenessPolicy[Any]]


def for_run(name: str, **parameters: Any) -> StalenessPolicy[Any]:
    return policy_for(name, SHAPE, **parameters)


@pytest.mark.parametrize(
    ("named", "name", "parameters", "message"),
    [
        (policy, "nemo-windowed", {"max_staleness_versions": -1},
         "max_staleness_versions must be an integer of at least 0, got -1"),
        (policy, "nemo-windowed", {"sample_freshest_first": 1},
         "sample_freshest_first must be true or false, got 1"),
        (policy, "nemo-in-order", {"max_staleness_versions": 1},
         "unknown parameter 'max_staleness_versions', did you mean 'max_lookahead_versions'?"),
        (policy, "nemo-in-order", {"max_lookahead_versions": True},
         "max_lookahead_versions must be an integer of at least 0, got True"),
        (policy, "nemo-ready-first", {"max_inflight_prompts": 0},
         "max_inflight_prompts must be an integer of at least 1, got 0"),
        (policy, "nemo-weight-fifo", {"min_groups_for_streaming_train": None},
         "min_groups_for_streaming_train must be an integer of at least 1, got None"),
        (policy, "nemo-weight-fifo", {"num_prompts_per_step": 0},
         "num_prompts_per_step must be an integer of at least 1, got 0"),
        (policy, "nemo-weight-fifo", {"num_prompts_per_step": 32, "max_staleness_versions": 2},
         "max_buffered_rollouts must be at least 96, the groups of 3 batches of 32, got 64"),
        (for_run, "nemo-ready-first", {"max_buffered_rollouts": 31},
         "max_buffered_rollouts must be at least 32, the groups of 2 batches of 16, got 31"),
        (for_run, "nemo-in-order", {"max_lookahead_versions": 2, "max_buffered_rollouts": 40},
         "max_buffered_rollouts must be at least 48, the groups of 3 batches of 16, got 40"),
        (for_run, "nemo-windowed", {"max_buffered_rollouts": 15},
         "max_buffered_rollouts must be at least 16, the groups a step takes at once, got 15"),
        (for_run, "nemo-windowed", {"num_prompts_per_step": 8},
         "num_prompts_per_step is 16 in this run, got 8"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_one_clear_line(
    named: Named, name: str, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{name}: {re.escape(message)}$"):
        named(name, **parameters)
