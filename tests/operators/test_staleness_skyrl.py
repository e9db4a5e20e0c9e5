"""skyrl: by hand, against its own formula, and in random runs."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from operators.staleness import policy, policy_for
from operators.staleness.preset import RunShape
from operators.staleness.types import Choice
from tests.operators.policy_run import Run, closed_loop
from tests.operators.random_runs import random_acts, random_loops


def skyrl(steps: int, batch_size: int, workers: int | None = None) -> Any:
    return policy(
        "skyrl",
        max_staleness_steps=steps,
        train_batch_size=batch_size,
        num_parallel_generation_workers=workers,
    )


def test_at_most_so_many_run_and_at_most_so_many_batches_are_outstanding() -> None:
    run = Run(skyrl(2, 4, 10), 4)
    run.publish(0)
    groups = run.grant_all()
    assert len(groups) == 10
    for group_id in groups[:4]:
        run.arrive(group_id)
    assert len(run.grant_all()) == 2
    run.choose()
    assert run.credits() == 0, "a trained batch counts until its weights are announced"
    run.close(groups[4])
    assert run.credits() == 1
    run.publish(1)
    assert run.credits() == min(10 - 7, 12 - 7)


def test_its_credits_are_the_capacity_that_skyrl_computes() -> None:
    """capacity = min(workers - running, (S + global_step) B - (accepted + running)), where
    global_step is 1 before any weights were synchronised."""
    chance = random.Random(11)
    for _ in range(40):
        steps, batch_size = chance.randint(0, 3), chance.randint(1, 4)
        workers = chance.randint(batch_size, batch_size * (steps + 1))
        for run in random_acts(Run(skyrl(steps, batch_size, workers), batch_size), chance):
            running = sum(group.state == "running" for group in run.open.values())
            accepted = run.num_granted - running - run.closed.total()
            global_step = run.published + 1
            by_step = (steps + global_step) * batch_size - (accepted + running)
            assert run.credits() == max(0, min(workers - running, by_step))


def test_groups_are_trained_in_the_order_they_finish() -> None:
    run = Run(skyrl(1, 2), 2)
    run.publish(0)
    a, b, c, d = run.grant_all()
    run.arrive(d)
    assert run.choose() == Choice(commit=(d,))
    run.arrive(c)
    run.arrive(a)
    assert run.choose() == Choice(commit=(c,))
    assert run.choose() == Choice(commit=(a,))
    assert set(run.open) == {b}


def test_a_slow_group_is_overtaken_and_trained_though_it_is_too_stale() -> None:
    """B = 1, S = 1: one place has a slow group of version 0, the other serves five steps."""
    run = Run(skyrl(1, 1), 1)
    run.publish(0)
    slow, other = run.grant_all()
    for step in range(1, 6):
        run.arrive(other)
        run.choose()
        run.publish(step)
        (other,) = run.grant_all()
    run.arrive(slow)
    assert run.choose() == Choice(commit=(slow,)), "SkyRL warns, counts, and trains it"
    assert run.staleness[-1] == 5 > 1
    assert run.policy.bound is None


def test_a_random_run_goes_far_beyond_the_staleness_it_names() -> None:
    result = closed_loop(
        skyrl(1, 2), random.Random(2), batch_size=2, num_slow=2, slowness=40, num_steps=60
    )
    assert not result.stalled
    assert result.max_staleness > 5


def test_without_staleness_steps_nothing_is_stale_or_dropped_and_nothing_stalls() -> None:
    def draw(chance: random.Random, batch_size: int) -> dict[str, Any]:
        return {"max_staleness_steps": 0, "train_batch_size": batch_size}

    for subject, result in random_loops("skyrl", draw):
        assert (subject.bound, result.max_staleness) == (0, 0)
        assert not result.stalled
        assert result.closed["stale"] == 0


def test_with_staleness_steps_nothing_is_dropped_and_nothing_stalls() -> None:
    def draw(chance: random.Random, batch_size: int) -> dict[str, Any]:
        steps = chance.randint(1, 3)
        workers = chance.choice([None, chance.randint(batch_size, batch_size * (steps + 1))])
        return {
            "max_staleness_steps": steps,
            "train_batch_size": batch_size,
            "num_parallel_generation_workers": workers,
        }

    for _, result in random_loops("skyrl", draw, num_runs=60):
        assert not result.stalled
        assert result.closed["stale"] == 0


def test_what_is_too_old_after_the_steps_were_lowered_to_none_is_dropped() -> None:
    run = Run(skyrl(1, 2), 2)
    run.publish(0)
    groups = run.grant_all()
    for group_id in groups:
        run.arrive(group_id)
    run.choose()
    run.policy = skyrl(0, 2)
    assert run.choose() == Choice(drop=tuple(groups[2:]))
    run.publish(1)
    assert run.credits() == 2


@pytest.mark.parametrize(("workers", "auditable"), [(7, False), (8, True), (None, True)])
def test_its_grants_can_be_audited_where_running_groups_never_limit_them(
    workers: int | None, auditable: bool
) -> None:
    run = Run(skyrl(1, 4, workers), 4)
    run.publish(0)
    for group_id in run.grant_all()[:3]:
        run.arrive(group_id)
    shown = run.ledger()
    running = tuple(replace(g, state="running", ready_order=None) for g in shown.groups)
    as_audited = run.policy.credits(None, replace(shown, groups=running))
    assert run.policy.auditable == auditable == (run.credits() == as_audited)


@pytest.mark.parametrize(("batch_size", "credits"), [(4, 4 * 5), (200, 768)])
def test_left_out_the_workers_are_skyrls_768_but_no_more_than_it_would_accept(
    batch_size: int, credits: int
) -> None:
    shape = RunShape(batch_size=batch_size, group_size=8, num_slots=64)
    run = Run(policy_for("skyrl", shape), batch_size)
    run.publish(0)
    assert run.credits() == credits


def test_it_has_skyrls_defaults() -> None:
    subject = policy("skyrl")
    assert (subject.name, subject.unit, subject.bound) == ("skyrl", "group", None)
    run = Run(subject, 4)
    run.publish(0)
    assert run.credits() == 4 * (4 + 1)


RANGE = (
    "num_parallel_generation_workers must be from train_batch_size to "
    "train_batch_size * (max_staleness_steps + 1), here "
)


@pytest.mark.parametrize(
    ("batch_size", "parameters", "message"),
    [
        (4, {"num_parallel_generation_workers": 3}, RANGE + "4 to 20, got 3"),
        (4, {"num_parallel_generation_workers": 768}, RANGE + "4 to 20, got 768"),
        (
            4,
            {"num_parallel_generation_workers": 5, "max_staleness_steps": 0},
            RANGE + "4 to 4, got 5",
        ),
        (1000, {}, RANGE + "1000 to 5000, got 768"),
        (4, {"train_batch_size": 8}, "train_batch_size is 4 in this run, got 8"),
        (
            4,
            {"max_staleness_steps": 1.5},
            "max_staleness_steps must be an integer of at least 0, got 1.5",
        ),
        (
            4,
            {"max_staleness": 1},
            "unknown parameter 'max_staleness', did you mean 'max_staleness_steps'?",
        ),
    ],
)
def test_a_wrong_parameter_is_one_clear_line(
    batch_size: int, parameters: dict[str, Any], message: str
) -> None:
    shape = RunShape(batch_size=batch_size, group_size=8, num_slots=64)
    with pytest.raises(ValueError, match=f"^{re.escape(f'skyrl: {message}')}$"):
        policy_for("skyrl", shape, **parameters)
