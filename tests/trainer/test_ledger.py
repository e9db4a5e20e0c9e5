"""The ledger against a simulated run: logs, sources, a trainer and crashes, in any interleaving."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.records import (
    Announcement,
    Coordinate,
    decode_as,
    encode,
    parse_group_id,
)
from operators.staleness import policy
from operators.staleness.types import StalenessPolicy
from tests.trainer.ledger_acts import act
from tests.trainer.ledger_world import TOPIC, World, gid, manifest, v
from trainer.accounts import LedgerBroken
from trainer.feed_state import ClosedStep, FeedState, fresh
from trainer.frontier import Frontier
from trainer.ledger import FeedCore
from trainer.refold import recover
from trainer.step_log import Chain


def n_step_off(n: int) -> Callable[[], StalenessPolicy[Any]]:
    return lambda: policy("n-step-off", n=n)


@settings(max_examples=120, deadline=None)
@given(
    n=st.integers(0, 3),
    batch_size=st.integers(1, 4),
    num_partitions=st.integers(1, 3),
    with_rollbacks=st.booleans(),
    acts=st.lists(st.integers(0, 2**20), min_size=300, max_size=300),
)
def test_whatever_happens_in_whatever_order_the_books_balance_and_training_goes_on(
    n: int, batch_size: int, num_partitions: int, with_rollbacks: bool, acts: list[int]
) -> None:
    world = World(n_step_off(n), batch_size, num_partitions)
    for seed in acts:
        chance = random.Random(seed)
        before = world.core
        act(world, chance, with_rollbacks=with_rollbacks)
        if before.version.incarnation == world.core.version.incarnation:
            assert_places_kept(before, world.core)
        world.check()
    world.drain()


def assert_places_kept(before: FeedCore, after: FeedCore) -> None:
    """Groups open before and after, also after a crash, keep the step they are reserved for."""
    was, now = before.policy_state.taken, after.policy_state.taken
    assert {g: s for g, s in now.items() if g in was} == {g: s for g, s in was.items() if g in now}


# ----------------------------------------------------------------------------------- by hand
def core_of(
    state: FeedState | None = None,
    *,
    n: int = 1,
    batch_size: int = 2,
    num_partitions: int = 1,
    name: str = "n-step-off",
) -> FeedCore:
    subject = policy(name, n=n) if name == "n-step-off" else policy(name)
    return FeedCore(
        subject,
        state or fresh(num_partitions),
        prompts_topic=TOPIC,
        batch_size=batch_size,
    )


def publish(core: FeedCore, number: int, ends: list[int]) -> Announcement | None:
    due = core.propose(ends, epoch=0, published=(v(number), "d"))
    if due is not None:
        core.apply_announcement(core.policy_offset, due)
    return due


def arrive(core: FeedCore, offset: int, number: int = 0, *, at: int | None = None) -> bool:
    where = core.read[0] if at is None else at
    return core.arrived(Coordinate(0, where, 7, gid(0, offset)), v(number), v(number), 1)


def ids(step: ClosedStep | None) -> list[int]:
    assert step is not None
    return [parse_group_id(r.group_id).offset for r in step.records]


def test_a_step_holds_its_records_in_the_order_of_their_grants() -> None:
    core = core_of()
    publish(core, 0, [8])
    for offset in (1, 3, 0):
        arrive(core, offset)
    step = core.choose()
    assert ids(step) == [0, 1]
    assert step is not None
    assert (step.step, step.version, step.snapshot.version) == (1, v(0), v(1))
    assert [e.group_id for e in step.snapshot.open] == [gid(0, 2), gid(0, 3)]


@pytest.mark.parametrize("n", [0, 1, 3])
def test_failing_groups_leak_no_credit_in_two_hundred_steps(n: int) -> None:
    chance = random.Random(n)
    core = core_of(n=n, batch_size=4, num_partitions=3)
    while core.version.number < 200:
        publish(core, core.version.number, [10_000, 0, 10_000])
        for group_id in list(core.accounts.open):
            where = parse_group_id(group_id).partition
            if chance.random() < 0.3:
                core.closed(group_id, chance.choice(["reward_failed", "malformed"]))
            elif core.accounts.open[group_id].coordinate is None:
                at = Coordinate(where, core.read[where], 7, group_id)
                core.arrived(at, core.accounts.open[group_id].oldest, None, 1)
        core.choose()
        open_before = len(core.accounts.open)
        assert core.accounts.audit_counts()["credit_balance"] == 0
        assert open_before <= (n + 1) * 4
    publish(core, 200, [10_000, 0, 10_000])
    assert len(core.accounts.open) == (n + 1) * 4
    assert core.accounts.counts().trained == 800
    assert core.accounts.counts().closed > 200


def test_a_late_second_attempt_is_counted_and_ignored() -> None:
    core = core_of(batch_size=1)
    publish(core, 0, [4])
    assert arrive(core, 0)
    assert not arrive(core, 0)
    assert ids(core.choose()) == [0]
    assert not core.closed(gid(0, 0), "reward_timeout", at=(0, 2))
    assert core.accounts.counts().duplicates == 2
    assert core.read == [3]
    assert core.accounts.audit_counts()["credit_balance"] == 0


@pytest.mark.parametrize("group_id", [gid(0, 99), gid(7, 0), "traffic/session-1", "other/0/0"])
def test_a_terminal_of_an_offset_that_was_never_granted_is_only_counted(group_id: str) -> None:
    core = core_of()
    publish(core, 0, [8])
    assert not core.arrived(Coordinate(0, 0, 7, group_id), v(0), v(0), 1)
    assert not core.closed(group_id, "malformed", at=(0, 1))
    assert core.accounts.counts().ungranted == 2
    assert core.read == [2]


def test_prompts_generated_ahead_of_the_checkpoint_are_trained_once_after_a_restart() -> None:
    """Ids 0..7, two a step, four generated at a time; the run stops after the first step."""
    core = core_of()
    first = publish(core, 0, [8])
    for offset in range(4):
        arrive(core, offset)
    step = core.choose()
    assert ids(step) == [0, 1]
    assert step is not None
    again = core_of(decode_as(encode(step.snapshot), FeedState))
    assert first is not None
    recover(again, [(0, first)], Chain())
    assert again.read == [4], "records 2 and 3 are kept by their coordinates"
    assert ids(again.choose()) == [2, 3]
    assert again.choose() is None


def test_steps_consumed_ahead_of_the_checkpoint_are_trained_again_as_they_were() -> None:
    core = core_of(n=3, batch_size=1)
    first = publish(core, 0, [8])
    assert first is not None
    for offset in (2, 0, 1):
        arrive(core, offset)
    steps = [core.choose() for _ in range(3)]
    assert [ids(s) for s in steps] == [[0], [1], [2]]
    assert steps[0] is not None
    assert steps[1] is not None
    again = core_of(steps[0].snapshot, n=3, batch_size=1)
    recover(again, [(0, first)], Chain(manifests=[manifest(steps[1])]))
    assert again.version == v(2)
    assert ids(again.choose()) == [2], "batch two is the manifest's, batch three comes again"


def test_an_older_snapshot_and_the_logs_give_the_state_of_the_feed_that_crashed() -> None:
    core = core_of(n=2, batch_size=2)
    log = [publish(core, 0, [9])]
    start = encode(core_of(n=2).snapshot())
    for offset in (5, 1, 0):
        arrive(core, offset)
    core.closed(gid(0, 2), "reward_failed", at=(0, 3))
    log.append(publish(core, 0, [9]))
    step = core.choose()
    assert step is not None
    log.append(publish(core, 1, [12]))
    again = core_of(decode_as(start, FeedState), n=2)
    announcements = [(i, a) for i, a in enumerate(log) if a is not None]
    assert len(announcements) == 3
    recover(again, announcements, Chain(manifests=[manifest(step)]))
    assert again.read == [0]
    for at, offset in enumerate((5, 1, 0)):
        arrive(again, offset, at=at)
    again.closed(gid(0, 2), "reward_failed", at=(0, 3))
    assert again.snapshot() == core.snapshot()


def test_an_announcement_that_says_nothing_new_is_not_due() -> None:
    core = core_of()
    assert publish(core, 0, [1]) is not None
    assert core.propose([1], epoch=0) is None
    assert core.propose([2], epoch=0) is not None


def test_a_refund_is_listed_by_the_announcement_that_grants_its_replacement() -> None:
    core = core_of(batch_size=1)
    publish(core, 0, [8])
    core.closed(gid(0, 1), "agent_failed", at=(0, 0))
    assert core.credits() == 1
    due = publish(core, 0, [8])
    assert due is not None
    assert (due.closed, due.limits) == ((gid(0, 1),), (3,))
    core.closed(gid(0, 0), "agent_failed", at=(0, 1))
    due = publish(core, 0, [8])
    assert due is not None
    assert due.closed == (gid(0, 0),)


def test_an_idle_partition_hoards_no_credit_and_starves_nobody() -> None:
    core = core_of(n=2, batch_size=4, num_partitions=3)
    due = publish(core, 0, [5, 0, 100])
    assert due is not None
    assert due.limits == (5, 0, 7)
    for offset in range(5):
        core.closed(gid(0, offset), "malformed", at=(0, offset))
    due = publish(core, 0, [6, 3, 100])
    assert due is not None
    assert sum(due.limits) == 17
    assert due.limits[1] >= 1, "the one that was idle gets its turn"


def test_credits_take_turns_between_announcements() -> None:
    core = core_of(n=0, batch_size=1, num_partitions=2)
    for number in range(6):
        publish(core, number, [10, 10])
        (group_id,) = core.accounts.open
        partition = parse_group_id(group_id).partition
        core.arrived(Coordinate(partition, number, 7, group_id), v(number), v(number), 1)
        assert core.choose() is not None
    assert core.accounts.limits == [3, 3]


def test_dropped_groups_are_refunded_and_listed_in_one_manifest_also_over_a_crash() -> None:
    core = core_of(n=3, batch_size=1)
    log = [publish(core, 0, [9])]
    for offset in range(4):
        arrive(core, offset)
    start = encode(core.snapshot())
    steps = [core.choose(), core.choose()]
    lowered = core_of(core.snapshot(), n=1, batch_size=1)
    assert lowered.choose() is None, "groups 2 and 3 are two steps old at version 2"
    log.append(publish(lowered, 2, [9]))
    assert log[1] is not None
    assert log[1].closed == (gid(0, 2), gid(0, 3))
    arrive(lowered, 4, number=2)
    step = lowered.choose()
    assert ids(step) == [4]
    assert step is not None
    assert step.dropped == (gid(0, 2), gid(0, 3))
    assert lowered.accounts.counts().closed_by_reason == {"stale": 2}

    announcements = [(i, a) for i, a in enumerate(log) if a is not None]
    chain = [manifest(s) for s in (*steps, step) if s is not None]
    for known in (2, 3):
        again = core_of(decode_as(start, FeedState), n=1, batch_size=1)
        recover(again, announcements, Chain(manifests=chain[:known]))
        arrive(again, 4, number=2)
        counts = again.accounts.audit_counts()
        assert (counts["dropped"], counts["closed"], counts["credit_balance"]) == (2, 2, 0)
        again_dropped = again.snapshot().dropped
        assert again_dropped == ({} if known == 3 else {gid(0, k): "stale" for k in (2, 3)})


def test_a_group_that_never_ends_does_not_make_the_snapshots_grow() -> None:
    core = core_of(n=1, batch_size=2)
    publish(core, 0, [1000])
    sizes = []
    for at in range(900):
        running = [g for g in core.accounts.open if g != gid(0, 0)]
        core.closed(running[0], "reward_failed", at=(0, at))
        publish(core, 0, [1000])
        sizes.append(len(encode(core.snapshot().settled)))
    assert core.snapshot().frontier == (0,)
    assert core.snapshot().settled == (((1, 901),),)
    assert max(sizes) <= len(b"[[[1,901]]]")


def test_a_group_given_up_by_the_trainer_returns_its_credit_once() -> None:
    core = core_of(batch_size=1)
    publish(core, 0, [8])
    arrive(core, 0)
    assert core.drop(gid(0, 0), "filtered")
    assert not core.drop(gid(0, 0), "filtered")
    assert core.credits() == 1
    assert core.accounts.counts().closed_by_reason == {"filtered": 1}


def test_another_policy_takes_over_what_is_open() -> None:
    core = core_of(batch_size=2)
    publish(core, 0, [8])
    arrive(core, 0)
    arrive(core, 1)
    other = core_of(core.snapshot(), batch_size=2, name="one-step-off")
    assert other.credits() == 0
    assert ids(other.choose()) == [0, 1]


def test_an_announcement_of_a_fenced_trainer_changes_nothing() -> None:
    core = core_of()
    newer = Announcement(epoch=5, version=v(0), digest="d", limits=(1,))
    older = Announcement(epoch=4, version=v(0), digest="d", limits=(4,))
    core.apply_announcement(0, newer)
    core.apply_announcement(1, older)
    assert (core.accounts.limits, core.policy_offset, core.epoch) == ([1], 2, 5)


def test_a_manifest_that_contradicts_the_ledger_stops_the_process() -> None:
    core = core_of(batch_size=1)
    publish(core, 0, [8])
    arrive(core, 0)
    step = core.choose()
    assert step is not None
    again = core_of(batch_size=1)
    with pytest.raises(LedgerBroken, match="not open"):
        again.apply_manifest(manifest(step))
    core.apply_manifest(manifest(step))
    assert core.version == v(1), "one that the snapshot holds already changes nothing"


def test_a_snapshot_is_refused_while_a_step_fills() -> None:
    core = core_of()
    publish(core, 0, [8])
    arrive(core, 0)
    assert core.choose() is None
    with pytest.raises(LedgerBroken, match="between steps"):
        core.snapshot()


def test_prompts_that_retention_removed_before_the_run_are_not_granted() -> None:
    core = core_of(fresh(2, starts=[3, 0]), batch_size=4)
    due = publish(core, 0, [5, 1])
    assert due is not None
    assert sorted(core.accounts.open) == [gid(0, 3), gid(0, 4), gid(1, 0)]


def test_a_frontier_takes_an_offset_once() -> None:
    frontier = Frontier(2, ((4, 5),))
    frontier.add(2)
    assert (frontier.at, frontier.above) == (3, ((4, 5),))
    frontier.add(3)
    assert (frontier.at, frontier.above) == (5, ())
    with pytest.raises(ValueError, match="offset 1 is settled already"):
        frontier.add(1)
