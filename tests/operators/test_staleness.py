"""n-step-off against an independent, literal reading of the in-order rule, and by hand."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from connectors.records import Fork, Version
from operators.staleness import policy
from operators.staleness.lineage import lag, stalest
from operators.staleness.types import Choice, Granted, Ledger, OpenGroup
from tests.operators.policy_run import Run, v


class InOrder:
    """The rule as written: targets are filled in order with B groups each."""

    def __init__(self, n: int, batch_size: int) -> None:
        self.n = n
        self.batch_size = batch_size
        self.target: dict[str, int] = {}

    def short(self, version: int, published: int) -> Iterator[int]:
        """Grantable targets with room, one entry a missing group."""
        for target in range(version, published + self.n + 1):
            for _ in range(self.batch_size - list(self.target.values()).count(target)):
                yield target

    def grant(self, group_id: str, version: int, published: int) -> None:
        self.target[group_id] = next(self.short(version, published))


@pytest.mark.parametrize("n", [0, 1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_it_grants_and_commits_what_the_in_order_rule_says(n: int, batch_size: int) -> None:
    chance = random.Random(n * 10 + batch_size)
    for _ in range(20):
        run, rule = Run(policy("n-step-off", n=n), batch_size), InOrder(n, batch_size)
        run.publish(0)
        for _ in range(120):
            act = chance.choice(["grant", "arrive", "arrive", "close", "choose", "publish"])
            running = [g for g in run.open.values() if g.state == "running"]
            room = list(rule.short(run.version, run.published))
            assert run.credits() == len(room)
            if act == "grant" and room:
                rule.grant(run.grant(), run.version, run.published)
            elif act == "arrive" and running:
                group = chance.choice(running)
                run.arrive(group.group_id, chance.randint(group.admitted_at.number, run.published))
            elif act == "close" and running and chance.random() < 0.5:
                group = chance.choice(running)
                del rule.target[group.group_id]
                run.close(group.group_id)
            elif act == "choose":
                version = run.version
                due = {
                    g.group_id: g
                    for g in run.open.values()
                    if g.state == "ready" and rule.target[g.group_id] == version
                }
                choice = run.choose()
                assert choice.commit == tuple(due)
                assert choice.drop == ()
                assert all(version - g.oldest.number <= n for g in due.values())
            elif act == "publish" and run.published < run.version:
                run.publish(run.published + 1)


def test_nothing_is_granted_before_a_version_is_published() -> None:
    run = Run(policy("one-step-off"), 4)
    assert run.credits() == 0
    run.publish(0)
    assert run.credits() == 8


def test_sync_grants_the_next_batch_only_when_its_version_is_published() -> None:
    run = Run(policy("sync"), 2)
    run.publish(0)
    first = run.grant_all()
    assert len(first) == 2
    for group_id in first:
        run.arrive(group_id)
    run.choose()
    assert (run.version, run.credits()) == (1, 0)
    run.publish(1)
    assert run.credits() == 2


def test_a_replacement_takes_the_place_of_the_group_that_closed() -> None:
    run = Run(policy("n-step-off", n=1), 2)
    run.publish(0)
    a, b, c, d = run.grant_all()
    run.close(a)
    assert run.credits() == 1
    replacement = run.grant()
    for group_id in (c, d, b, replacement):
        run.arrive(group_id)
    assert run.choose().commit == (b, replacement)
    assert run.choose().commit == (c, d)


def test_a_group_that_never_ends_is_waited_for_and_not_overtaken() -> None:
    run = Run(policy("n-step-off", n=2), 2)
    run.publish(0)
    endless, *others = run.grant_all()
    for group_id in others:
        run.arrive(group_id)
    assert run.choose().commit == (others[0],)
    for _ in range(5):
        assert run.choose() == Choice()
        assert run.credits() == 0
    run.arrive(endless, oldest=0)
    assert run.choose().commit == (endless,)


def test_a_refund_keeps_training_going_when_every_other_group_fails() -> None:
    run = Run(policy("n-step-off", n=1), 2)
    run.publish(0)
    for turn in range(60):
        for number, group_id in enumerate(run.grant_all()):
            if number % 2:
                run.close(group_id)
            else:
                run.arrive(group_id)
        run.choose()
        if run.published < run.version and turn % 2:
            run.publish(run.version)
    assert run.version > 20


def test_a_batch_chosen_before_the_last_publish_keeps_the_bound_at_the_version_it_trains() -> None:
    run = Run(policy("n-step-off", n=1), 1)
    run.publish(0)
    first, second = run.grant_all()
    run.arrive(first, oldest=0)
    run.arrive(second, oldest=0)
    assert run.choose().commit == (first,)
    assert run.choose().commit == (second,), "trains at version 1, one after its start"
    assert (run.version, run.credits()) == (2, 0), "a third one from version 0 would be two off"


def test_a_group_too_old_after_n_was_lowered_is_dropped_not_held() -> None:
    run = Run(policy("n-step-off", n=3), 1)
    run.publish(0)
    groups = run.grant_all()
    for group_id in groups:
        run.arrive(group_id, oldest=0)
    run.policy = policy("n-step-off", n=1)
    assert run.choose().commit == (groups[0],)
    assert run.choose().commit == (groups[1],)
    assert run.choose().drop == (groups[2], groups[3]), "the one that is not due yet too"
    run.publish(2)
    assert run.credits() == 2, "the places of the dropped groups"


def test_an_early_place_given_back_is_granted_again_though_later_ones_are_taken() -> None:
    run = Run(policy("n-step-off", n=1), 8)
    run.publish(0)
    groups = run.grant_all()
    assert len(groups) == 16
    run.batch_size = 4
    run.close(groups[0])
    assert run.credits() == 1, "the open step waits for this place"
    replacement = run.grant()
    assert run.credits() == 0
    for group_id in (*groups[1:4], replacement):
        run.arrive(group_id)
    assert set(run.choose().commit) == {replacement, *groups[1:4]}


def test_a_policy_lowered_to_sync_drops_what_is_too_old_and_goes_on() -> None:
    run = Run(policy("one-step-off"), 4)
    run.publish(0)
    groups = run.grant_all()
    for group_id in groups:
        run.arrive(group_id)
    run.choose()
    run.publish(1)
    run.policy = policy("sync")
    assert run.choose().drop == tuple(groups[4:])
    assert len(run.grant_all()) == 4


def test_a_changed_batch_size_goes_on_from_what_is_open() -> None:
    run = Run(policy("n-step-off", n=1), 4)
    run.publish(0)
    groups = run.grant_all()
    for group_id in groups:
        run.arrive(group_id)
    run.choose()
    run.batch_size = 2
    assert run.credits() == 0
    assert run.choose().commit == tuple(groups[4:6])
    assert run.choose().drop == tuple(groups[6:8]), "version 0 is two behind version 2"


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("n-step-of", {}, "unknown staleness policy 'n-step-of', did you mean 'n-step-off'?"),
        ("n-step-off", {"m": 1}, "n-step-off: unknown parameter 'm'; known: n"),
        ("n-step-off", {"lookahead": 1}, "n-step-off: unknown parameter 'lookahead'; known: n"),
        ("sync", {"n": 1}, "sync: unknown parameter 'n': it takes none"),
        ("n-step-off", {}, "n-step-off: parameter 'n' is missing"),
        ("n-step-off", {"n": -1}, "n-step-off: n must be an integer of at least 0, got -1"),
        ("n-step-off", {"n": True}, "n-step-off: n must be an integer of at least 0, got True"),
        ("n-step-off", {"n": "auto"}, "n-step-off: n must be an integer of at least 0, got 'auto'"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(
    name: str, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        policy(name, **parameters)


@pytest.mark.parametrize(("name", "bound"), [("sync", 0), ("one-step-off", 1)])
def test_the_named_settings_carry_their_bound(name: str, bound: int) -> None:
    assert (policy(name).name, policy(name).bound, policy(name).unit) == (name, bound, "group")


def test_versions_of_one_incarnation_are_their_numbers_apart() -> None:
    assert lag(v(7), v(4), {}) == 3
    assert lag(v(4), v(7), {}) == -3


def test_a_rebuild_counts_as_if_it_were_the_same_incarnation() -> None:
    lineage = {1: Fork(parent=0, number=5, reason="rebuild")}
    assert lag(Version(1, 9), Version(0, 7), lineage) == 2
    assert lag(Version(1, 9), Version(0, 7), {}) == 2


def test_versions_that_a_rollback_gave_up_are_as_far_as_the_way_there_and_back() -> None:
    lineage = {
        1: Fork(parent=0, number=5, reason="rollback"),
        2: Fork(parent=1, number=8, reason="rebuild"),
    }
    assert lag(Version(1, 7), Version(0, 9), lineage) == (7 - 5) + (9 - 5)
    assert lag(Version(1, 7), Version(0, 3), lineage) == 4
    assert lag(Version(2, 10), Version(0, 9), lineage) == (8 - 5) + (10 - 8) + (9 - 5)


def test_the_first_step_after_a_rollback_is_as_far_from_what_was_given_up_as_that_came() -> None:
    lineage = {1: Fork(parent=0, number=5, reason="rollback")}
    assert lag(Version(1, 5), Version(0, 8), lineage) == 8 - 5
    assert lag(Version(1, 5), Version(0, 5), lineage) == 0


def test_a_rollback_beyond_an_earlier_fork_meets_where_the_two_ways_part() -> None:
    lineage = {
        1: Fork(parent=0, number=10, reason="rollback"),
        2: Fork(parent=1, number=5, reason="rollback"),
    }
    assert lag(Version(2, 7), Version(0, 4), lineage) == 7 - 4
    assert lag(Version(2, 7), Version(0, 8), lineage) == (7 - 5) + (8 - 5)
    assert lag(Version(2, 7), Version(0, 13), lineage) == (7 - 5) + (13 - 5)
    assert lag(Version(2, 7), Version(1, 12), lineage) == (7 - 5) + (12 - 5)


def test_the_stalest_of_a_groups_versions_need_not_be_the_lowest() -> None:
    lineage = {1: Fork(parent=0, number=5, reason="rollback")}
    versions = [Version(0, 3), Version(0, 9), Version(1, 6)]
    # At (1, 7): 4 and (7 - 5) + (9 - 5) = 6 and 1.
    assert stalest(versions, Version(1, 7), lineage) == Version(0, 9)
    assert stalest(versions[:1], Version(1, 7), lineage) == Version(0, 3)
    assert stalest([], Version(1, 7), lineage) is None


def test_what_a_rollback_made_too_old_is_dropped_at_once() -> None:
    """n = 1. Step 3 trained a group of version 2, step 4 one of 3, step 5 one of 4; then the run
    goes back to step 2 as (1, 2)."""
    ledger = Ledger(
        version=Version(1, 2),
        published=Version(1, 2),
        batch_size=1,
        free_slots=1,
        group_size=1,
        groups=tuple(
            OpenGroup(
                group_id=f"g{m}", partition=0, offset=m, oldest=Version(0, m), newest=None,
                admitted_at=Version(0, m), state="ready", order=m, ready_order=m,
            )
            for m in (2, 3, 4)
        ),
        num_granted=5, num_trained=2, num_closed=0, num_unpublished=0,
        lineage={1: Fork(parent=0, number=2, reason="rollback")},
    )  # fmt: skip
    subject = policy("n-step-off", n=1)
    state = subject.start()
    for m in (2, 3, 4):
        state = subject.observe(state, Granted(f"g{m}", Version(0, m)))
    # At (1, 2): 0, then 3 - 2 = 1, then 4 - 2 = 2.
    assert subject.choose(state, ledger) == Choice(commit=("g2",), drop=("g4",))
