"""areal: by hand, against its own formula, and in random runs."""

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


def areal(ofp: int, batch_size: int, concurrent: int | None = None) -> Any:
    return policy(
        "areal",
        max_head_offpolicyness=ofp,
        consumer_batch_size=batch_size,
        max_concurrent_rollouts=concurrent,
    )


def test_at_most_so_many_run_and_at_most_so_many_batches_are_outstanding() -> None:
    run = Run(policy(
        "areal", max_head_offpolicyness=2, consumer_batch_size=4, max_concurrent_rollouts=10
    ), 4)  # fmt: skip
    run.publish(0)
    groups = run.grant_all()
    assert len(groups) == 10, "12 may be outstanding, 10 running"
    for group_id in groups[:3]:
        run.arrive(group_id)
    assert len(run.grant_all()) == 2
    run.close(groups[3])
    assert run.credits() == 1
    run.arrive(groups[4])
    run.choose()
    assert run.credits() == 1, "what was trained counts until its weights are announced"
    run.publish(1)
    # Outstanding: 12 less the failed one less 4 trained; running: 10 + 2 - 1 failed - 4 arrived.
    assert run.credits() == min(10 - 7, 12 - 7)


def test_its_credits_are_the_capacity_that_areal_computes() -> None:
    """capacity = min(max_conc - running, (ofp + v + 1) bs - (accepted + running))."""
    chance = random.Random(5)
    for _ in range(40):
        ofp, bs = chance.randint(0, 3), chance.randint(1, 4)
        concurrent = chance.choice([None, bs, bs + 1, 3 * bs])
        for run in random_acts(Run(areal(ofp, bs, concurrent), bs), chance):
            running = sum(group.state == "running" for group in run.open.values())
            accepted = run.num_granted - running - run.closed.total()
            by_version = (ofp + run.published + 1) * bs - (accepted + running)
            capacity = min((concurrent or bs) - running, by_version)
            assert run.credits() == max(0, capacity)


def test_a_batch_is_taken_whole_and_the_first_submitted_first() -> None:
    run = Run(areal(1, 2, 4), 2)
    run.publish(0)
    a, b, c, d = run.grant_all()
    run.arrive(d)
    assert run.choose() == Choice()
    run.arrive(c)
    run.arrive(a)
    # c and d were enough for a batch, but nobody asked until a was there too.
    assert run.choose() == Choice(commit=(a, c))
    assert set(run.open) == {b, d}


def test_a_slow_group_is_overtaken_and_trains_any_number_of_versions_late() -> None:
    """bs = 1, ofp = 1: A is slow; B trains, C takes its place, and so on."""
    run = Run(areal(1, 1, 2), 1)
    run.publish(0)
    slow, other = run.grant_all()
    for step in range(1, 6):
        run.arrive(other)
        run.choose()
        run.publish(step)
        (other,) = run.grant_all()
    run.arrive(slow)
    assert run.choose() == Choice(commit=(slow,))
    assert run.staleness[-1] == 5 > 1
    assert run.policy.bound is None


def test_a_random_run_goes_far_beyond_the_off_policyness_it_names() -> None:
    result = closed_loop(
        areal(1, 2, 4), random.Random(1), batch_size=2, num_slow=2, slowness=40, num_steps=60
    )
    assert not result.stalled
    assert result.max_staleness > 5


def test_without_off_policyness_nothing_is_stale_or_dropped_and_nothing_stalls() -> None:
    def draw(chance: random.Random, batch_size: int) -> dict[str, Any]:
        concurrent = chance.choice([None, 1, batch_size + 2])
        return {"consumer_batch_size": batch_size, "max_concurrent_rollouts": concurrent}

    for subject, result in random_loops("areal", draw):
        assert (subject.bound, result.max_staleness) == (0, 0)
        assert not result.stalled
        assert result.closed["stale"] == 0


def test_with_off_policyness_nothing_is_dropped_and_nothing_stalls() -> None:
    def draw(chance: random.Random, batch_size: int) -> dict[str, Any]:
        return {
            "max_head_offpolicyness": chance.randint(1, 3),
            "consumer_batch_size": batch_size,
            "max_concurrent_rollouts": chance.choice([None, 1, 2 * batch_size]),
        }

    for _, result in random_loops("areal", draw, num_runs=60):
        assert not result.stalled
        assert result.closed["stale"] == 0


def test_what_is_too_old_after_the_off_policyness_was_lowered_to_none_is_dropped() -> None:
    run = Run(areal(1, 2, 4), 2)
    run.publish(0)
    groups = run.grant_all()
    for group_id in groups:
        run.arrive(group_id)
    run.choose()
    run.policy = areal(0, 2)
    assert run.choose() == Choice(drop=tuple(groups[2:]))
    run.publish(1)
    assert run.credits() == 2


@pytest.mark.parametrize(("concurrent", "auditable"), [(None, False), (7, False), (8, True)])
def test_its_grants_can_be_audited_where_running_groups_never_limit_them(
    concurrent: int | None, auditable: bool
) -> None:
    run = Run(areal(1, 4, concurrent), 4)
    run.publish(0)
    for group_id in run.grant_all()[:3]:
        run.arrive(group_id)
    shown = run.ledger()
    running = tuple(replace(g, state="running", ready_order=None) for g in shown.groups)
    as_audited = run.policy.credits(None, replace(shown, groups=running))
    assert run.policy.auditable == auditable == (run.credits() == as_audited)


def test_it_has_areals_defaults_and_the_batch_size_of_its_run() -> None:
    subject = policy("areal")
    assert (subject.name, subject.unit, subject.bound) == ("areal", "group", 0)
    in_a_run = Run(policy_for("areal", RunShape(batch_size=6, group_size=8, num_slots=64)), 6)
    in_a_run.publish(0)
    assert in_a_run.credits() == 6


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"max_head_offpolicyness": -1},
            "max_head_offpolicyness must be an integer of at least 0, got -1",
        ),
        (
            {"max_concurrent_rollouts": 0},
            "max_concurrent_rollouts must be an integer of at least 1, got 0",
        ),
        ({"consumer_batch_size": 5}, "consumer_batch_size is 4 in this run, got 5"),
        (
            {"consumer_batchsize": 4},
            "unknown parameter 'consumer_batchsize', did you mean 'consumer_batch_size'?",
        ),
    ],
)
def test_a_wrong_parameter_is_one_clear_line(parameters: dict[str, Any], message: str) -> None:
    shape = RunShape(batch_size=4, group_size=8, num_slots=64)
    with pytest.raises(ValueError, match=f"^{re.escape(f'areal: {message}')}$"):
        policy_for("areal", shape, **parameters)


def test_a_batch_size_of_nothing_is_refused() -> None:
    message = "areal: consumer_batch_size must be an integer of at least 1, got 0"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        policy("areal", consumer_batch_size=0)
