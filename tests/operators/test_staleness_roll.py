"""roll against a literal reading of its replay buffer, by hand, and in random arrival orders."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.records import Cancel, Fork, Version
from operators.staleness import policy
from operators.staleness.types import Choice, Ledger, OpenGroup, StalenessPolicy
from tests.operators.policy_run import Run, closed_loop


def roll(ratio: float, additional: int = 0) -> StalenessPolicy[Any]:
    if not additional:
        return policy("roll", async_generation_ratio=ratio)
    return policy(
        "roll",
        async_generation_ratio=ratio,
        is_use_additional_prompts=True,
        max_additional_running_prompts=additional,
    )


class StartSteps:
    """The rule as written: a budget that only grows, and prompts by the step they started at."""

    def __init__(self, ratio: float, batch_size: int, group_size: int) -> None:
        self.ratio = ratio
        self.batch_size = batch_size
        self.group_size = group_size
        self.budget = 0
        self.num_completed = 0
        self.running: dict[str, int] = {}
        self.finished: list[tuple[str, int]] = []

    def advance(self) -> None:
        if self.budget == 0 and self.ratio > 0:
            self.budget = math.ceil(self.batch_size * self.ratio)
        self.budget += self.batch_size

    def room(self) -> int:
        return self.budget - len(self.running) - self.num_completed

    def finish(self, group_id: str) -> None:
        self.finished.append((group_id, self.running.pop(group_id)))
        self.num_completed += 1

    def batch(self, step: int) -> tuple[str, ...]:
        """What a batch takes at `step`, empty while it waits."""
        first = step - math.ceil(self.ratio)
        need = self.batch_size * self.group_size
        taken: list[str] = []
        for start in range(first, step + 1):
            missing = need - len(taken) * self.group_size
            fraction = self.ratio % 1
            want = int(need * fraction) if start == first and fraction else missing
            mine: list[str] = []
            for group_id, at in self.finished:
                if at == start and len(mine) * self.group_size < want:
                    mine.append(group_id)
            taken += mine
            if len(mine) * self.group_size < want and start in self.running.values():
                return ()
            if len(taken) * self.group_size >= need:
                break
        if len(taken) < self.batch_size:
            return ()
        self.finished = [(g, at) for g, at in self.finished if g not in taken]
        assert all(at > first for _, at in self.finished), "the oldest step is not drained"
        assert all(at > first for at in self.running.values())
        return tuple(taken)


@pytest.mark.parametrize("ratio", [0, 1, 2, 3, 1.25, 1.5, 2.75])
@pytest.mark.parametrize(("batch_size", "group_size"), [(1, 8), (4, 1), (4, 2)])
def test_it_grants_and_trains_what_the_replay_buffer_would(
    ratio: float, batch_size: int, group_size: int
) -> None:
    chance = random.Random(f"{ratio} {batch_size} {group_size}")
    num_steps = 0
    for _ in range(10):
        run = Run(roll(ratio), batch_size, group_size)
        rule = StartSteps(ratio, batch_size, group_size)
        run.publish(0)
        rule.advance()
        for _ in range(150):
            act = chance.choice(["grant", "arrive", "arrive", "close", "choose", "publish"])
            assert run.credits() == max(0, rule.room())
            assert run.policy.cancel(run.state, run.ledger()) == ()
            running = list(rule.running)
            if act == "grant" and rule.room() > 0:
                rule.running[run.grant()] = run.published
            elif act == "arrive" and running:
                group_id = chance.choice(running)
                rule.finish(group_id)
                run.arrive(group_id)
            elif act == "close" and running and chance.random() < 0.3:
                group_id = chance.choice(running)
                del rule.running[group_id]
                run.close(group_id)
            elif act == "choose" and run.version == run.published:
                expected = rule.batch(run.version)
                assert run.choose() == Choice(commit=expected)
            elif act == "publish" and run.published < run.version:
                run.publish(run.published + 1)
                rule.advance()
        num_steps += run.version
        assert max(run.staleness, default=0) <= math.ceil(ratio)
    assert num_steps > 20


def test_with_a_ratio_of_zero_a_batch_is_of_its_own_version() -> None:
    run = Run(roll(0), 2)
    run.publish(0)
    first = run.grant_all()
    assert len(first) == 2
    for group_id in first:
        run.arrive(group_id)
    run.choose()
    assert run.credits() == 0
    run.publish(1)
    assert run.credits() == 2


def test_a_batch_waits_for_a_group_of_the_oldest_step_and_is_not_filled_by_younger_ones() -> None:
    run = Run(roll(1), 2)
    run.publish(0)
    a, b, slow, c = run.grant_all()
    for group_id in (b, a, c):
        run.arrive(group_id)
    assert run.choose().commit == (b, a), "in the order they finished"
    run.publish(1)
    for group_id in run.grant_all():
        run.arrive(group_id)
    for _ in range(3):
        assert run.choose() == Choice(), "two of step 1 and one of step 0 are ready"
        assert run.credits() == 0
    run.arrive(slow)
    assert run.choose().commit == (c, slow)


def test_a_failed_group_gives_its_place_back_and_is_not_waited_for() -> None:
    run = Run(roll(1), 2)
    run.publish(0)
    a, b, slow, c = run.grant_all()
    for group_id in (a, b, c):
        run.arrive(group_id)
    run.choose()
    run.publish(1)
    d, e = run.grant_all()
    run.arrive(d)
    run.close(slow)
    assert run.credits() == 1
    assert run.choose().commit == (c, d)
    run.arrive(e)
    assert run.choose().commit == ()


def test_a_fractional_ratio_takes_its_part_of_the_oldest_step() -> None:
    """B = 2, r = 1.5: the first budget is 2 + 3, and a batch takes one group of step t - 2."""
    run = Run(roll(1.5), 2)
    run.publish(0)
    first = run.grant_all()
    assert len(first) == 5
    later = []
    for group_id in first:
        run.arrive(group_id)
    for step, expected in enumerate([first[:2], first[2:4]]):
        assert run.choose().commit == tuple(expected)
        run.publish(step + 1)
        later.append(run.grant_all())
        for group_id in later[-1]:
            run.arrive(group_id)
    assert run.choose().commit == (first[4], later[0][0])
    run.publish(3)
    for group_id in run.grant_all():
        run.arrive(group_id)
    assert run.choose().commit == (later[0][1], later[1][0])


def test_additional_prompts_keep_running_once_the_budget_is_used_up() -> None:
    run = Run(roll(1, additional=3), 2)
    run.publish(0)
    groups = run.grant_all()
    assert (len(groups), run.credits()) == (4, 0), "four run, which is no fewer than three"
    run.arrive(groups[0])
    assert run.credits() == 0
    run.arrive(groups[1])
    assert run.credits() == 1
    run.grant_all()
    run.close(groups[2])
    assert run.credits() == 1


def test_what_is_left_of_the_oldest_step_is_given_up_when_the_step_advances() -> None:
    run = Run(roll(0, additional=3), 1)
    run.publish(0)
    first = run.grant_all()
    a, b, c = first[0], run.grant(), run.grant()
    assert run.credits() == 0
    run.arrive(c)
    run.arrive(a)
    assert run.policy.cancel(run.state, run.ledger()) == ()
    assert run.choose() == Choice(commit=(c,))
    assert run.policy.cancel(run.state, run.ledger()) == (Cancel(b, "close", "stale"),)
    assert run.choose() == Choice(drop=(a,))
    run.cancel()
    assert run.credits() == 0, "a prompt started now would be given up before version 1 is there"
    run.publish(1)
    assert run.credits() == 1


def test_a_group_that_never_ends_is_waited_for_once_its_step_has_nothing_else() -> None:
    run = Run(roll(2), 1)
    run.publish(0)
    endless, *others = run.grant_all()
    for group_id in others:
        run.arrive(group_id)
    for step, group_id in enumerate(others):
        assert run.choose().commit == (group_id,)
        run.publish(step + 1)
        for younger in run.grant_all():
            run.arrive(younger)
    for _ in range(5):
        assert run.choose() == Choice()
        assert (run.credits(), len(run.ledger().ready)) == (0, 2)
    run.arrive(endless)
    assert run.choose().commit == (endless,)


def test_a_lowered_ratio_gives_up_what_is_too_old_and_goes_on() -> None:
    run = Run(roll(3), 1)
    run.publish(0)
    slow, *groups = run.grant_all()
    for group_id in groups:
        run.arrive(group_id)
    run.policy = roll(1)
    assert run.choose().commit == (groups[0],)
    assert run.choose().commit == (groups[1],)
    assert run.choose() == Choice(drop=(groups[2],))
    assert run.policy.cancel(run.state, run.ledger()) == (Cancel(slow, "close", "stale"),)
    run.cancel()
    run.publish(2)
    assert run.credits() == 2


def test_more_of_the_oldest_step_than_a_lowered_ratio_takes_does_not_stop_training() -> None:
    """Under r = 8 all 18 places went to step 0; the part of r = 1.5 is one group a batch."""
    run = Run(roll(8), 2)
    run.publish(0)
    groups = run.grant_all()
    for group_id in groups:
        run.arrive(group_id)
    run.choose()
    run.choose()
    run.policy = roll(1.5)
    assert run.choose() == Choice(drop=tuple(groups[5:])), "14 are left, of which one is taken"
    run.publish(1)
    run.publish(2)
    for group_id in run.grant_all():
        run.arrive(group_id)
    assert run.choose().commit == (groups[4], "p/0/18")


def test_a_changed_batch_size_goes_on_from_what_is_open() -> None:
    run = Run(roll(1), 4)
    run.publish(0)
    groups = run.grant_all()
    for group_id in groups:
        run.arrive(group_id)
    run.choose()
    run.batch_size = 2
    assert run.credits() == 0
    assert run.choose().commit == tuple(groups[4:6])
    assert run.choose() == Choice(drop=tuple(groups[6:]))
    run.publish(2)
    assert run.credits() == 4


def test_tokens_that_a_rollback_moved_away_count_not_only_the_grant() -> None:
    """r = 2. Granted at version 3, it also has tokens of 8; the run goes back to 5 as (1, 5):
    3 is 2 away and 8 is 3 away."""

    def ledger(newest: int) -> Ledger:
        return Ledger(
            version=Version(1, 5), published=Version(1, 5), batch_size=1, free_slots=1,
            group_size=1, num_granted=6, num_trained=5, num_closed=0, num_unpublished=0,
            lineage={1: Fork(parent=0, number=5, reason="rollback")},
            groups=(
                OpenGroup(
                    group_id="g", partition=0, offset=0, oldest=Version(0, newest), newest=None,
                    admitted_at=Version(0, 3), state="ready", order=0, ready_order=0,
                ),
            ),
        )  # fmt: skip

    assert roll(2).choose(None, ledger(newest=3)) == Choice(commit=("g",))
    assert roll(2).choose(None, ledger(newest=8)) == Choice(drop=("g",))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ratio=st.sampled_from([0, 1, 2, 4, 1.3, 2.5]),
    additional=st.sampled_from([0, 1, 6]),
    batch_size=st.integers(1, 3),
    group_size=st.sampled_from([1, 3]),
    failures=st.sampled_from([0.0, 0.3]),
)
def test_random_orders_never_exceed_the_bound_nor_stall(
    seed: int, ratio: float, additional: int, batch_size: int, group_size: int, failures: float
) -> None:
    subject = roll(ratio, additional)
    result = closed_loop(
        subject,
        random.Random(seed),
        batch_size=batch_size,
        group_size=group_size,
        num_steps=8,
        num_slow=2,
        failures=failures,
    )
    assert not result.stalled
    assert subject.bound == math.ceil(ratio)
    assert result.max_staleness <= math.ceil(ratio)
    if ratio % 1 == 0 and not additional:
        assert result.closed.keys() <= {"reward_failed"}, "an integer ratio gives nothing up"


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [1, 1.5, 3, 3.7])
@pytest.mark.parametrize("additional", [0, 12])
def test_long_runs_of_large_batches_never_exceed_the_bound_nor_stall(
    ratio: float, additional: int
) -> None:
    for seed in range(5):
        result = closed_loop(
            roll(ratio, additional),
            random.Random(seed),
            batch_size=8,
            group_size=4,
            num_steps=40,
            num_slow=8,
            failures=0.1,
        )
        assert not result.stalled
        assert result.max_staleness <= math.ceil(ratio)


def test_additional_prompts_do_lose_groups() -> None:
    result = closed_loop(roll(1, additional=8), random.Random(1), batch_size=2, num_steps=20)
    assert result.closed["stale"] + result.closed["cancelled"] > 0


def test_an_audit_can_ask_it_again_unless_additional_prompts_hang_on_what_runs() -> None:
    assert roll(1.5).auditable
    assert not roll(1.5, additional=2).auditable


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"async_generation_ratio": 0.5}, "async_generation_ratio must be 0 or at least 1, "
         "got 0.5"),
        ({"async_generation_ratio": -1}, "async_generation_ratio must be a number of at least 0 "
         "and at most 10000, got -1"),
        ({"async_generation_ratio": 1e308}, "async_generation_ratio must be a number of at least 0 "
         "and at most 10000, got 1e+308"),
        ({"is_use_additional_prompts": 1}, "is_use_additional_prompts must be true or false, "
         "got 1"),
        ({"max_additional_running_prompts": 0}, "max_additional_running_prompts must be an "
         "integer of at least 1, got 0"),
        ({"async_ratio": 1}, "unknown parameter 'async_ratio', did you mean "
         "'async_generation_ratio'?"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_one_clear_line(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^roll: {re.escape(message)}$"):
        policy("roll", **parameters)
