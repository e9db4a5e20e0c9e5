"""windowed-fifo against a literal reading of the window, by hand, and in random arrival orders."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest

from operators.staleness import policy, policy_for
from operators.staleness.preset import RunShape
from operators.staleness.types import Choice, StalenessPolicy
from tests.operators.policy_run import Run
from tests.operators.random_runs import random_acts, random_loops


def fifo(steps: int, prompts: int, window: int | None) -> StalenessPolicy[Any]:
    return policy(
        "windowed-fifo",
        target_offpolicy_steps=steps,
        num_prompts_per_train_step=prompts,
        window_size=window,
    )


def test_a_window_of_three_lets_two_younger_groups_pass_a_slow_one() -> None:
    run = Run(fifo(1, 3, 3), 3)
    run.publish(0)
    groups = run.grant_all()
    assert len(groups) == 6
    for number in (0, 1, 3, 4, 5):
        run.arrive(groups[number])
    assert run.choose().commit == (groups[0], groups[1], groups[3])
    assert run.choose().commit == (groups[4],)
    assert run.choose() == Choice(), "group 2 is waited for; group 5 is outside its window"
    run.arrive(groups[2])
    assert run.choose().commit == (groups[2], groups[5])


def test_a_window_of_one_is_strict_fifo() -> None:
    run = Run(fifo(0, 2, 1), 2)
    run.publish(0)
    first, second = run.grant_all()
    run.arrive(second)
    assert run.choose() == Choice()
    run.arrive(first)
    assert run.choose().commit == (first, second), "the window moves on when the first is taken"


def test_a_group_keeps_its_place_until_weights_trained_on_it_are_published() -> None:
    run = Run(fifo(1, 2, 2), 2)
    run.publish(0)
    for group_id in run.grant_all():
        run.arrive(group_id)
    run.choose()
    assert (run.version, run.credits()) == (1, 0)
    run.publish(1)
    assert run.credits() == 2


def test_its_bound_is_reached() -> None:
    """S = 1, P = 2, W = 3: (4 + 3 - 2) // 2 = 2. The last of four groups is slow; the three before
    it and the two after it train first."""
    run = Run(fifo(1, 2, 3), 2)
    assert run.policy.bound == 2
    run.publish(0)
    a, b, c, slow = run.grant_all()
    run.arrive(a)
    run.arrive(b)
    run.choose()
    run.publish(1)
    d, e = run.grant_all()
    for group_id in (c, d, e):
        run.arrive(group_id)
    assert run.choose().commit == (c, d)
    run.publish(2)
    (f, _) = run.grant_all()
    run.arrive(f)
    assert run.choose().commit == (e,)
    assert run.choose() == Choice()
    run.arrive(slow)
    assert run.choose().commit == (slow,)
    assert run.staleness[-1] == 2


def test_the_bound_is_the_target_and_the_batches_the_window_lets_pass() -> None:
    for steps in range(4):
        for prompts in range(1, 9):
            for window in range(1, 30):
                expected = steps + math.ceil((window - 1) / prompts)
                assert fifo(steps, prompts, window).bound == expected


@pytest.mark.parametrize(
    ("steps", "prompts", "window"), [(1, 8, 4), (0, 10, 3), (3, 8, 9), (0, 1, 1)]
)
def test_the_window_is_three_tenths_of_the_buffer_unless_given(
    steps: int, prompts: int, window: int
) -> None:
    """0.3 * 16 = 4.8, 0.3 * 10 = 3, 0.3 * 32 = 9.6, 0.3 * 1 = 0.3 and at least one."""
    run = Run(fifo(steps, prompts, None), prompts)
    run.publish(0)
    groups = run.grant_all()
    run.arrive(groups[0])
    assert run.choose().commit == (groups[0],)
    for group_id in groups[2:]:
        run.arrive(group_id)
    passed = 0
    while committed := run.choose().commit:
        passed += len(committed)
    assert passed == min(window - 1, len(groups[2:])), "the second one is slow"


def test_it_takes_the_oldest_finished_groups_of_the_anchored_window() -> None:
    num_steps = 0
    for seed in range(40):
        chance = random.Random(seed)
        steps, size, window_size = chance.randint(0, 2), chance.randint(1, 3), chance.randint(1, 5)
        run = Run(fifo(steps, size, window_size), size)
        for _ in random_acts(run, chance):
            expected: list[str] = []
            while len(expected) < size - run.committed:
                left = {g.order: g for g in run.open.values() if g.group_id not in expected}
                window = range(min(left, default=0), min(left, default=0) + window_size)
                finished = [left[at] for at in window if at in left and left[at].state == "ready"]
                if not finished:
                    break
                expected.append(finished[0].group_id)
            choice = run.policy.choose(run.state, run.ledger())
            assert choice == Choice(commit=tuple(expected))
            active = len(run.open) + run.num_trained - run.published * size
            assert run.credits() == (steps + 1) * size - active
        num_steps += run.version
    assert num_steps > 300


def test_strictness_holds_and_nothing_is_dropped_or_stalls() -> None:
    def draw(chance: random.Random, batch_size: int) -> dict[str, Any]:
        return {
            "target_offpolicy_steps": chance.randint(0, 2),
            "num_prompts_per_train_step": batch_size,
            "window_size": chance.choice([None, 1, 2, batch_size + 1]),
        }

    reached = set()
    for subject, result in random_loops("windowed-fifo", draw):
        assert subject.bound is not None
        assert result.max_staleness <= subject.bound
        assert not result.stalled
        assert result.closed["stale"] == 0
        reached.add(subject.bound - result.max_staleness)
    assert 0 in reached


def test_what_is_too_old_after_the_target_was_lowered_is_dropped_and_training_goes_on() -> None:
    run = Run(fifo(2, 1, 1), 1)
    run.publish(0)
    groups = run.grant_all()
    for group_id in groups:
        run.arrive(group_id)
    run.choose()
    run.policy = fifo(0, 1, 1)
    assert run.choose() == Choice(drop=(groups[1], groups[2]))
    run.publish(1)
    run.arrive(run.grant_all()[0])
    assert len(run.choose().commit) == 1


SHAPE = RunShape(batch_size=32, group_size=8, num_slots=512)


def test_a_run_gives_its_batch_size() -> None:
    run = Run(policy_for("windowed-fifo", SHAPE, target_offpolicy_steps=2, window_size=65), 32)
    run.publish(0)
    assert (run.credits(), run.policy.bound) == (96, (96 + 65 - 2) // 32)
    assert run.policy.bound == 4
    assert run.policy.auditable


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"target_offpolicy_steps": -1},
         "target_offpolicy_steps must be an integer of at least 0, got -1"),
        ({"window_size": 0}, "window_size must be an integer of at least 1, got 0"),
        ({"num_prompts_per_train_step": 8}, "num_prompts_per_train_step is 32 in this run, got 8"),
        ({"window": 3}, "unknown parameter 'window', did you mean 'window_size'?"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_one_clear_line(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^windowed-fifo: {re.escape(message)}$"):
        policy_for("windowed-fifo", SHAPE, **parameters)
