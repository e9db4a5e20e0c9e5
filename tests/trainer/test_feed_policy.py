"""What becomes of a staleness policy's decisions outside: cancels, masks, waits and stalls; what it
hears of the engines."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from connectors.kafka.client import Cluster
from connectors.records import Cancel, Coordinate, encode
from connectors.run_dir import RunDir
from operators.staleness import policy
from operators.staleness.types import EngineLoad
from tests.connectors.scripted_engine import ScriptedEngine, run, serving, until
from tests.trainer.ledger_world import TOPIC, gid
from tests.trainer.test_feed import World, as_manifest, eventually, names, taken, v
from trainer import feed as feed_module
from trainer.feed import Feed
from trainer.feed_state import Entry, FeedState, fresh
from trainer.ledger import FeedCore
from trainer.load import LoadPoll
from trainer.refold import recover
from trainer.stall import StallWatch, is_stalled, keep, kept


@pytest.fixture
def world(cluster: Cluster) -> Iterator[World]:
    world = World(cluster)
    yield world
    world.close()


def cancels(world: World) -> list[Cancel]:
    world.limits()
    return [cancel for said in world.announced for cancel in said.cancels]


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_running_group_that_is_given_up_is_cancelled_once_and_refunded_once(
    world: World, is_saved: bool
) -> None:
    """Of three groups the first two that end are the step; the trainer dies before the third is
    closed, and after or before the step's checkpoint is saved."""
    subject = policy("over-generate", extra=1)
    world.prompts(0, 8)
    feed = world.feed(subject=subject)
    feed.published(v(0), "d")
    world.score(0, 2)
    world.score(0, 0)
    step = taken(feed)
    assert names(step) == ["0/0", "0/2"]
    assert eventually(lambda: cancels(world)) == [Cancel(world.gid(0, 1), "close", "cancelled")]
    feed.close()
    world.steps.append(as_manifest(step, feed.epoch))

    feed = world.feed(subject=subject, state=step.snapshot if is_saved else None)
    feed.published(v(1), "e")
    assert feed.status()["running"] == 3, "the cancelled one holds its place until it has ended"
    world.refuse(0, 1, "cancelled")
    world.refuse(0, 1, "cancelled")
    assert eventually(lambda: world.limits()[0] == 6)
    assert eventually(lambda: feed.status()["duplicates"])
    found = feed.status()
    assert (found["closed"], found["duplicates"], found["credit_balance"]) == (1, 1, 0)
    assert len(cancels(world)) == 1, "neither by the next version nor by the next trainer again"
    assert step.actions == {}, "what is done after a step filled is the next one's"
    world.score(0, 3, 1)
    world.score(0, 4, 1)
    assert taken(feed).actions == {"cancels/close/cancelled": 1}


def test_a_group_that_ended_before_its_cancel_was_heard_of_is_what_it_became(world: World) -> None:
    world.prompts(0, 8)
    feed = world.feed(subject=policy("nemo-windowed", max_staleness_versions=0,
        max_inflight_prompts=2, max_buffered_rollouts=2, min_groups_for_streaming_train=1,
    ), batch_size=1)  # fmt: skip
    feed.published(v(0), "d")
    world.score(0, 0)
    step = taken(feed)
    assert eventually(lambda: cancels(world)) == [Cancel(world.gid(0, 1), "close", "stale")]
    world.score(0, 1)
    assert eventually(lambda: feed.status()["dropped"]) == 1, "too old to be trained, not closed"
    assert step.step == 1


def test_a_group_put_back_starts_no_earlier_than_the_version_it_was_announced_with(
    world: World,
) -> None:
    subject = policy("over-generate", extra=1, then="requeue")
    world.prompts(0, 8)
    feed = world.feed(subject=subject)
    feed.published(v(0), "d")
    for offset in (0, 2):
        world.score(0, offset)
    step = taken(feed)
    feed.published(v(1), "e")
    assert cancels(world) == [Cancel(world.gid(0, 1), "requeue", "cancelled")]
    world.score(0, 1, 1)
    world.score(0, 3, 1)
    second = taken(feed)
    assert names(second) == ["0/1", "0/3"]
    assert second.actions == {"cancels/requeue/cancelled": 1}

    world.steps.append(as_manifest(step, feed.epoch))
    core = core_from(subject, step.snapshot, topic=world.cluster.topic("prompts"))
    world.limits()
    recover(core, list(enumerate(world.announced, core.policy_offset)), world.steps.chain())
    entry = core.accounts.open[world.gid(0, 1)]
    assert (entry.oldest, entry.admitted_at) == (v(1), v(0)), "so it is after a recovery"


