"""verl-drop and verl-wait: by hand, against verl's own count of admissions, and in random runs."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from connectors.records import Fork, Version
from operators.staleness import policy
from operators.staleness.types import Choice, Ledger, OpenGroup
from tests.operators.policy_run import Run
from tests.operators.random_runs import random_acts, random_loops

BOTH = pytest.mark.parametrize("name", ["verl-drop", "verl-wait"])


def verl(name: str, threshold: int | None, warmup: int = 1) -> Any:
    return policy(name, max_off_policy_threshold=threshold, num_warmup_batches=warmup)


def draw(chance: random.Random, batch_size: int) -> dict[str, Any]:
    return {
        "max_off_policy_threshold": chance.randint(1, 4),
        "num_warmup_batches": chance.randint(0, 3),
    }


# ------------------------------------------------------------------------------------- admission
@BOTH
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_it_admits_the_warm_up_and_then_a_batch_as_each_step_begins(name: str, warmup: int) -> None:
    run = Run(verl(name, 8, warmup), 4)
    run.publish(0)
    for group_id in run.grant_all():
        run.arrive(group_id)
    assert run.num_granted == (warmup + 1) * 4
    for step in (1, 2, 3):
        run.choose()
        assert (run.version, run.credits()) == (step, 0), "the next step has not begun"
        run.publish(step)
        granted = run.grant_all()
        assert len(granted) == 4
        for group_id in granted:
            run.arrive(group_id)


@BOTH
def test_it_has_granted_what_verl_counts_up(name: str) -> None:
    """verl: w B at first, B as each step begins, one for each group that is evicted or fails."""
    chance = random.Random(7)
    for _ in range(30):
        batch_size, warmup = chance.randint(1, 4), chance.randint(0, 3)
        for run in random_acts(Run(verl(name, None, warmup), batch_size), chance):
            steps_begun = run.published + 1
            admitted = (warmup + steps_begun) * batch_size + run.closed.total()
            assert run.credits() == admitted - run.num_granted


@BOTH
def test_a_failed_groups_replacement_has_the_stamp_of_the_step_it_came_in(name: str) -> None:
    run = Run(verl(name, 2), 1)
    run.publish(0)
    first, fails = run.grant_all()
    run.arrive(first)
    run.choose()
    run.publish(1)
    (second,) = run.grant_all()
    run.close(fails)
    (replacement,) = run.grant_all()
    run.arrive(second)
    run.choose()
    run.publish(2)
    run.arrive(replacement)
    assert run.choose() == Choice(commit=(replacement,)), "a span of 2, where the failed had 3"


def test_what_would_be_stamped_too_old_for_the_open_step_is_not_granted() -> None:
    run = Run(verl("verl-drop", 1), 2)
    run.publish(0)
    a, b, c, d = run.grant_all()
    for group_id in (a, b, c, d):
        run.arrive(group_id)
    run.choose()
    assert run.choose() == Choice(drop=(c, d))
    assert run.credits() == 0, "stamped step 1, they could never train in step 2"
    run.publish(1)
    assert run.credits() == 4


@BOTH
def test_its_grants_can_be_told_without_knowing_what_has_arrived(name: str) -> None:
    run = Run(verl(name, 8), 2)
    run.publish(0)
    for group_id in run.grant_all()[:3]:
        run.arrive(group_id)
    run.close("p/0/3")
    shown = run.ledger()
    running = tuple(replace(g, state="running", ready_order=None) for g in shown.groups)
    assert run.policy.auditable
    assert run.credits() == run.policy.credits(None, replace(shown, groups=running)) == 1


# -------------------------------------------------------------------------------------- sampling
@BOTH
def test_a_step_is_sampled_whole_and_oldest_stamps_first(name: str) -> None:
    run = Run(verl(name, 8), 2)
    run.publish(0)
    a, b, c, d = run.grant_all()
    run.arrive(d)
    assert run.choose() == Choice(), "one of two"
    run.arrive(b)
    assert run.choose() == Choice(commit=(b, d))
    run.publish(1)
    e, f = run.grant_all()
    run.arrive(f)
    run.arrive(c)
    assert run.choose() == Choice(commit=(c, f)), "c has the older stamp though f came first"
    assert {a, e} == set(run.open)


def test_drop_evicts_by_stamp_what_finished_and_grants_as_many_anew() -> None:
    run = Run(verl("verl-drop", 2), 1)
    run.publish(0)
    slow, first = run.grant_all()
    run.arrive(first)
    run.choose()
    for step in (1, 2):
        run.publish(step)
        (group_id,) = run.grant_all()
        assert run.choose() == Choice(), "slow is running: it is left alone whatever its span"
        run.arrive(group_id)
        run.choose()
    run.publish(3)
    assert len(run.grant_all()) == 1
    run.arrive(slow, oldest=3)
    assert run.choose() == Choice(drop=(slow,)), "its tokens are fresh, its stamp is not"
    assert run.credits() == 1


def test_wait_samples_nothing_while_a_running_group_has_reached_the_threshold() -> None:
    run = Run(verl("verl-wait", 2, 2), 1)
    run.publish(0)
    slow, first, second = run.grant_all()
    run.arrive(first)
    run.arrive(second)
    assert run.choose().commit == (first,), "at step 1 the span of slow is 1"
    run.publish(1)
    assert run.choose() == Choice(), "at step 2 it is 2"
    run.arrive(slow)
    assert run.choose().commit == (slow,)


@BOTH
def test_without_a_threshold_nothing_is_too_old_or_waited_for(name: str) -> None:
    run = Run(verl(name, None), 1)
    run.publish(0)
    slow, *others = run.grant_all()
    for step in range(1, 10):
        for group_id in others:
            run.arrive(group_id)
        run.choose()
        run.publish(step)
        others = run.grant_all()
    run.arrive(slow)
    assert run.choose().commit == (slow,)
    assert (run.staleness[-1], run.policy.bound) == (9, None)


# ----------------------------------------------------------------------------------------- bound
@pytest.mark.parametrize("threshold", [1, 2, 8])
def test_drop_bounds_at_one_below_the_threshold(threshold: int) -> None:
    assert verl("verl-drop", threshold, 3).bound == threshold - 1


@pytest.mark.parametrize(
    ("threshold", "warmup", "bound"),
    [(8, 1, 7), (2, 1, 1), (3, 2, 3), (3, 4, 5), (1, 1, 1), (1, 4, 4), (5, 0, 0), (None, 0, 0)],
)
def test_wait_bounds_at_what_it_can_keep(
    threshold: int | None, warmup: int, bound: int | None
) -> None:
    assert verl("verl-wait", threshold, warmup).bound == bound


def test_waiting_for_running_groups_alone_trains_the_fifth_batch_four_steps_old() -> None:
    """T = 3, w = 4, B = 4: twenty prompts of version 0 finish early, and T - 1 is 2."""
    run = Run(verl("verl-wait", 3, 4), 4)
    run.publish(0)
    groups = run.grant_all()
    assert len(groups) == 20
    for group_id in groups:
        run.arrive(group_id)
    for step in range(1, 6):
        run.choose()
        run.publish(step)
    assert run.staleness == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    assert max(run.staleness) > 3 - 1


def test_the_bound_of_waiting_is_reached_when_fresh_groups_overtake_the_warm_up_at_first() -> None:
    """T = 3, w = 4, B = 4: step 1 trains four of version 0, step 2 the four fresh ones, and the
    sixteen that are left fill steps 3 to 6, the last of which trains at version 5."""
    run = Run(verl("verl-wait", 3, 4), 4)
    for step in range(6):
        run.publish(step)
        granted = run.grant_all()
        running = [g.group_id for g in run.open.values() if g.state == "running"]
        for group_id in granted[:4] if step < 2 else running:
            run.arrive(group_id)
        run.choose()
        assert run.version == step + 1
    assert run.staleness == [0] * 8 + [2] * 4 + [3] * 4 + [4] * 4 + [5] * 4
    assert run.policy.bound == 5


def test_drop_never_trains_above_its_bound_and_never_stalls() -> None:
    reached = 0
    for subject, result in random_loops("verl-drop", draw):
        assert not result.stalled
        assert result.max_staleness <= subject.bound
        reached += result.max_staleness == subject.bound > 0
    assert reached > 60


def test_wait_keeps_its_bound_without_dropping_and_never_stalls() -> None:
    reached = 0
    for subject, result in random_loops("verl-wait", draw):
        assert not result.stalled
        assert result.closed["stale"] == 0
        assert result.max_staleness <= subject.bound
        reached += result.max_staleness == subject.bound > 0
    assert reached > 60


@BOTH
def test_what_a_lowered_threshold_makes_too_old_is_dropped(name: str) -> None:
    run = Run(verl(name, 8, 3), 1)
    run.publish(0)
    groups = run.grant_all()
    for group_id in groups:
        run.arrive(group_id)
    run.choose()
    run.choose()
    run.policy = verl(name, 2, 1)
    assert run.choose() == Choice(drop=tuple(groups[2:])), "two versions old, the bound is 1"


@BOTH
def test_what_is_older_than_its_stamp_is_dropped_too(name: str) -> None:
    run = Run(verl(name, 2), 1)
    run.publish(0)
    for group_id in run.grant_all():
        run.arrive(group_id)
        run.choose()
    run.publish(2)
    group_id, _ = run.grant_all()
    run.arrive(group_id, oldest=0)
    assert run.choose() == Choice(drop=(group_id,))


@BOTH
def test_what_a_rollback_gave_up_is_as_old_as_the_way_back_and_forth(name: str) -> None:
    """T = 3, bound 2. Forked at 2, at (1, 2): (0, 1) is 1, (0, 4) is 2 and (0, 5) is 3 off."""
    ledger = Ledger(
        version=Version(1, 2), published=Version(1, 2), batch_size=2, free_slots=2, group_size=1,
        groups=tuple(
            OpenGroup(
                group_id=f"g{m}", partition=0, offset=m, oldest=Version(0, m), newest=None,
                admitted_at=Version(0, m), state="ready", order=m, ready_order=m,
            )
            for m in (1, 4, 5)
        ),
        num_granted=7, num_trained=4, num_closed=0, num_unpublished=0,
        lineage={1: Fork(parent=0, number=2, reason="rollback")},
    )  # fmt: skip
    assert verl(name, 3).choose(None, ledger) == Choice(commit=("g1", "g4"), drop=("g5",))


# ------------------------------------------------------------------------------------ parameters
@BOTH
def test_it_has_verls_defaults(name: str) -> None:
    run = Run(policy(name), 4)
    run.publish(0)
    assert (run.policy.name, run.policy.unit, run.policy.bound) == (name, "group", 7)
    assert run.credits() == (1 + 1) * 4


@BOTH
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"max_off_policy_threshold": 0},
            "max_off_policy_threshold must be an integer of at least 1, got 0",
        ),
        (
            {"num_warmup_batches": -1},
            "num_warmup_batches must be an integer of at least 0, got -1",
        ),
        (
            {"num_warmup_batches": None},
            "num_warmup_batches must be an integer of at least 0, got None",
        ),
        (
            {"max_off_policy_treshold": 8},
            "unknown parameter 'max_off_policy_treshold', did you mean 'max_off_policy_threshold'?",
        ),
    ],
)
def test_a_wrong_parameter_is_one_clear_line(
    name: str, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}: {message}')}$"):
        policy(name, **parameters)
