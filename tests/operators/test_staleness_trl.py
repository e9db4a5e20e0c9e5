"""trl: by hand, against its own count of slots, and in random runs."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from operators.staleness import policy
from operators.staleness.types import Choice
from tests.operators.policy_run import Run
from tests.operators.random_runs import random_acts, random_loops


def draw(chance: random.Random, batch_size: int) -> dict[str, Any]:
    return {
        "max_staleness": chance.randint(0, 4),
        "max_inflight_tasks": chance.choice([-1, 1, 5, 20]),
        "queue_maxsize": chance.choice([1, 4, 1024]),
    }


@pytest.mark.parametrize(
    ("parameters", "slots"),
    [
        ({}, 4 * 2 * 8),
        ({"max_staleness": 2}, 2 * 2 * 8),
        ({"max_staleness": 0}, 1 * 2 * 8),
        ({"max_inflight_tasks": 20}, 20),
        ({"max_inflight_tasks": 3}, 8),
    ],
)
def test_a_slot_is_a_conversation(parameters: dict[str, Any], slots: int) -> None:
    """Two groups of eight a step; slots for less than a group count as for one."""
    run = Run(policy("trl", **parameters), batch_size=2, group_size=8)
    run.publish(0)
    assert run.credits() == slots
    assert len(run.grant_all()) == slots // 8


def test_a_groups_slots_are_free_again_when_it_ends() -> None:
    run = Run(policy("trl", max_inflight_tasks=24), batch_size=1, group_size=8)
    run.publish(0)
    first, second, _ = run.grant_all()
    assert run.credits() == 0
    run.arrive(first)
    assert run.credits() == 8, "all eight at once, before anybody trained on it"
    run.close(second)
    assert run.credits() == 16


def test_its_credits_are_the_slots_that_no_running_conversation_has() -> None:
    chance = random.Random(3)
    for _ in range(30):
        batch_size, group_size = chance.randint(1, 3), chance.randint(1, 4)
        subject = policy("trl", max_staleness=3)
        for run in random_acts(Run(subject, batch_size, group_size), chance):
            running = sum(group.state == "running" for group in run.open.values())
            assert run.credits() == (3 * batch_size - running) * group_size


def test_a_full_queue_lets_no_slot_be_filled() -> None:
    run = Run(policy("trl", queue_maxsize=4), batch_size=3, group_size=2)
    run.publish(0)
    first, second, *_ = run.grant_all()
    run.arrive(first)
    assert run.credits() == 2
    run.arrive(second)
    assert run.credits() == 0, "four samples are queued"
    run.choose()
    assert run.credits() == 4


def test_samples_are_pulled_in_the_order_of_arrival() -> None:
    run = Run(policy("trl"), batch_size=2)
    run.publish(0)
    a, b, c, *_ = run.grant_all()
    for group_id in (c, a, b):
        run.arrive(group_id)
    assert run.choose().commit == (c, a)


def test_what_is_too_old_when_it_is_pulled_is_dropped_with_its_whole_group() -> None:
    run = Run(policy("trl", max_staleness=1, max_inflight_tasks=4), batch_size=1, group_size=2)
    run.publish(0)
    slow, other = run.grant_all()
    for step in (1, 2):
        run.arrive(other)
        run.choose()
        run.publish(step)
        (other,) = run.grant_all()
    run.arrive(slow, oldest=2)
    run.arrive(other)
    assert run.choose() == Choice(commit=(other,), drop=(slow,)), "it took its slots at version 0"


def test_a_group_exactly_at_the_limit_trains() -> None:
    run = Run(policy("trl", max_staleness=1, max_inflight_tasks=2), batch_size=1)
    run.publish(0)
    for group_id in run.grant_all():
        run.arrive(group_id)
        run.choose()
    assert run.staleness == [0, 1]


def test_what_would_be_too_old_for_the_open_step_is_not_granted() -> None:
    run = Run(policy("trl", max_staleness=1, max_inflight_tasks=2), batch_size=1)
    run.publish(0)
    for group_id in run.grant_all():
        run.arrive(group_id)
        run.choose()
    assert (run.version, run.credits()) == (2, 0), "version 0 is two steps behind"
    run.publish(1)
    assert run.credits() == 2


def test_what_is_older_than_its_slot_is_dropped_too() -> None:
    run = Run(policy("trl", max_staleness=1), batch_size=1)
    run.publish(0)
    for step in (1, 2):
        run.arrive(run.grant_all()[0])
        run.choose()
        run.publish(step)
    (group_id,) = run.grant_all()
    run.arrive(group_id, oldest=0)
    assert run.choose() == Choice(drop=(group_id,))


def test_it_never_trains_above_its_bound_and_never_stalls() -> None:
    reached = 0
    for subject, result in random_loops("trl", draw):
        assert not result.stalled
        assert result.max_staleness <= subject.bound
        reached += result.max_staleness == subject.bound > 0
    assert reached > 60


def test_it_has_trls_defaults() -> None:
    subject = policy("trl", weight_sync_steps=1)
    assert (subject.name, subject.unit, subject.bound) == ("trl", "trajectory", 4)
    assert not subject.auditable


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_staleness": -1}, "max_staleness must be an integer of at least 0, got -1"),
        ({"max_staleness": None}, "max_staleness must be an integer of at least 0, got None"),
        ({"max_inflight_tasks": 0}, "max_inflight_tasks must be -1 or at least 1, got 0"),
        (
            {"max_inflight_tasks": -2},
            "max_inflight_tasks must be an integer of at least -1, got -2",
        ),
        ({"queue_maxsize": 0}, "queue_maxsize must be an integer of at least 1, got 0"),
        ({"weight_sync_steps": 2}, "weight_sync_steps must be one of 1, got 2"),
        (
            {"max_inflight": 8},
            "unknown parameter 'max_inflight', did you mean 'max_inflight_tasks'?",
        ),
    ],
)
def test_a_wrong_parameter_is_one_clear_line(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'trl: {message}')}$"):
        policy("trl", **parameters)
