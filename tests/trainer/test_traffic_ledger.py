"""Live traffic against a simulated run: crashes, rollbacks, lowered bounds, second terminals, in
any interleaving; then by hand."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.records import Begin, Coordinate, Fork, Version, decode_as, encode, parse_group_id
from operators.staleness import policy
from tests.trainer.ledger_world import manifest, v
from tests.trainer.traffic_world import CALLS, TrafficWorld, traffic_act
from trainer.accounts import LedgerBroken
from trainer.actions import drop_reasons
from trainer.feed_state import FeedState, TrafficState, fresh
from trainer.ledger import FeedCore
from trainer.refold import recover
from trainer.step_log import Chain
from trainer.traffic import Allowance, Traffic


@settings(max_examples=80, deadline=None)
@given(
    batch_size=st.integers(0, 3),
    num_places=st.integers(1, 4),
    bound=st.integers(0, 5),
    num_partitions=st.integers(1, 3),
    with_rollbacks=st.booleans(),
    acts=st.lists(st.integers(0, 2**20), min_size=250, max_size=250),
)
def test_whatever_happens_no_session_is_trained_too_old_or_twice_and_none_is_lost(
    batch_size: int,
    num_places: int,
    bound: int,
    num_partitions: int,
    with_rollbacks: bool,
    acts: list[int],
) -> None:
    """`TrafficWorld` asserts the bound at every step, `account` the fates."""
    world = TrafficWorld(
        lambda: policy("n-step-off", n=1),
        batch_size,
        num_partitions,
        num_places=num_places,
        bound=bound,
    )
    for seed in acts:
        traffic_act(world, random.Random(seed), with_rollbacks=with_rollbacks)
        world.check()
    world.drain()


def test_the_simulated_run_trains_and_drops_live_traffic_up_to_its_bound() -> None:
    chance = random.Random(1)
    world = TrafficWorld(lambda: policy("sync"), 0, 2, num_places=2, bound=3)
    world.no_signal = lambda group_id: parse_group_id(group_id).offset % 7 == 0
    for _ in range(2000):
        traffic_act(world, chance, with_rollbacks=False)
    world.drain()
    counts = world.core.traffic.counts()
    assert counts.trained > 100
    assert {"stale", "filtered"} <= set(counts.dropped_by_reason)
    assert counts.closed_by_reason["capped"] > 10
    assert counts.duplicates > 10
    assert world.max_staleness == 3


# ----------------------------------------------------------------------------------- by hand
def core_of(
    state: FeedState | None = None, *, batch_size: int = 0, num_places: int = 2, bound: int = 1
) -> FeedCore:
    return FeedCore(
        policy("n-step-off", n=1),
        state or fresh(1),
        prompts_topic="test.prompts",
        batch_size=batch_size,
        allowance=Allowance(num_places=num_places, bound=bound, topics=(CALLS,)),
    )


def gid(offset: int) -> str:
    return f"{CALLS}/0/{offset}"


def arrive(core: FeedCore, offset: int, number: int | None = 0, *, at: int | None = None) -> bool:
    where = core.read[0] if at is None else at
    oldest = None if number is None else v(number)
    return core.arrived(Coordinate(0, where, 7, gid(offset)), oldest, oldest, 1)


def close_step(core: FeedCore) -> list[int]:
    step = core.choose()
    assert step is not None
    return [int(r.group_id.rsplit("/", 1)[1]) for r in step.records]


def test_a_queue_is_taken_in_as_far_as_its_steps_train_it_in_time() -> None:
    """Two a step and bound 1: of what version 0 wrote the first four are trained in time, at
    versions 0 and 1. The fifth would be trained at version 2."""
    core = core_of()
    assert [arrive(core, offset) for offset in range(5)] == [True, True, True, True, False]
    assert core.traffic.dropped == {gid(4): "stale"}
    assert close_step(core) == [0, 1]
    assert arrive(core, 5, 1), "at version 2, one step old"
    assert not arrive(core, 6, 0)
    assert (close_step(core), core.version) == ([2, 3], v(2))
    assert core.choose() is None, "one is not enough where there is nothing else"
    assert arrive(core, 7, 2)
    assert close_step(core) == [5, 7]


def test_text_is_of_no_version_and_never_too_old() -> None:
    core = core_of(num_places=1, bound=0)
    assert [arrive(core, offset, None) for offset in range(9)] == [True] * 9


def test_what_the_policy_fills_takes_what_live_traffic_there_is() -> None:
    core = core_of(batch_size=1)
    due = core.propose([9], epoch=0, published=(v(0), "d"))
    assert due is not None
    assert due.limits == (2,), "n-step-off grants by its own batch, not by the step's"
    core.apply_announcement(0, due)
    assert core.ledger().batch_size == 1
    assert core.choose() is None, "live traffic alone fills no step of a policy"
    for offset in (0, 1):
        core.arrived(Coordinate(0, offset, 7, f"test.prompts/0/{offset}"), v(0), v(0), 1)
    for offset in (0, 1, 2):
        arrive(core, offset)
    first, second, third = core.choose(), core.choose(), core.choose()
    assert first is not None
    assert second is not None
    assert third is None
    assert [r.group_id for r in first.records] == ["test.prompts/0/0", gid(0), gid(1)]
    assert [r.group_id for r in second.records] == ["test.prompts/0/1", gid(2)]
    assert core.accounts.counts().trained == 2
    assert core.traffic.counts().trained == 3


def test_a_policy_that_has_no_place_is_asked_nothing_and_grants_nothing() -> None:
    core = core_of()
    due = core.propose([100], epoch=0, published=(v(0), "d"))
    assert due is not None
    assert (due.limits, due.cancels) == ((0,), ())
    core.apply_announcement(0, due)
    assert core.credits() == 0
    assert core.propose([100], epoch=0) is None


def test_a_second_terminal_is_counted_and_ignored_whatever_became_of_the_first() -> None:
    core = core_of()
    arrive(core, 0)
    assert not arrive(core, 0), "it waits"
    arrive(core, 1)
    close_step(core)
    assert not arrive(core, 0), "it was trained"
    core.closed(gid(2), "capped", at=(0, 9))
    assert not arrive(core, 2, at=10), "it closed"
    assert not core.closed(gid(2), "no_label", at=(0, 11))
    assert core.traffic.counts().duplicates == 4
    assert core.traffic.counts().closed_by_reason == {"capped": 1}
    again = Traffic(core.snapshot().traffic, core.traffic.allowance)
    assert not again.awaits(gid(0)), "also over a checkpoint"


def test_one_that_comes_too_late_to_be_known_is_dropped_and_never_trained_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.remembered.WINDOW", 64)
    core = core_of(num_places=1, bound=1000)
    arrive(core, 3)
    close_step(core)
    for offset in range(100, 400, 100):
        arrive(core, offset)
        close_step(core)
    assert not core.awaits(gid(3))
    assert not arrive(core, 3)
    assert core.traffic.dropped == {gid(3): "stale"}


def test_a_crash_takes_the_manifests_word_for_what_was_trained_and_dropped() -> None:
    """Step 1 is in the checkpoint, step 2 in the log alone, step 3 died with the trainer."""
    core = core_of(num_places=1, bound=2)
    for offset in range(4):
        arrive(core, offset)
    assert core.traffic.dropped == {gid(3): "stale"}
    core.drop(gid(1), "filtered")
    one = core.choose()
    arrive(core, 9, 1)
    two, three = core.choose(), core.choose()
    assert one is not None
    assert two is not None
    assert three is not None
    assert drop_reasons(manifest(one)) == {gid(1): "filtered", gid(3): "stale"}
    assert [r.group_id for r in three.records] == [gid(9)]
    again = core_of(decode_as(encode(one.snapshot), FeedState), num_places=1, bound=2)
    recover(again, [], Chain(manifests=[manifest(one), manifest(two)]))
    assert again.version == v(2)
    assert again.traffic.counts().trained == 2
    again = core_of(decode_as(encode(again.snapshot()), FeedState), num_places=1, bound=2)
    assert arrive(again, 9, 1, at=4)
    step = again.choose()
    assert step is not None
    assert step.records == three.records
    assert (step.dropped, again.traffic.counts()) == ((), core.traffic.counts())


def test_from_the_very_beginning_the_manifests_say_it_before_the_terminals_are_read() -> None:
    core = core_of(num_places=1, bound=2)
    for offset in range(5):
        arrive(core, offset)
    step = core.choose()
    assert step is not None
    again = core_of(num_places=1, bound=2)
    recover(again, [], Chain(manifests=[manifest(step)]))
    again = core_of(decode_as(encode(again.snapshot()), FeedState), num_places=1, bound=2)
    assert not again.awaits(gid(0)), "a step trained it"
    assert again.awaits(gid(3)), "listed as dropped: a dead letter may still be owed"
    for offset in range(5):
        arrive(again, offset)
    assert list(again.traffic.queue) == [gid(1), gid(2)]
    assert again.traffic.counts() == core.traffic.counts()
    assert again.traffic.dropped == {}


def test_a_lowered_bound_drops_what_it_makes_too_old_and_keeps_the_others() -> None:
    core = core_of(num_places=1, bound=4)
    for offset, number in enumerate((0, 0, 0)):
        arrive(core, offset, number)
    close_step(core)
    arrive(core, 3, 1)
    lowered = core_of(core.snapshot(), num_places=1, bound=1)
    assert lowered.traffic.recheck(lowered.version, lowered.lineage) == [gid(2)]
    assert list(lowered.traffic.queue) == [gid(1), gid(3)]
    assert lowered.traffic.dropped == {gid(2): "stale"}


def test_what_a_fork_excludes_is_dropped_wherever_it_is() -> None:
    core = core_of(num_places=1, bound=4)
    arrive(core, 0)
    arrive(core, 1)
    fork = Fork(parent=0, number=0, reason="rollback")
    core.lineage[1] = fork
    core.apply_fork(
        Begin(
            epoch=3, writer="w", resumed_step=0, started_at=0.0, incarnation=1, fork=fork,
            excluded=(gid(1), gid(5), gid(6)),
        )
    )  # fmt: skip
    assert core.version == Version(1, 0)
    assert not arrive(core, 5), "it comes later"
    assert core.closed(gid(6), "capped", at=(0, 8)), "and has an end of its own"
    step = core.choose()
    assert step is not None
    assert [r.group_id for r in step.records] == [gid(0)]
    assert drop_reasons(manifest(step)) == dict.fromkeys((gid(1), gid(5), gid(6)), "filtered")
    assert core.traffic.counts().dropped_by_reason == {"filtered": 2}
    assert core.traffic.counts().closed_by_reason == {"capped": 1}


def test_a_manifest_that_contradicts_the_queue_stops_the_process() -> None:
    core = core_of(num_places=1)
    arrive(core, 0)
    traffic = core.traffic
    with pytest.raises(LedgerBroken, match="in the queue it is"):
        traffic.trained(Coordinate(0, 5, 7, gid(0)))
    traffic.trained(Coordinate(0, 6, 7, gid(1)))
    with pytest.raises(LedgerBroken, match="though it had ended"):
        traffic.trained(Coordinate(0, 7, 7, gid(1)))
    with pytest.raises(LedgerBroken, match="first terminal says capped"):
        traffic.close(gid(1), "capped")


def test_without_an_allowance_nothing_is_live_traffic() -> None:
    traffic = Traffic(TrafficState())
    assert not traffic.owns(gid(0))
    assert traffic.settings() == {}


@pytest.mark.parametrize("group_id", ["x", f"{CALLS}/0/-1", f"{CALLS}/-1/0", "other/0/0", CALLS])
def test_what_is_no_place_of_a_call_is_no_live_traffic(group_id: str) -> None:
    assert not core_of().traffic.owns(group_id)


def test_the_feed_state_says_from_where_the_queue_is_read_again() -> None:
    core = core_of()
    arrive(core, 0, at=4)
    core.passed(0, 40)
    found: Mapping[int, int] = core.snapshot().terminals_from()
    assert found == {0: 4}