def test_masked_versions_and_the_bound_are_in_what_the_manifest_says(world: World) -> None:
    subject = policy("deadline", bound=1, lookahead=1, at_deadline="mask")
    world.prompts(0, 8)
    feed = world.feed(subject=subject, batch_size=1)
    feed.published(v(0), "d")
    steps = []
    for number, offset in enumerate((1, 2)):
        world.score(0, offset, number)
        steps.append(taken(feed))
        feed.published(v(number + 1), "d")
    world.score(0, 0, 0, 2)  # at version 2, with tokens of versions 0 and 2
    late = taken(feed)
    assert late.version == v(2)
    assert late.weights == {v(0): 0.0}
    assert late.settings == {
        "staleness_policy": "deadline", "staleness_bound": 1, "token_weights": "0.0=0.0",
    }  # fmt: skip
    assert [dict(s.weights) for s in steps] == [{}, {}]


def test_late_tokens_count_less_by_each_step_over_the_bound(world: World) -> None:
    subject = policy("deadline", bound=0, lookahead=0, at_deadline="reweight", decay=0.5)
    world.prompts(0, 8)
    feed = world.feed(subject=subject, batch_size=1)
    feed.published(v(0), "d")
    world.score(0, 0)
    assert taken(feed).weights == {}
    feed.published(v(1), "d")
    world.score(0, 1, 0)  # an engine that broke its promise
    late = taken(feed)
    assert late.weights == {v(0): 0.5}
    assert late.settings["token_weights"] == "0.0=0.5"
    assert "staleness_bound" not in late.settings


