"""prime-rl: the cap's moves by hand, what is stale, and random orders under random engine load."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.records import Cancel, Fork, Version
from operators.staleness import policy, policy_for
from operators.staleness.preset import RunShape
from operators.staleness.types import (
    Announced,
    Arrived,
    Choice,
    Closed,
    Committed,
    EngineLoad,
    Event,
    Granted,
    Ledger,
    OpenGroup,
    StalenessPolicy,
    Unit,
)
from tests.operators.policy_run import Run, closed_loop, v


def flying(num_groups: int, group_size: int = 1, **parameters: Any) -> tuple[Run, list[str]]:
    """A run with its cap full of groups."""
    cap = {"initial_inflight": num_groups * group_size, "group_size": group_size}
    run = Run(policy("prime-rl", **{**cap, **parameters}), 4, group_size)
    run.publish(0)
    return run, run.grant_all()


def poll(run: Run, kv_use: float = 0.5, num_queued: int = 0, num_preempted: int = 0) -> None:
    run.observe(
        EngineLoad(
            num_running=len(run.ledger().running) * run.group_size,
            num_queued=num_queued,
            kv_use=kv_use,
            num_preempted=num_preempted,
        )
    )


def shed(run: Run) -> list[str]:
    """What is cancelled; obeys."""
    cancels = run.policy.cancel(run.state, run.ledger())
    assert {(c.then, c.reason) for c in cancels} <= {("close", "cancelled")}
    run.cancel()
    return [cancel.group_id for cancel in cancels]


# -------------------------------------------------------------------------------------- admission
@pytest.mark.parametrize(
    ("parameters", "cap"),
    [
        ({}, 1024),
        ({"initial_inflight": 30}, 30),
        ({"initial_inflight": 30, "min_inflight": 40}, 40),
        ({"initial_inflight": 30, "max_inflight": 20}, 20),
    ],
)
def test_the_cap_starts_where_it_is_told(parameters: dict[str, Any], cap: int) -> None:
    run = Run(policy("prime-rl", **parameters), 4)
    run.publish(0)
    assert run.credits() == cap


def test_a_run_starts_at_its_engines_slots() -> None:
    shape = RunShape(batch_size=4, group_size=8, num_slots=64, num_engines=2)
    run = Run(policy_for("prime-rl", shape), 4, group_size=8)
    run.publish(0)
    assert (run.credits(), len(run.grant_all()), run.credits()) == (64, 8, 0)
    with pytest.raises(ValueError, match=r"^prime-rl: group_size is 8 in this run, got 1$"):
        policy_for("prime-rl", shape, group_size=1)


def test_a_permit_comes_back_when_a_group_ends_however_it_does() -> None:
    run, (a, b, *_) = flying(4, group_size=2)
    assert run.credits() == 0
    run.arrive(a)
    assert run.credits() == 2
    run.close(b)
    assert run.credits() == 4


def test_one_group_is_in_flight_however_low_the_cap() -> None:
    run, groups = flying(1, group_size=8, initial_inflight=1)
    assert (len(groups), run.credits()) == (1, 0)
    run.arrive(groups[0])
    assert run.credits() == 8


def test_while_engines_are_clear_a_turnover_grows_the_cap_by_a_quarter_as_long_as_it_binds() -> (
    None
):
    run, groups = flying(100)
    poll(run, kv_use=0.6)
    for group_id in groups:
        run.arrive(group_id)
        run.grant()
    # 100 in flight are 0.9 of 111.1, which 1.25^(k / 100) passes at k = 48.
    assert run.state.cap == pytest.approx(100 * 1.25**0.48)


def test_an_arrival_grows_the_cap_by_its_share_of_a_turnover() -> None:
    run, groups = flying(10, group_size=8)
    poll(run)
    run.arrive(groups[0])
    assert run.state.cap == pytest.approx(80 * 1.25**0.1)
    run.arrive(groups[1])
    assert run.state.cap == pytest.approx(80 * 1.25**0.1), "72 are less than 0.9 of 81.8"


@pytest.mark.parametrize("load", [{"kv_use": 0.61}, {"num_queued": 1}, None])
def test_the_cap_does_not_grow_unless_the_last_poll_was_clear(load: dict[str, Any] | None) -> None:
    run, groups = flying(10)
    if load is not None:
        poll(run)
        poll(run, **load)
    run.arrive(groups[0])
    assert run.state.cap == 10


def test_the_cap_grows_up_to_its_maximum() -> None:
    run, groups = flying(10, max_inflight=10)
    poll(run)
    run.arrive(groups[0])
    assert run.state.cap == 10


def test_between_two_polls_what_is_in_flight_grows_by_a_tenth_of_the_cap() -> None:
    run, groups = flying(100)
    for group_id in groups[:50]:
        run.close(group_id)
    assert run.credits() == 50, "no poll came yet"
    poll(run)
    assert run.credits() == 10
    run.grant_all()
    assert run.credits() == 0
    run.arrive(groups[60])
    assert run.credits() == 1, "one that ends gives its admission back"
    run.close(groups[61])
    assert run.credits() == 1, "one that is cancelled does not"
    poll(run)
    assert run.credits() == 10


def test_a_group_larger_than_a_tenth_of_the_cap_may_start_between_two_polls() -> None:
    run, groups = flying(4, group_size=8)
    for group_id in groups[1:]:
        run.close(group_id)
    poll(run)
    assert run.credits() == 8


def test_engines_that_stop_to_report_do_not_stop_an_idle_run() -> None:
    run, groups = flying(20)
    poll(run)
    for group_id in groups:
        run.close(group_id)
    assert len(run.grant_all()) == 2
    for group_id in list(run.open):
        run.close(group_id)
    assert run.credits() == 1


def test_a_full_cache_trims_the_cap_and_only_a_very_full_one_cancels() -> None:
    run, _ = flying(100)
    poll(run, kv_use=0.84)
    assert run.state.cap == pytest.approx(100 * 0.7 / 0.84)
    assert (run.credits(), shed(run)) == (0, [])

    run, groups = flying(100)
    poll(run, kv_use=0.95)
    # 100 * 0.7 / 0.95 = 73.7: the 27 youngest go.
    assert shed(run) == groups[:72:-1]
    assert (len(run.open), run.credits(), shed(run)) == (73, 0, [])


def test_after_a_trim_the_next_one_comes_six_polls_later() -> None:
    run, _ = flying(100)
    poll(run, kv_use=0.84)
    trimmed = run.state.cap
    for _ in range(5):
        poll(run, kv_use=0.95)
        assert (run.state.cap, shed(run)) == (trimmed, [])
    poll(run, kv_use=0.95)
    assert run.state.cap == pytest.approx(100 * 0.7 / 0.95)


def test_a_trim_never_raises_the_cap() -> None:
    run, _ = flying(100)
    poll(run, kv_use=0.84)
    for _ in range(6):
        poll(run, kv_use=0.81)
    # 100 * 0.7 / 0.81 would be 86.4.
    assert run.state.cap == pytest.approx(100 * 0.7 / 0.84)


def test_queues_that_last_six_polls_cut_the_cap_and_cancel_the_youngest() -> None:
    run, groups = flying(100)
    for _ in range(5):
        poll(run, num_queued=51)
    assert run.state.cap == 100
    poll(run, num_queued=51)
    assert run.state.cap == 90
    assert shed(run) == groups[:89:-1]


def test_a_short_queue_in_between_starts_the_count_again() -> None:
    run, _ = flying(100)
    for num_queued in (51, 51, 51, 51, 51, 50, 51, 51, 51, 51, 51):
        poll(run, num_queued=num_queued)
    assert run.state.cap == 100


def test_a_preemption_cuts_at_once_but_not_while_a_cut_drains() -> None:
    run, _ = flying(100)
    poll(run, num_preempted=1)
    assert run.state.cap == 80
    for _ in range(7):
        poll(run, num_preempted=3, num_queued=100, kv_use=0.95)
        assert (run.state.cap, run.credits()) == (80, 0)


def test_a_second_cut_soon_after_the_first_has_drained_is_harder() -> None:
    run, _ = flying(100)
    poll(run, num_preempted=1)
    assert len(shed(run)) == 20
    poll(run, num_preempted=1)
    assert run.state.cap == 40


def test_a_second_cut_is_no_harder_when_six_calm_polls_lie_between() -> None:
    run, _ = flying(100)
    poll(run, num_preempted=1)
    assert len(shed(run)) == 20
    for _ in range(6):
        poll(run, kv_use=0.7)
    poll(run, num_preempted=1)
    assert run.state.cap == pytest.approx(0.8 * 80)


def test_nothing_starts_and_no_batch_is_shipped_two_versions_ahead() -> None:
    run, groups = flying(12, initial_inflight=20)
    for group_id in groups[:12]:
        run.arrive(group_id)
    assert len(run.choose().commit) == 4
    assert len(run.choose().commit) == 4
    assert (run.version, run.credits()) == (2, 0)
    assert run.choose() == Choice()
    run.publish(1)
    assert run.credits() == 12
    assert len(run.choose().commit) == 4


def test_groups_are_trained_in_the_order_they_came() -> None:
    run, groups = flying(5)
    for group_id in reversed(groups):
        run.arrive(group_id)
    assert run.choose().commit == tuple(groups[:0:-1])


# -------------------------------------------------------------------------------------- staleness
def test_what_was_dispatched_more_than_m_versions_ago_is_cancelled_or_dropped() -> None:
    run, (a, b, c, d) = flying(4, max_off_policy_steps=1)
    run.arrive(b)
    run.version = 1
    run.publish(1)
    fresh = run.grant()
    assert run.policy.cancel(run.state, run.ledger()) == ()
    run.version = 2
    run.publish(2)
    assert run.policy.cancel(run.state, run.ledger()) == tuple(
        Cancel(group_id, "close", "stale") for group_id in (a, c, d)
    )
    run.arrive(fresh, oldest=2)
    assert run.choose() == Choice(commit=(fresh,), drop=(b,))


def test_a_late_start_does_not_save_a_group_dispatched_long_ago() -> None:
    run, (group_id,) = flying(1, max_off_policy_steps=1)
    run.version = 2
    run.publish(2)
    run.arrive(group_id, oldest=2)
    assert run.choose().drop == (group_id,)


def test_a_stale_group_counts_as_shed_already() -> None:
    run, groups = flying(10, max_off_policy_steps=0)
    run.close(groups[9])
    run.version = 1
    run.publish(1)
    young = run.grant()
    poll(run, num_preempted=1)
    cancels = run.policy.cancel(run.state, run.ledger())
    # The cap is 8 of 10; nine are stale, so the young one need not go.
    assert [c.group_id for c in cancels] == groups[:9]
    assert young not in {c.group_id for c in cancels}


def test_a_lowered_m_drops_what_is_too_old_and_goes_on() -> None:
    run, groups = flying(6)
    for group_id in groups[:5]:
        run.arrive(group_id)
    run.choose()
    run.policy = policy("prime-rl", max_off_policy_steps=0, initial_inflight=6)
    run.publish(1)
    run.cancel()
    assert run.choose() == Choice(drop=(groups[4],))
    assert run.credits() == 6


def test_tokens_that_a_rollback_moved_away_count_not_only_the_dispatch() -> None:
    """M = 2. Dispatched at version 3, it also has tokens of 8; the run goes back to 5 as (1, 5):
    3 is 2 away and 8 is 3 away."""

    def ledger(oldest: int) -> Ledger:
        return Ledger(
            version=Version(1, 5), published=Version(1, 5), batch_size=1, free_slots=1,
            group_size=1, num_granted=6, num_trained=5, num_closed=0, num_unpublished=0,
            lineage={1: Fork(parent=0, number=5, reason="rollback")},
            groups=(
                OpenGroup(
                    group_id="g", partition=0, offset=0, oldest=Version(0, oldest), newest=None,
                    admitted_at=Version(0, 3), state="ready", order=0, ready_order=0,
                ),
            ),
        )  # fmt: skip

    subject = policy("prime-rl", max_off_policy_steps=2)
    assert subject.choose(subject.start(), ledger(oldest=3)) == Choice(commit=("g",))
    assert subject.choose(subject.start(), ledger(oldest=8)) == Choice(drop=("g",))


def test_its_state_follows_from_what_is_open_and_survives_what_it_never_saw() -> None:
    subject = policy("prime-rl", initial_inflight=10)
    state = subject.start()
    events: list[Event] = [
        Announced(v(3)),
        Granted("a", v(1)),
        Granted("b", v(2)),
        Arrived("b", v(2), v(3)),
        Granted("c", v(3)),
        Committed("c", 4),
        Closed("x", "reward_failed"),
        Arrived("y", v(0), v(1)),
    ]
    for event in events:
        state = subject.observe(state, event)
    assert (state.running, state.cap) == (("a",), 10)


class UnderLoad:
    """The policy, and a poll of engines in a random state after one event in four."""

    def __init__(self, subject: StalenessPolicy[Any], chance: random.Random) -> None:
        self.subject, self.chance = subject, chance
        self.name, self.bound, self.auditable = subject.name, subject.bound, subject.auditable
        self.unit: Unit = subject.unit
        self.start = subject.start
        self.credits, self.cancel, self.choose = subject.credits, subject.cancel, subject.choose

    def observe(self, state: Any, event: Event) -> Any:
        state = self.subject.observe(state, event)
        if self.chance.random() > 0.25:
            return state
        load = EngineLoad(
            num_running=len(state.running),
            num_queued=self.chance.choice([0, 0, 50]),
            kv_use=self.chance.choice([0.3, 0.5, 0.7, 0.85, 0.95]),
            num_preempted=self.chance.random() < 0.05,
        )
        return self.subject.observe(state, load)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    steps=st.integers(0, 4),
    cap=st.integers(1, 24),
    batch_size=st.integers(1, 3),
    group_size=st.sampled_from([1, 3]),
    failures=st.sampled_from([0.0, 0.3]),
)
def test_random_orders_and_loads_never_exceed_the_bound_nor_stall(
    seed: int, steps: int, cap: int, batch_size: int, group_size: int, failures: float
) -> None:
    chance = random.Random(seed)
    subject = policy(
        "prime-rl",
        max_off_policy_steps=steps,
        initial_inflight=cap,
        max_inflight=32,
        group_size=group_size,
    )
    result = closed_loop(
        UnderLoad(subject, chance) if seed % 2 else subject,
        chance,
        batch_size=batch_size,
        group_size=group_size,
        num_steps=8,
        num_slow=2,
        failures=failures,
    )
    assert not result.stalled
    assert subject.bound == steps
    assert result.max_staleness <= steps


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 1, 2, 8])
def test_long_runs_of_large_batches_under_load_never_exceed_the_bound_nor_stall(steps: int) -> None:
    for seed in range(5):
        chance = random.Random(seed)
        subject = policy("prime-rl", max_off_policy_steps=steps, initial_inflight=96, group_size=4)
        result = closed_loop(
            UnderLoad(subject, chance),
            chance,
            batch_size=8,
            group_size=4,
            num_steps=40,
            num_slow=8,
            failures=0.1,
        )
        assert not result.stalled
        assert result.max_staleness <= steps


def test_it_does_lose_groups_that_are_too_slow() -> None:
    subject = policy("prime-rl", max_off_policy_steps=1, initial_inflight=12)
    result = closed_loop(subject, random.Random(3), batch_size=2, num_steps=20, num_slow=3)
    assert result.max_staleness == 1
    assert result.closed["cancelled"] > 0


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"min_inflight": 9, "max_inflight": 8}, "min_inflight must be at most max_inflight, got "
         "9 and 8"),
        ({"max_off_policy_steps": -1}, "max_off_policy_steps must be an integer of at least 0, "
         "got -1"),
        ({"initial_inflight": 0}, "initial_inflight must be an integer of at least 1, got 0"),
        ({"min_inflight": 0}, "min_inflight must be an integer of at least 1, got 0"),
        ({"max_inflight": 1.5}, "max_inflight must be an integer of at least 1, got 1.5"),
        ({"group_size": 0}, "group_size must be an integer of at least 1, got 0"),
        ({"max_off_policy": 2}, "unknown parameter 'max_off_policy', did you mean "
         "'max_off_policy_steps'?"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_one_clear_line(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^prime-rl: {re.escape(message)}$"):
        policy("prime-rl", **parameters)
