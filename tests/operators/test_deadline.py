"""`deadline`: each rule by hand, its promises in random loops, its settings."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.records import Cancel, Fork, Version
from operators.staleness import policy
from operators.staleness.deadline import mask_below
from operators.staleness.feasible import infeasible
from operators.staleness.lineage import lag
from operators.staleness.types import (
    Choice,
    Ledger,
    OpenGroup,
)
from tests.operators.policy_run import Run, closed_loop, v


def run_of(batch_size: int, **parameters: Any) -> Run:
    run = Run(policy("deadline", **parameters), batch_size)
    run.publish(0)
    return run


def ledger_of(
    groups: Sequence[tuple[Version, str]], *, version: Version, batch_size: int, free_slots: int,
    lineage: dict[int, Fork] | None = None,
) -> Ledger:  # fmt: skip
    """Of (oldest version, state), in the order they were granted and arrived in: a, b, c, ..."""
    return Ledger(
        version=version,
        published=version,
        batch_size=batch_size,
        free_slots=free_slots,
        group_size=1,
        groups=tuple(
            OpenGroup(
                group_id=chr(ord("a") + i), partition=0, offset=i, oldest=oldest, newest=oldest,
                admitted_at=oldest, state="running" if state == "running" else "ready", order=i,
                ready_order=None if state == "running" else i,
            )
            for i, (oldest, state) in enumerate(groups)
        ),
        num_granted=len(groups), num_trained=0, num_closed=0, num_unpublished=0,
        lineage=lineage or {},
    )  # fmt: skip


def chosen(ledger: Ledger, **parameters: Any) -> Choice:
    subject = policy("deadline", **parameters)
    return subject.choose(subject.start(), ledger)


def cancelled(ledger: Ledger, **parameters: Any) -> list[str]:
    subject = policy("deadline", **parameters)
    cancels = subject.cancel(subject.start(), ledger)
    assert all(cancel == Cancel(cancel.group_id, "close", "stale") for cancel in cancels)
    return [cancel.group_id for cancel in cancels]


# ------------------------------------------------------------------------------------- reserving
def test_it_grants_lookahead_and_one_steps_until_weights_are_announced() -> None:
    run = run_of(2, bound=4, lookahead=1)
    groups = run.grant_all()
    assert len(groups) == 4
    for group_id in groups[:2]:
        run.arrive(group_id)
    assert len(run.choose().commit) == 2
    assert (run.version, run.credits()) == (1, 0), "trained, but nobody generates with it"
    run.publish(1)
    assert run.credits() == 2
    run.close(groups[2])
    assert run.credits() == 3, "a group that failed leaves its place"


def test_lookahead_zero_is_synchronous() -> None:
    run = run_of(3, bound=4, lookahead=0)
    for number in range(3):
        groups = run.grant_all()
        assert len(groups) == 3
        for group_id in groups:
            run.arrive(group_id)
        assert run.choose().commit == tuple(groups)
        assert run.credits() == 0
        run.publish(number + 1)


def test_what_it_grants_after_the_batch_grew_still_fits() -> None:
    """bound 1, B from 1 to 4. A group of version 0 is published next: k = 4, and one step may close
    before a grant under version 0 is due: none may, as version 1 trains already."""
    run = run_of(1, bound=1, lookahead=1)
    first, _ = run.grant_all()
    run.arrive(first)
    run.choose()
    run.batch_size = 4
    assert (run.version, run.published) == (1, 0)
    # Outstanding are 1 open and 1 unpublished (as Run counts: B of them), 8 may be.
    assert len(run.grant_all()) == 3, "with the one that is open, the 4 places of this step"
    assert infeasible(run.ledger(), 1) == ()


# --------------------------------------------------------------------------------------- waiting
def fresh_overtakes_two() -> tuple[Run, list[str], str]:
    """B = 1, bound 2: a, b and c started at version 0; c was trained, d is granted at version 1 and
    ready, a and b, due at version 2, still run."""
    run = run_of(1, bound=2, lookahead=2)
    a, b, c = run.grant_all()
    run.arrive(c)
    assert run.choose().commit == (c,), "any of the three may be the first"
    run.publish(1)
    (d,) = run.grant_all()
    run.arrive(d)
    return run, [a, b], d


def test_a_group_is_held_while_going_on_would_break_the_bound_later() -> None:
    run, (a, b), d = fresh_overtakes_two()
    assert run.choose() == Choice(), "versions 1 and 2 are the last for a and b"
    assert run.ledger().held(Choice()) == (d,)
    run.arrive(b)
    assert run.choose().commit == (b,)
    run.publish(2)
    assert run.choose() == Choice()
    run.arrive(a)
    assert run.choose().commit == (a,)
    assert run.choose().commit == (d,)
    assert run.staleness == [0, 1, 2, 2]


class OnlyDueNow:
    """The naive variant: keeps places back only for groups that are due *now*."""

    def __init__(self, bound: int, lookahead: int) -> None:
        self._whole = policy("deadline", bound=bound, lookahead=lookahead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def cancel(self, state: Any, ledger: Ledger) -> tuple[Cancel, ...]:
        return ()

    def choose(self, state: Any, ledger: Ledger) -> Choice:
        assert self._whole.bound is not None
        due = {g.group_id for g in ledger.groups if ledger.age(g) >= self._whole.bound}
        commit: list[str] = []
        for group in ledger.arrivals:
            places = ledger.free_slots - len(commit)
            if places and (group.group_id in due or places > len(due - set(commit))):
                commit.append(group.group_id)
        return Choice(commit=tuple(commit))


def test_waiting_only_for_groups_that_are_due_now_breaks_the_bound() -> None:
    run, (a, b), d = fresh_overtakes_two()
    run.policy = OnlyDueNow(2, 2)  # type: ignore[assignment]
    assert run.choose().commit == (d,)
    run.publish(2)
    for group_id in (a, b):
        run.arrive(group_id)
        run.choose()
    assert run.staleness == [0, 0, 2, 3]


def test_of_several_that_are_ready_the_first_due_go_first() -> None:
    """B = 1. a, due last, arrived first; trained first, it would leave b and c one step for two."""
    ledger = ledger_of(
        [(v(3), "ready"), (v(2), "ready"), (v(2), "ready")], version=v(4), batch_size=1,
        free_slots=1,
    )  # fmt: skip
    assert chosen(ledger, bound=4, lookahead=0).commit == ("b",)
    assert chosen(replace(ledger, batch_size=3, free_slots=3), lookahead=0).commit == (
        "b", "c", "a",
    )  # fmt: skip


def test_what_a_full_step_leaves_behind_is_not_called_held() -> None:
    ledger = ledger_of([(v(0), "ready")] * 3, version=v(0), batch_size=2, free_slots=2)
    assert chosen(ledger) == Choice(commit=("a", "b"))
    assert ledger.held(chosen(ledger)) == ()
    full = replace(ledger, free_slots=0)
    assert chosen(full) == Choice()
    assert full.held(Choice()) == ()


# ------------------------------------------------------------------------------------ infeasible
def test_a_lowered_bound_drops_what_is_overdue_and_cancels_what_runs_too_long() -> None:
    run = run_of(1, bound=3, lookahead=3)
    a, b, c, d = run.grant_all()
    run.arrive(a)
    run.choose()
    run.publish(1)
    run.arrive(b)
    run.policy = policy("deadline", bound=0, lookahead=0)
    # All of version 0 are one behind: none may be trained.
    assert [g.group_id for g in infeasible(run.ledger(), 0)] == [b, c, d]
    assert run.choose() == Choice(drop=(b,))
    run.cancel()
    assert run.closed == {"stale": 1, "cancelled": 2}
    assert run.credits() == 1


def test_of_groups_that_cannot_all_be_in_time_those_that_run_and_came_last_are_given_up() -> None:
    """bound 1, B = 2, all start at this version: this step and the next have 4 places for 6."""
    states = ["running", "running", "running", "ready", "running", "ready"]
    ledger = ledger_of([(v(5), s) for s in states], version=v(5), batch_size=2, free_slots=2)
    assert [g.group_id for g in infeasible(ledger, 1)] == ["c", "e"]
    assert cancelled(ledger, bound=1, lookahead=1) == ["c", "e"]
    assert chosen(ledger, bound=1, lookahead=1) == Choice(commit=("d", "f"))


def test_more_that_arrived_than_can_be_trained_are_dropped_at_once() -> None:
    ledger = ledger_of([(v(5), "ready")] * 3, version=v(5), batch_size=2, free_slots=2)
    choice = chosen(ledger, bound=0, lookahead=0)
    assert choice == Choice(commit=("a", "b"), drop=("c",))


def test_an_engine_that_broke_its_promise_costs_only_its_group() -> None:
    run = run_of(1, bound=1, lookahead=1)
    a, b = run.grant_all()
    run.arrive(a)
    run.choose()
    run.publish(1)
    run.arrive(b, oldest=-1)
    assert run.choose() == Choice(drop=(b,)), "2 behind"
    assert run.credits() == 2


def test_a_late_group_that_runs_holds_nobody_up() -> None:
    """a is overdue and its cancel under way; b, due later, is not held for it."""
    ledger = ledger_of(
        [(v(0), "running"), (v(4), "ready")], version=v(4), batch_size=1, free_slots=1
    )
    assert cancelled(ledger, bound=3) == ["a"]
    assert chosen(ledger, bound=3) == Choice(commit=("b",))


def test_a_late_group_that_arrives_fresher_than_its_grant_is_trained() -> None:
    run = run_of(1, bound=2, lookahead=2)
    a, b, c = run.grant_all()
    for group_id in (c, b):
        run.arrive(group_id)
        run.choose()
    run.publish(2)
    run.policy = policy("deadline", bound=1, lookahead=1)
    assert cancelled(run.ledger(), bound=1, lookahead=1) == [a]
    run.arrive(a, oldest=1)
    assert run.choose().commit == (a,)


def test_after_a_rollback_ages_count_the_way_to_the_fork_and_back() -> None:
    """Back from version 8 to 5. At (1, 6) the groups of (0, 4), (0, 7), (0, 8) and (1, 5) are 2,
    (6 - 5) + (7 - 5) = 3, 4 and 1 old."""
    lineage = {1: Fork(parent=0, number=5, reason="rollback")}
    versions = [Version(0, 4), Version(0, 7), Version(0, 8), Version(1, 5)]
    ledger = ledger_of(
        [(version, "ready") for version in versions],
        version=Version(1, 6), batch_size=4, free_slots=4, lineage=lineage,
    )  # fmt: skip
    assert chosen(ledger, bound=3) == Choice(commit=("b", "a", "d"), drop=("c",))
    running = replace(ledger, groups=tuple(replace(g, state="running") for g in ledger.groups))
    assert cancelled(running, bound=3) == ["c"]
    assert cancelled(running, bound=4) == []


# ---------------------------------------------------------------------- drop, mask and reweight
def late_and_fresh() -> Ledger:
    """At version 6: ready ones of version 0 and 6, one that runs since 0, one ready since 2."""
    return ledger_of(
        [(v(0), "ready"), (v(6), "ready"), (v(0), "running"), (v(2), "ready")],
        version=v(6), batch_size=8, free_slots=8,
    )  # fmt: skip


def test_drop_gives_up_what_is_over_age_and_waits_for_nobody() -> None:
    assert chosen(late_and_fresh(), at_deadline="drop") == Choice(commit=("d", "b"), drop=("a",))
    assert cancelled(late_and_fresh(), at_deadline="drop") == ["c"]
    one_place = replace(late_and_fresh(), free_slots=1)
    assert chosen(one_place, at_deadline="drop").commit == ("d",), "the oldest that may"


def test_mask_trains_what_has_a_token_left_and_waits_for_nobody() -> None:
    ledger = late_and_fresh()
    a, *others = ledger.groups
    half_old = replace(ledger, groups=(replace(a, newest=v(2)), *others))
    assert chosen(half_old, at_deadline="mask") == Choice(
        commit=("a", "d", "b"), mask_before=v(2)
    ), "6 - 4 is the oldest version in time"
    all_old = replace(ledger, groups=(replace(a, newest=v(1)), *others))
    assert chosen(all_old, at_deadline="mask") == Choice(
        commit=("d", "b"), drop=("a",), mask_before=v(2)
    )
    assert cancelled(ledger, at_deadline="mask") == []


def test_mask_drops_what_no_version_can_part_after_a_rollback() -> None:
    """At (1, 6) with bound 3, (0, 8) is over age and (0, 4), below it, is not."""
    lineage = {1: Fork(parent=0, number=5, reason="rollback")}
    ledger = ledger_of(
        [(Version(0, 8), "ready"), (Version(0, 4), "ready")],
        version=Version(1, 6), batch_size=2, free_slots=2, lineage=lineage,
    )  # fmt: skip
    assert chosen(ledger, at_deadline="mask", bound=3) == Choice(commit=("b",), drop=("a",))
    parted = [mask_below(replace(ledger, version=Version(1, n)), 3) for n in range(5, 10)]
    assert parted == [None] * 4 + [Version(1, 6)], "the 4 steps of versions 5 to 8"


@given(
    bound=st.integers(0, 5),
    forks=st.lists(
        st.tuples(st.integers(0, 6), st.sampled_from(["rollback", "rebuild"])), max_size=3
    ),
    ahead=st.integers(0, 8),
)
def test_the_mask_parts_tokens_over_age_from_the_others(
    bound: int, forks: list[tuple[int, Any]], ahead: int
) -> None:
    lineage: dict[int, Fork] = {}
    top, made = 6, []  # the highest version of the incarnation; all versions that ever were
    first = 0
    for incarnation, (back, reason) in enumerate(forks):
        number = top if reason == "rebuild" else max(first, top - back)
        lineage[incarnation + 1] = Fork(parent=incarnation, number=number, reason=reason)
        made += [Version(incarnation, n) for n in range(first, top + 1)]
        first, top = number, number + 6
    version = Version(len(forks), first + ahead)
    made += [Version(len(forks), n) for n in range(first, version.number + 1)]
    ledger = ledger_of([], version=version, batch_size=1, free_slots=1, lineage=lineage)
    below = mask_below(ledger, bound)
    over_age = {m for m in made if lag(version, m, lineage) > bound}
    if below is not None:
        assert over_age == {m for m in made if m < below}
    elif over_age:
        rollbacks = [f.number for f in lineage.values() if f.reason == "rollback"]
        assert any(version.number - bound <= number for number in rollbacks)


def test_reweight_trains_everything_and_is_not_strict() -> None:
    subject = policy("deadline", at_deadline="reweight", decay=0.5)
    assert (subject.bound, subject.max_age, subject.decay) == (None, 4, 0.5)  # type: ignore[attr-defined]
    assert chosen(late_and_fresh(), at_deadline="reweight") == Choice(commit=("a", "d", "b"))
    assert cancelled(late_and_fresh(), at_deadline="reweight") == []


# ------------------------------------------------------------------------------------ closed loops
@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    batch_size=st.integers(1, 4),
    bound=st.integers(0, 4),
    lookahead=st.integers(0, 4),
    auto=st.booleans(),
    at_deadline=st.sampled_from(["wait", "drop", "mask", "reweight"]),
)
def test_it_never_stalls_and_keeps_its_promise_in_random_loops(
    seed: int, batch_size: int, bound: int, lookahead: int, auto: bool, at_deadline: str
) -> None:
    subject = policy(
        "deadline", bound=bound, lookahead="auto" if auto else min(lookahead, bound),
        at_deadline=at_deadline,
    )  # fmt: skip
    result = closed_loop(
        subject, random.Random(seed), batch_size=batch_size, num_steps=15, num_slow=3,
        failures=0.1,
    )  # fmt: skip
    assert not result.stalled
    if at_deadline != "reweight":
        assert result.max_staleness <= bound, "of the tokens that are trained"
    if at_deadline in ("wait", "reweight"):
        assert set(result.closed) <= {"reward_failed"}, "it gave up a group it had granted"


# ---------------------------------------------------------------------------------------- settings
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"bound": -1}, "bound must be an integer of at least 0, got -1"),
        (
            {"bound": 1, "lookahead": 2},
            "lookahead must be at most the bound, got lookahead 2 and bound 1",
        ),
        (
            {"bound": 3, "lookahead": 4},
            "lookahead must be at most the bound, got lookahead 4 and bound 3",
        ),
        ({"lookahead": -1}, "lookahead must be an integer of at least 0 or 'auto', got -1"),
        ({"lookahead": "all"}, "lookahead must be an integer of at least 0 or 'auto', got 'all'"),
        (
            {"at_deadline": "hold"},
            "at_deadline must be one of 'wait', 'mask', 'drop', 'reweight', got 'hold'",
        ),
        ({"decay": 1.5}, "decay must be a number of at least 0 and at most 1, got 1.5"),
        (
            {"decay": 0.1, "at_deadline": "mask"},
            "decay needs at_deadline 'reweight', got decay 0.1 and at_deadline 'mask'",
        ),
        ({"eta": 4}, "unknown parameter 'eta', did you mean 'decay'?"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^deadline: {re.escape(message)}$"):
        policy("deadline", **parameters)


def test_its_defaults_and_what_an_audit_can_ask() -> None:
    subject = policy("deadline")
    assert (subject.bound, subject.unit, subject.auditable) == (4, "group", True)
    assert (subject.lookahead, subject.decay) == (2, 0.9)  # type: ignore[attr-defined]
    assert [policy("deadline", bound=n).lookahead for n in (0, 1, 6)] == [0, 1, 2]  # type: ignore[attr-defined]
    assert not policy("deadline", lookahead="auto").auditable
