"""dressage: its counts, its window of end versions and its restarts, by hand and at random."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from connectors.records import Cancel, Version
from operators.staleness import policy, policy_for
from operators.staleness.preset import RunShape
from operators.staleness.types import (
    Announced,
    Arrived,
    Choice,
    Closed,
    Committed,
    Event,
    Granted,
    Requeued,
)
from tests.operators.policy_run import Run, closed_loop, v


def dressage(batch_size: int = 1, **parameters: Any) -> Run:
    run = Run(policy("dressage", **{"max_active_groups": 4, **parameters}), batch_size)
    run.publish(0)
    return run


def test_a_run_gives_the_active_groups_its_batch_size() -> None:
    shape = RunShape(batch_size=5, group_size=8, num_slots=64)
    run = Run(policy_for("dressage", shape), 5)
    run.publish(0)
    assert run.credits() == 5
    run.policy = policy_for("dressage", shape, max_active_groups=9)
    assert run.credits() == 9


def test_a_group_frees_its_place_when_it_ends() -> None:
    run = dressage()
    a, b, *_ = run.grant_all()
    assert run.credits() == 0
    run.arrive(a)
    run.close(b)
    assert run.credits() == 2


def test_nothing_starts_while_the_queue_behind_the_open_batch_is_eight_tenths_full() -> None:
    run = dressage(batch_size=2, output_queue_size=5, max_active_groups=10)
    groups = run.grant_all()
    for group_id in groups[:5]:
        run.arrive(group_id)
    assert run.credits() == 5, "two are in the open batch, three in the queue"
    run.arrive(groups[5])
    assert run.credits() == 0
    run.choose()
    assert run.credits() == 6


def test_a_queue_of_one_still_fills_a_batch() -> None:
    run = dressage(batch_size=3, output_queue_size=1, max_active_groups=1)
    for _ in range(3):
        (group_id,) = run.grant_all()
        run.arrive(group_id)
    assert len(run.choose().commit) == 3


def test_a_batch_is_trained_when_it_is_full_in_the_order_of_finishing() -> None:
    run = dressage(batch_size=2)
    a, b, c, _ = run.grant_all()
    run.arrive(c)
    assert run.choose() == Choice()
    run.arrive(a)
    run.arrive(b)
    assert run.choose().commit == (c, a)
    assert run.choose() == Choice(), "the surplus one waits for the next batch"
    assert b in run.open


def test_a_group_that_ended_before_the_last_k_versions_seen_is_dropped() -> None:
    run = dressage(batch_size=3, dressage_staleness_keep_versions=2)
    run.publish(6)
    a, b, c, d = run.grant_all()
    run.arrive(a, oldest=1, newest=1)
    run.arrive(b, oldest=1, newest=4)
    assert run.choose() == Choice(), "1 and 4 are the last two seen"
    run.arrive(c, oldest=1, newest=6)
    assert run.choose() == Choice(drop=(a,)), "though it was collected already"
    assert run.credits() == 3
    run.arrive(d, oldest=0, newest=3)
    assert run.choose() == Choice(drop=(d,))


def test_only_versions_that_groups_ended_with_count() -> None:
    run = dressage(dressage_staleness_keep_versions=1)
    group_id = run.grant()
    run.arrive(group_id, oldest=0, newest=0)
    run.version = 9
    run.publish(9)
    assert run.choose().commit == (group_id,)
    assert run.staleness == [9]


def test_an_old_version_seen_late_does_not_push_out_the_newest() -> None:
    run = dressage(dressage_staleness_keep_versions=1)
    run.publish(5)
    a, b, c, _ = run.grant_all()
    run.arrive(a, oldest=5, newest=5)
    run.arrive(b, oldest=4, newest=4)
    run.arrive(c, oldest=5, newest=5)
    assert run.choose() == Choice(commit=(a,), drop=(b,))
    assert run.choose() == Choice(commit=(c,))


def test_versions_after_a_rollback_are_newer_than_those_given_up() -> None:
    subject = policy("dressage", max_active_groups=4, dressage_staleness_keep_versions=2)
    state = subject.start()
    for version in (Version(0, 8), Version(0, 9), Version(1, 6)):
        state = subject.observe(state, Arrived("g", version, version))
    assert state.versions == (Version(0, 9), Version(1, 6))


@pytest.mark.parametrize("num_versions", [10, 47])
def test_a_long_group_that_ends_at_the_newest_version_trains_however_old_it_is(
    num_versions: int,
) -> None:
    """The counterexample: K = 1 compares end versions with each other, and nothing with what is
    trained."""
    run = dressage(max_active_groups=2, dressage_staleness_keep_versions=1)
    slow, other = run.grant_all()
    for step in range(num_versions):
        run.arrive(other)
        run.choose()
        run.publish(step + 1)
        (other,) = run.grant_all()
    run.arrive(slow, oldest=0, newest=num_versions)
    run.choose()
    assert run.staleness[-1] == num_versions


def test_a_group_past_its_switches_restarts_twice_and_is_then_given_up() -> None:
    """P = 1: two versions after its start it has switched twice."""
    run = dressage(batch_size=1, max_partial_rollout_preempts=1)
    group_id = run.grant()
    orders = []
    for version in range(1, 8):
        run.publish(version)
        orders += [(version, c) for c in run.policy.cancel(run.state, run.ledger())]
        run.cancel()
    assert orders == [
        (2, Cancel(group_id, "requeue", "stale")),
        (4, Cancel(group_id, "requeue", "stale")),
        (6, Cancel(group_id, "close", "stale")),
    ]
    assert run.closed == {"cancelled": 1}


def test_a_version_that_was_skipped_is_no_restart() -> None:
    """P = 0: each announced version is a restart, whichever it is."""
    run = dressage(max_partial_rollout_preempts=0, rollout_max_retries=2)
    group_id = run.grant()
    orders = []
    for version in (3, 4, 9):
        run.publish(version)
        orders += run.policy.cancel(run.state, run.ledger())
        run.cancel()
    assert [order.then for order in orders] == ["requeue", "requeue", "close"]
    assert {order.group_id for order in orders} == {group_id}


def test_only_groups_that_run_have_restarts_in_its_state() -> None:
    subject = policy("dressage", max_active_groups=4, dressage_staleness_keep_versions=1)
    state = subject.start()
    for group_id in ("a", "b", "c", "a"):
        state = subject.observe(state, Requeued(group_id, v(1)))
    assert state.restarts == {"a": 2, "b": 1, "c": 1}
    state = subject.observe(state, Arrived("a", v(1), v(2)))
    state = subject.observe(state, Closed("b", "stale"))
    state = subject.observe(state, Committed("c", 3))
    assert (state.restarts, state.versions) == ({}, (v(2),))


def test_without_retries_a_group_past_its_switches_is_given_up_at_once() -> None:
    run = dressage(max_partial_rollout_preempts=0, rollout_max_retries=0)
    group_id = run.grant()
    run.publish(1)
    assert run.policy.cancel(run.state, run.ledger()) == (Cancel(group_id, "close", "stale"),)


def test_a_group_that_finished_past_its_switches_is_dropped() -> None:
    run = dressage(max_partial_rollout_preempts=2)
    run.publish(3)
    a, b, *_ = run.grant_all()
    run.arrive(a, oldest=0, newest=3)
    run.arrive(b, oldest=1, newest=3)
    assert run.choose() == Choice(commit=(b,), drop=(a,))


def test_without_a_limit_switches_do_not_matter() -> None:
    run = dressage()
    group_id = run.grant()
    run.publish(9)
    assert run.policy.cancel(run.state, run.ledger()) == ()
    run.arrive(group_id, oldest=0, newest=9)
    assert run.choose().commit == (group_id,)


def test_its_state_follows_from_what_is_open_and_is_as_short_as_its_window() -> None:
    subject = policy("dressage", max_active_groups=4, dressage_staleness_keep_versions=2)
    state = subject.start()
    events: list[Event] = [Announced(v(9)), Granted("a", v(1)), Closed("x", "reward_failed")]
    events += [Arrived("b", v(0), v(number)) for number in (3, 7, 5, 7, 1)]
    for event in events:
        state = subject.observe(state, event)
    assert state.versions == (v(5), v(7))
    off = policy("dressage", max_active_groups=4)
    assert off.observe(off.start(), Arrived("b", v(0), v(3))) == off.start()


def test_a_smaller_window_holds_at_once() -> None:
    run = dressage(batch_size=2, dressage_staleness_keep_versions=2)
    run.publish(2)
    a, b, c, _ = run.grant_all()
    run.arrive(a, oldest=0, newest=1)
    run.arrive(b, oldest=0, newest=2)
    run.policy = policy("dressage", max_active_groups=4, dressage_staleness_keep_versions=1)
    assert run.choose() == Choice(drop=(a,))
    run.arrive(c, oldest=0, newest=2)
    assert run.choose().commit == (b, c)


def test_random_orders_never_stall_it_and_do_age_groups_without_end() -> None:
    chance = random.Random(11)
    oldest = 0
    closed: set[str] = set()
    for _ in range(200):
        batch_size = chance.randint(1, 3)
        result = closed_loop(
            policy(
                "dressage",
                max_active_groups=chance.randint(1, 2 * batch_size),
                output_queue_size=chance.choice([1, 4, 1000]),
                dressage_staleness_keep_versions=chance.randint(0, 3),
                max_partial_rollout_preempts=chance.choice([None, None, 0, 2]),
            ),
            chance,
            batch_size=batch_size,
            num_steps=8,
            num_slow=1,
            failures=chance.choice([0.0, 0.2]),
        )
        assert not result.stalled
        closed |= result.closed.keys()
        oldest = max(oldest, result.max_staleness)
    assert oldest > 5
    assert closed == {"reward_failed", "stale", "cancelled"}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_active_groups": 0}, "max_active_groups must be an integer of at least 1, got 0"),
        ({"output_queue_size": 0}, "output_queue_size must be an integer of at least 1, got 0"),
        ({"dressage_staleness_keep_versions": -1}, "dressage_staleness_keep_versions must be an "
         "integer of at least 0, got -1"),
        ({"max_partial_rollout_preempts": -1}, "max_partial_rollout_preempts must be an integer "
         "of at least 0, got -1"),
        ({"rollout_max_retries": 1.5}, "rollout_max_retries must be an integer of at least 0, "
         "got 1.5"),
        ({"staleness_keep_versions": 1}, "unknown parameter 'staleness_keep_versions', did you "
         "mean 'dressage_staleness_keep_versions'?"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_one_clear_line(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^dressage: {re.escape(message)}$"):
        policy("dressage", **{"max_active_groups": 4, **parameters})
