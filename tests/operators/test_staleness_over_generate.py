"""over-generate by hand and in random arrival orders."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from connectors.records import Cancel
from operators.staleness import policy, policy_for
from operators.staleness.preset import RunShape
from operators.staleness.types import Choice
from tests.operators.policy_run import Run, v
from tests.operators.random_runs import random_loops


def started(extra: int, then: str = "close", batch_size: int = 2) -> tuple[Run, list[str]]:
    run = Run(policy("over-generate", extra=extra, then=then), batch_size)
    run.publish(0)
    return run, run.grant_all()


def test_the_first_groups_that_finish_are_the_step_and_the_rest_is_closed_at_once() -> None:
    run, (a, b, c, d) = started(extra=2)
    run.arrive(d)
    assert run.policy.cancel(run.state, run.ledger()) == ()
    run.arrive(b)
    assert run.choose().commit == (d, b)
    assert run.policy.cancel(run.state, run.ledger()) == (
        Cancel(a, "close", "cancelled"),
        Cancel(c, "close", "cancelled"),
    )
    run.cancel()
    assert run.credits() == 0, "synchronous: the next step's start under the next version"
    run.publish(1)
    assert run.credits() == 4


def test_the_rest_is_put_back_when_the_next_version_is_published() -> None:
    run, (a, b, c) = started(extra=1, then="requeue")
    run.arrive(a)
    run.arrive(c)
    run.choose()
    assert run.policy.cancel(run.state, run.ledger()) == (), "it would start under version 0"
    run.publish(1)
    assert run.policy.cancel(run.state, run.ledger()) == (Cancel(b, "requeue", "cancelled"),)
    run.cancel()
    assert run.policy.cancel(run.state, run.ledger()) == ()
    assert run.credits() == 2, "with the one put back, three again"
    run.arrive(b, oldest=1)
    run.arrive(run.grant_all()[0])
    assert b in run.choose().commit
    assert run.staleness == [0] * 4


@pytest.mark.parametrize("then", ["close", "requeue"])
def test_a_group_that_finishes_after_the_step_is_full_is_dropped(then: str) -> None:
    run, (a, b, c) = started(extra=1, then=then)
    for group_id in (c, b, a):
        run.arrive(group_id)
    assert run.choose().commit == (c, b)
    assert run.choose() == Choice(drop=(a,))


def test_a_group_that_fails_is_replaced_while_its_step_fills() -> None:
    run, (a, b, _) = started(extra=1)
    run.arrive(a)
    run.choose()
    run.close(b)
    assert run.credits() == 1


def test_without_extra_groups_it_is_sync() -> None:
    run, groups = started(extra=0)
    sync = policy("sync")
    assert len(groups) == 2
    for group_id in groups:
        run.arrive(group_id)
    run.choose()
    assert run.policy.cancel(run.state, run.ledger()) == ()
    assert (run.policy.bound, run.credits()) == (sync.bound, 0)


@pytest.mark.parametrize("then", ["close", "requeue"])
def test_no_token_is_stale_and_nothing_stalls(then: str) -> None:
    def draw(chance: random.Random, batch_size: int) -> dict[str, Any]:
        return {"extra": chance.randint(0, 3), "then": then}

    num_closed = 0
    for subject, result in random_loops("over-generate", draw):
        assert (subject.bound, result.max_staleness) == (0, 0)
        assert not result.stalled
        num_closed += result.closed["cancelled"]
    assert (num_closed > 0) == (then == "close")


@pytest.mark.parametrize("then", ["close", "requeue"])
def test_what_another_policy_left_from_older_versions_is_given_up(then: str) -> None:
    run = Run(policy("n-step-off", n=2), 1)
    run.publish(0)
    first, ready, running = run.grant_all()
    run.arrive(first)
    run.choose()
    run.publish(1)
    run.arrive(ready)
    run.policy = policy("over-generate", extra=1, then=then)
    run.state = run.policy.start()
    assert run.choose() == Choice(drop=(ready,))
    run.cancel()
    if then == "requeue":
        assert run.open[running].oldest == v(1)
    assert run.credits() == 2 - len(run.open)


SHAPE = RunShape(batch_size=10, group_size=4, num_slots=64)


def test_a_run_gives_a_quarter_of_its_batch_rounded_up() -> None:
    run = Run(policy_for("over-generate", SHAPE), 10)
    run.publish(0)
    assert run.credits() == 13
    assert not run.policy.auditable


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "parameter 'extra' is missing"),
        ({"extra": -1}, "extra must be an integer of at least 0, got -1"),
        ({"extra": 1, "then": "keep"}, "then must be one of 'close', 'requeue', got 'keep'"),
        ({"extras": 1}, "unknown parameter 'extras', did you mean 'extra'?"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^over-generate: {re.escape(message)}$"):
        policy("over-generate", **parameters)