def test_the_time_before_the_trainer_asks_is_no_wait(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = Feed._open

    def slowly(feed: Feed, clients: ExitStack) -> None:
        time.sleep(0.6)
        opening(feed, clients)

    monkeypatch.setattr(Feed, "_open", slowly)
    world.prompts(0, 1)
    feed = world.feed(n=0, batch_size=1)
    time.sleep(0.3)
    began = time.monotonic()
    assert feed.take(0.01) is None
    feed.published(v(0), "d")
    world.score(0, 0)
    waits = taken(feed).waits
    assert 0 < sum(waits.values()) <= time.monotonic() - began


def test_the_trainers_waits_are_told_by_what_it_waited_for(world: World) -> None:
    feed = world.feed(n=0, batch_size=1)
    feed.status()  # it is at work
    assert feed.take(0.2) is None
    feed.published(v(0), "d")
    assert feed.take(0.2) is None
    world.prompts(0, 1)
    eventually(lambda: world.limits()[0])
    assert feed.take(0.2) is None
    world.score(0, 0)
    waits = taken(feed).waits
    assert waits.keys() == {"publish", "prompts", "rollouts"}
    assert all(0.1 < seconds < 60 for seconds in waits.values())
    world.prompts(0, 1)
    feed.published(v(1), "d")
    world.score(0, 1, 1)
    eventually(lambda: feed.status()["waiting_for"] == "trainer")
    assert taken(feed).waits == {}, "it was there when it was asked for"


# ----------------------------------------------------------------------------------------- stalls
def stuck_policy() -> Any:
    """Trains two groups at once, of one version; three run at a time."""
    return policy(
        "nemo-weight-fifo", max_staleness_versions=1, max_inflight_prompts=3,
        max_buffered_rollouts=4, min_groups_for_streaming_train=2,
    )  # fmt: skip


def stuck_core() -> FeedCore:
    """One group of version 0 is left, and waited for another one."""
    core = FeedCore(stuck_policy(), fresh(1), prompts_topic=TOPIC, batch_size=2)
    for number, offsets in ((0, (0, 1, 2)), (1, (3, 4, 5))):
        due = core.propose([9], epoch=0, published=(v(number), "d"))
        assert due is not None
        core.apply_announcement(number, due)
        assert not is_stalled(core)
        for offset in offsets:
            at = Coordinate(0, offset, 7, gid(0, offset))
            core.arrived(at, v(number), v(number), 1)
        assert core.choose() is None or number == 0
    return core


class Watched:
    """A watch that is looked through once a second."""

    def __init__(self, core: FeedCore) -> None:
        self.core, self.now = core, 0.0
        self.said: list[str | None] = []
        self.watch = StallWatch(self.said.append, clock=lambda: self.now)

    def look(self, seconds: int, *, busy: bool = False) -> list[str | None]:
        for _ in range(seconds):
            self.watch.look(self.core, busy=busy)
            self.now += 1.0
        return self.said


def test_a_policy_that_cannot_go_on_is_told_once_with_its_ledger_until_it_can(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched = Watched(stuck_core())
    with caplog.at_level(logging.INFO):
        assert watched.look(10) == []
        (text,) = watched.look(50)
        assert text is not None
        assert text.startswith("stalled: nemo-weight-fifo neither commits a group to step 2")
        assert "2 of 2 places free; 0.1 is announced" in text
        assert "4 ready" in text
        for offset in (2, 3, 4, 5):
            assert gid(0, offset) in text
        watched.core.drop(gid(0, 2))
        assert watched.look(2)[1:] == [None]
    said = [record for record in caplog.records if record.name == "trainer.stall"]
    assert [record.levelname for record in said] == ["ERROR", "INFO"]


def test_a_policy_that_waits_for_something_is_not_stalled() -> None:
    watched = Watched(stuck_core())
    assert watched.look(60, busy=True) == [], "a full step waits for the trainer"
    state = watched.core.snapshot()
    stuck = stuck_policy()
    for changed in (
        {"published": v(0)},  # the next version is on its way
        {"open": (state.open[0], *(running(e) for e in state.open[1:]))},
        {"open": state.open[:1]},  # prompts are granted as soon as there are any
    ):
        other = Watched(core_from(stuck, state, **changed))
        assert other.look(60) == []
    short = Watched(stuck_core())
    short.look(8)
    short.core.drop(gid(0, 2))
    assert short.look(60) == [], "it was none for long"


def running(entry: Entry) -> Entry:
    return msgspec.structs.replace(entry, coordinate=None, ready_order=None)


def core_from(subject: Any, state: FeedState, *, topic: str = TOPIC, **changes: Any) -> FeedCore:
    changed = msgspec.structs.replace(state, **changes)
    return FeedCore(subject, changed, prompts_topic=topic, batch_size=2)


def test_a_feed_that_stalls_says_so_while_it_lasts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "StallWatch", partial(StallWatch, after_s=0.2))
    said: list[str | None] = []
    world.prompts(0, 3)
    feed = world.feed(subject=stuck_policy(), stalled=said.append)
    feed.published(v(0), "d")
    for offset in (0, 1, 2):
        world.score(0, offset)
    assert names(taken(feed)) == ["0/0", "0/1"]
    feed.published(v(1), "d")
    world.prompts(0, 6)
    for offset in (3, 4, 5):
        world.score(0, offset, 1)
    assert eventually(lambda: said)[0].startswith("stalled: nemo-weight-fifo")
    assert feed.status()["waiting_for"] == "policy"
    feed.close()
    assert len(said) == 1


def test_the_runs_folder_says_so_as_long_as_it_lasts(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert kept(run_dir) is None
    keep(run_dir, None)
    keep(run_dir, "stalled: x\npolicy y")
    assert kept(run_dir) == "stalled: x\npolicy y"
    keep(run_dir, None)
    assert kept(run_dir) is None


# ------------------------------------------------------------------------------------------- load
def test_a_policy_that_hangs_on_the_engines_load_hears_of_it(world: World) -> None:
    heard: list[EngineLoad] = []
    subject = policy("prime-rl")
    observe = subject.observe

    def hear(state: Any, event: Any) -> Any:
        if isinstance(event, EngineLoad):
            heard.append(event)
        return observe(state, event)

    subject.observe = hear  # type: ignore[method-assign]
    engine = ScriptedEngine()
    engine.num_running, engine.num_queued, engine.kv_use = 3, 2, 0.25

    async def main() -> None:
        async with serving(engine):
            feed = world.feed(subject=subject, engines=lambda: [engine.url])
            await until(lambda: bool(heard))
            feed.close()

    run(main())
    assert heard[0] == EngineLoad(num_running=3, num_queued=2, kv_use=0.25)


def test_a_policy_whose_grants_follow_from_the_log_hears_nothing_of_it() -> None:
    core = FeedCore(policy("sync"), fresh(1), prompts_topic=TOPIC, batch_size=2)
    before = encode(core.snapshot())
    core.loaded(EngineLoad(num_running=9, num_queued=9, kv_use=1.0))
    assert encode(core.snapshot()) == before


def test_engines_that_cannot_be_asked_are_asked_again() -> None:
    engine = ScriptedEngine()
    heard: list[EngineLoad] = []

    async def main() -> None:
        poll = LoadPoll(lambda: [engine.url] if engine.url else [], heard.append, every_s=0.05)
        await asyncio.sleep(0.2)
        assert heard == []
        async with serving(engine):
            await until(lambda: len(heard) > 1)
        poll.check()
        await asyncio.to_thread(poll.close)

    run(main())
