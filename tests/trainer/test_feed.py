"""The feed's thread on a real broker; the dataflow and the trainer are played by the test."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from connectors.arrow import checksum, encode_group
from connectors.config import Config, parse
from connectors.kafka.client import Cluster, Producer, read_all
from connectors.kafka.tail import PolicyTail
from connectors.kafka.topics import delete_records, ensure_topics
from connectors.records import (
    HEADER_CRC,
    HEADER_KIND,
    Announcement,
    Closed,
    Fork,
    Group,
    Manifest,
    Origin,
    Prompt,
    Segment,
    Trajectory,
    Version,
    encode,
)
from operators.staleness import policy
from operators.staleness.n_step_off import NStepOff, Slots
from operators.staleness.types import Choice, Ledger, StalenessPolicy
from tests.broker_process import BrokerProcess
from trainer import actions
from trainer.accounts import LedgerBroken
from trainer.feed import Feed, FeedFailed
from trainer.feed_state import FeedState, fresh
from trainer.recovery import Recovered, fold
from trainer.step_input import StepInput
from trainer.step_log import Chain, Fenced, StepLog

PARTITIONS = 2
DEADLINE_S = 30.0


def v(number: int) -> Version:
    return Version(0, number)


def eventually(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.005)
    return found


def configured(staleness: dict[str, Any], **trainer: Any) -> Config:
    table = {"model": {"path": "m"}, "tasks": {"t": {"reward": "exact_match"}}}
    return parse({**table, "staleness": staleness, "trainer": trainer}, base_dir="/")


class World:
    """The topics, and the dataflow's side of them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        names = ("prompts", "trajectories", "dead-letters")
        ensure_topics(cluster, {**dict.fromkeys(names, PARTITIONS), "policy": 1, "steps": 1})
        self.producer = Producer(cluster)
        self.steps = StepLog(cluster)
        self.tail = PolicyTail(cluster)
        self.announced: list[Announcement] = []
        self.feeds: list[Feed] = []

    def close(self) -> None:
        for feed in self.feeds:
            feed.close()
        self.producer.close()
        self.steps.close()
        self.tail.close()

    def prompts(self, partition: int, count: int) -> None:
        for _ in range(count):
            self.producer.send(self.cluster.topic("prompts"), partition, b"{}")
        self.producer.flush()

    def feed(
        self,
        *,
        n: int = 1,
        batch_size: int = 2,
        state: FeedState | None = None,
        subject: StalenessPolicy[Any] | None = None,
        **more: Any,
    ) -> Feed:
        """A trainer starts: its begin, and its feed. `subject` in place of n-step-off."""
        subject, state = subject or policy("n-step-off", n=n), state or fresh(PARTITIONS)
        epoch = self.steps.begin(state.version.number)
        chain = self.steps.chain()
        recovered = Recovered(
            epoch=epoch,
            step=chain.step,
            version=chain.version,
            digest="",
            state=state,
            chain=chain,
        )
        config = configured({}, groups_per_step=batch_size)
        feed = Feed(
            self.cluster,
            subject,
            state=fold(config, self.cluster, subject, recovered),
            epoch=epoch,
            batch_size=batch_size,
            **more,
        )
        self.feeds.append(feed)
        return feed

    def gid(self, partition: int, offset: int) -> str:
        return str(Origin(self.cluster.topic("prompts"), partition, offset))

    def group(self, partition: int, offset: int, *numbers: int) -> Group:
        """Two rows, with two tokens of version 0, or one each of two versions."""
        group_id = self.gid(partition, offset)
        tokens = np.arange(3, dtype=np.int32) + offset
        first, last = (numbers[0], numbers[-1]) if numbers else (0, 0)
        rows = [
            Trajectory(
                trajectory_id=f"{group_id}/{k}",
                group_id=group_id,
                task="t",
                tokens=tokens,
                loss_mask=np.array([0, 1, 1], np.int8),
                logprobs=np.array([np.nan, -1, -1], np.float32),
                segments=(Segment(1, 2, 0, first), Segment(2, 3, 0, last)),
                origin=Origin("p", partition, offset),
                reward=float(k),
            )
            for k in range(2)
        ]
        return Group(
            group_id=group_id, prompt=Prompt(task="t", prompt="x"), trajectories=tuple(rows)
        )

    def write(
        self, partition: int, key: str, value: bytes, kind: str, crc: str | None = None
    ) -> int:
        return self.producer.append(
            self.cluster.topic("trajectories"),
            partition,
            value,
            key=key.encode(),
            headers={HEADER_KIND: kind, HEADER_CRC: crc or f"{checksum(value):08x}"},
        )

    def score(self, partition: int, offset: int, *numbers: int) -> None:
        """Like the dataflow, only once the prompt is granted."""
        eventually(lambda: self.limits()[partition] > offset)
        value = encode_group(self.group(partition, offset, *numbers))
        self.write(partition, self.gid(partition, offset), value, "group")

    def refuse(self, partition: int, offset: int, reason: str = "reward_failed") -> None:
        closed = Closed(group_id=self.gid(partition, offset), reason=reason)
        self.write(partition, closed.group_id, encode(closed), "closed")

    def limits(self) -> tuple[int, ...]:
        self.announced += [a for _, a in self.tail.catch_up()]
        return self.announced[-1].limits if self.announced else (0,) * PARTITIONS


@pytest.fixture
def world(cluster: Cluster) -> Iterator[World]:
    world = World(cluster)
    yield world
    world.close()


def taken(feed: Feed) -> StepInput:
    step = feed.take(DEADLINE_S)
    assert step is not None
    return step


def names(step: StepInput) -> list[str]:
    return [f"{r.partition}/{r.group_id.rsplit('/', 1)[1]}" for r in step.records]


def as_manifest(step: StepInput, epoch: int) -> Manifest:
    return Manifest(
        step=step.step,
        epoch=epoch,
        version=v(step.step),
        records=step.records,
        micro_batches=(),
        seed=0,
        digest_before="",
        digest="",
        dropped=step.dropped,
        metrics=actions.metrics(step.actions),
    )


def test_it_grants_takes_what_arrives_and_hands_out_a_full_step(world: World) -> None:
    world.prompts(0, 5)
    world.prompts(1, 5)
    feed = world.feed()
    assert feed.take(0.02) is None
    assert world.limits() == (0, 0), "nothing is granted before engines hold a version"
    announced = feed.published(v(0), "d0")
    assert (announced.version, announced.digest, announced.limits) == (v(0), "d0", (2, 2))
    assert announced.epoch == feed.epoch
    assert eventually(lambda: world.limits() == (2, 2))
    for partition, offset in ((1, 0), (0, 1), (0, 0)):
        world.score(partition, offset)
    step = taken(feed)
    assert (step.step, step.version, names(step)) == (1, v(0), ["0/0", "0/1"])
    assert [g.group_id for g in step.groups] == [r.group_id for r in step.records]
    assert step.groups[1].trajectories[1].reward == 1.0
    assert [r.crc for r in step.records] == [
        checksum(encode_group(world.group(0, offset))) for offset in (0, 1)
    ]
    assert step.snapshot.version == v(1)


def test_the_next_step_fills_while_one_trains_and_one_more_waits(world: World) -> None:
    world.prompts(0, 20)
    feed = world.feed(n=2, batch_size=1)
    feed.published(v(0), "d")
    for offset in range(3):
        world.score(0, offset)
    assert eventually(lambda: feed.status().get("waiting_for") == "trainer")
    assert feed.status()["open_step"] == 2, "one full step that nobody took is all there is"
    assert [taken(feed).step for _ in range(3)] == [1, 2, 3]
    assert eventually(lambda: feed.status().get("waiting_for") == "publish")
    assert feed.published(v(1), "d").limits == (4, 0)


def test_a_step_prepared_while_another_trains_keeps_the_bound_of_the_version_it_trains_at(
    world: World,
) -> None:
    world.prompts(0, 20)
    feed = world.feed(subject=policy("deadline", bound=1, lookahead=1), batch_size=1)
    feed.published(v(0), "d")
    for offset in range(2):
        world.score(0, offset)
    first = taken(feed)  # and it trains: version 1 is neither made nor published
    assert eventually(lambda: feed.status().get("waiting_for") == "trainer")
    assert feed.status()["open_step"] == 3
    assert world.limits() == (2, 0), "what started now would be two versions old in step 3"
    second = taken(feed)
    assert [(s.step, s.version, dict(s.ages)) for s in (first, second)] == [
        (1, v(0), {v(0): 0}),
        (2, v(1), {v(0): 1}),
    ]
    assert feed.published(v(1), "d").limits == (3, 0)


def test_prompts_that_come_later_are_granted_then(world: World) -> None:
    feed = world.feed(n=0, batch_size=2)
    assert feed.published(v(0), "d").limits == (0, 0)
    assert eventually(lambda: feed.status().get("waiting_for") == "prompts")
    world.prompts(1, 1)
    assert eventually(lambda: world.limits() == (0, 1))
    world.prompts(0, 5)
    assert eventually(lambda: world.limits() == (1, 1))


def test_a_closed_group_is_refunded_and_its_replacement_granted_at_once(world: World) -> None:
    world.prompts(0, 10)
    feed = world.feed(n=0, batch_size=2)
    feed.published(v(0), "d")
    world.refuse(0, 1)
    assert eventually(lambda: world.limits() == (3, 0))
    assert world.announced[-1].closed == (world.gid(0, 1),)
    world.score(0, 2)
    world.score(0, 0)
    assert names(taken(feed)) == ["0/0", "0/2"]
    assert eventually(lambda: feed.status().get("closed_by_reason") == {"reward_failed": 1})
    assert feed.status()["credit_balance"] == 0


def test_publishing_the_same_version_again_is_not_announced_again(world: World) -> None:
    world.prompts(0, 10)
    feed = world.feed()
    first = feed.published(v(0), "d")
    assert feed.published(v(0), "d") == first
    eventually(lambda: world.limits() == first.limits)
    assert len(world.announced) == 1


@pytest.mark.parametrize(
    ("kind", "value", "crc", "code"),
    [
        ("group", b"no arrow at all", None, "corrupt_record"),
        ("group", None, "00000000", "corrupt_record"),
        ("closed", b"{", None, "corrupt_record"),
        ("closed", b'{"kind":"begin"}', None, "corrupt_record"),
        ("novel", b"x", None, "unknown_record"),
    ],
)
def test_a_corrupt_record_is_a_dead_letter_and_its_group_closes(
    world: World, kind: str, value: bytes | None, crc: str | None, code: str
) -> None:
    world.prompts(0, 10)
    feed = world.feed(n=0, batch_size=1)
    feed.published(v(0), "d")
    whole = encode_group(world.group(0, 0))
    offset = world.write(0, world.gid(0, 0), value or whole, kind, crc)
    world.score(0, 1)
    assert names(taken(feed)) == ["0/1"]
    topic = world.cluster.topic("dead-letters")
    (letter,) = read_all(world.cluster, topic, range(PARTITIONS))
    assert letter.value == (value or whole)
    assert letter.headers["code"] == code
    assert letter.headers["origin"] == f"{world.cluster.topic('trajectories')}/0/{offset}"
    assert letter.headers["writer"] == "feed"
    assert eventually(lambda: feed.status().get("closed_by_reason") == {"malformed": 1})


def test_a_group_of_a_version_no_step_made_yet_is_dropped_and_counted(world: World) -> None:
    world.prompts(0, 10)
    feed = world.feed(n=0, batch_size=1)
    feed.published(v(0), "d")
    world.score(0, 0, 1)
    world.score(0, 1, 1000)
    world.score(0, 2)
    assert names(taken(feed)) == ["0/2"]
    assert feed.status()["closed_by_reason"] == {"malformed": 2}
    letters = read_all(world.cluster, world.cluster.topic("dead-letters"), range(PARTITIONS))
    assert [letter.headers["writer"] for letter in letters] == ["feed", "feed"]
    feed.published(v(1), "d1")
    world.score(0, 3, 1)
    assert names(taken(feed)) == ["0/3"], "step 1 makes version 1"


@pytest.mark.parametrize("corrupt", [True, False])
def test_a_refund_that_was_announced_costs_no_dead_letter(world: World, corrupt: bool) -> None:
    """The group's record comes after the feed that dropped it, and its refund, is gone."""
    world.prompts(0, 10)
    feed = world.feed(n=0, batch_size=1)
    refund = msgspec.structs.replace(feed.published(v(0), "d"), closed=(world.gid(0, 0),))
    feed.close()
    world.producer.append(world.cluster.topic("policy"), 0, encode(refund))
    record = b"no arrow at all" if corrupt else encode_group(world.group(0, 0))
    world.write(0, world.gid(0, 0), record, "group")
    again = world.feed(n=0, batch_size=1, untrainable=lambda group: "it has no token")
    status = eventually(again.status)
    assert status["closed_by_reason"] == {"malformed": 1}
    assert status["dropped_by_reason"] == ({} if corrupt else {"malformed": 1})
    world.write(0, world.gid(0, 0), record, "group")
    assert eventually(lambda: again.status()["duplicates"]) == 1
    letters = read_all(world.cluster, world.cluster.topic("dead-letters"), range(PARTITIONS))
    assert [letter.value for letter in letters] == [record]


def test_a_group_under_another_ones_key_is_corrupt(world: World) -> None:
    world.prompts(0, 10)
    feed = world.feed(n=0, batch_size=1)
    feed.published(v(0), "d")
    world.write(0, world.gid(0, 0), encode_group(world.group(0, 5)), "group")
    assert eventually(lambda: world.limits() == (2, 0))
    assert eventually(lambda: feed.status().get("closed") == 1)


def test_after_a_restart_the_policy_first_sees_what_ended_meanwhile(world: World) -> None:
    num = 600  # more than one poll returns
    world.prompts(0, num)
    feed = world.feed(n=1, batch_size=num // 2)
    feed.published(v(0), "d")
    feed.close()
    for offset in range(num):
        world.refuse(0, offset)
    seen: list[int] = []

    class Watched(NStepOff):
        def choose(self, state: Slots, ledger: Ledger) -> Choice:
            seen.append(len(ledger.running))
            return super().choose(state, ledger)

    again = world.feed(batch_size=num // 2, subject=Watched(n=1))
    again.published(v(0), "d")
    assert eventually(lambda: again.status()["closed"] == num)
    assert set(seen) == {0}


def test_after_a_crash_every_group_is_trained_once_from_the_checkpoint_on(world: World) -> None:
    """One checkpoint, one manifest after it, one step lost in memory, one group only arrived."""
    world.prompts(0, 20)
    feed = world.feed(n=3, batch_size=2)
    feed.published(v(0), "d")
    for offset in (0, 2, 1, 3, 4, 5, 7):
        world.score(0, offset)
    one, two, three = taken(feed), taken(feed), taken(feed)
    assert names(three) == ["0/4", "0/5"]
    for step in (one, two):
        world.steps.append(as_manifest(step, feed.epoch))
    feed.close()
    stored = encode(one.snapshot)

    state = msgspec.json.decode(stored, type=FeedState)
    assert [m.step for m in world.steps.manifests()] == [1, 2]
    again = world.feed(n=3, batch_size=2, state=state)
    step = taken(again)
    assert (step.step, names(step)) == (3, ["0/4", "0/5"])
    assert [g.group_id for g in step.groups] == [r.group_id for r in three.records]
    world.score(0, 6)
    assert names(taken(again)) == ["0/6", "0/7"]
    again.published(v(2), "d")
    assert eventually(lambda: again.status().get("granted") == 12)
    status = again.status()
    assert (status["trained"], status["duplicates"], status["credit_balance"]) == (8, 0, 0)


def test_a_group_that_had_arrived_is_read_again_and_dropped_unless_it_is_the_same_bytes(
    world: World,
) -> None:
    world.prompts(0, 20)
    feed = world.feed(n=1, batch_size=1)
    feed.published(v(0), "d")
    world.score(0, 1)
    eventually(lambda: feed.status().get("ready") == 1)
    world.score(0, 0)
    step = taken(feed)
    world.steps.append(as_manifest(step, feed.epoch))
    feed.close()
    (entry,) = step.snapshot.open
    assert entry.coordinate is not None
    again = world.feed(n=1, batch_size=1, state=step.snapshot)
    assert names(taken(again)) == ["0/1"]
    again.close()

    for altered, reason in (({"crc": 1}, "malformed"), ({"offset": 99}, "no_record")):
        other = msgspec.structs.replace(
            entry, coordinate=msgspec.structs.replace(entry.coordinate, **altered)
        )
        state = msgspec.structs.replace(step.snapshot, open=(other,))
        feed = world.feed(n=1, batch_size=1, state=state)
        status = eventually(feed.status)
        assert status["closed_by_reason"] == {reason: 1}
        assert (status["ready"], status["credit_balance"]) == (0, 0)
        feed.close()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"untrainable": lambda group: "spo takes rewards between 0 and 0.5"}, "malformed"),
        ({"no_signal": lambda group: True}, "filtered"),
    ],
    ids=["untrainable", "filtered"],
)
def test_a_group_that_had_arrived_is_asked_again_by_the_settings_of_now(
    world: World, settings: dict[str, Any], reason: str
) -> None:
    """But for what a manifest took."""
    world.prompts(0, 20)
    feed = world.feed(n=3, batch_size=1)
    feed.published(v(0), "d")
    for offset in (2, 1):
        world.score(0, offset)
    eventually(lambda: feed.status().get("ready") == 2)
    world.score(0, 0)
    one, two = taken(feed), taken(feed)
    assert (names(one), names(two)) == (["0/0"], ["0/1"])
    for step in (one, two):
        world.steps.append(as_manifest(step, feed.epoch))
    feed.close()
    assert len(one.snapshot.open) > 1
    again = world.feed(n=3, batch_size=1, state=one.snapshot, **settings)
    status = eventually(again.status)
    assert status["dropped_by_reason"] == {reason: 1}
    assert (status["trained"], status["ready"], status["credit_balance"]) == (2, 0, 0)
    assert again.published(v(2), "d").closed == (world.gid(0, 2),)
    letters = read_all(world.cluster, world.cluster.topic("dead-letters"), range(PARTITIONS))
    bad = [encode_group(world.group(0, 2))] if reason == "malformed" else []
    assert [letter.value for letter in letters] == bad


def test_terminals_that_retention_removed_unread_are_not_waited_for(world: World) -> None:
    world.prompts(0, 10)
    world.prompts(1, 10)
    feed = world.feed(n=1, batch_size=2)
    feed.published(v(0), "d")
    for offset in (0, 1):
        world.score(0, offset)
        world.score(1, offset)
    eventually(lambda: feed.status().get("granted") == 4)
    feed.close()
    delete_records(world.cluster, {"trajectories": {0: 1}})
    again = world.feed(n=1, batch_size=2)
    status = eventually(lambda: s if (s := again.status())["ready"] == 2 else None)
    assert status["closed_by_reason"] == {"no_record": 2}, "one is gone, and nobody knows which"
    assert (status["running"], status["credit_balance"]) == (0, 0)
    assert again.published(v(0), "d").limits == (3, 3), "their places are granted again"
    world.score(0, 2)
    world.score(1, 2)
    assert names(taken(again)) == ["0/2", "1/2"]
    assert names(taken(again)) == ["1/0", "1/1"]


def test_what_a_fork_excludes_is_dropped_and_what_it_gives_up_is_trained_again(
    world: World,
) -> None:
    world.prompts(0, 10)
    feed = world.feed(n=3, batch_size=1)
    feed.published(v(0), "d")
    for offset in range(4):
        world.score(0, offset)
    first, second = taken(feed), taken(feed)
    for step in (first, second):
        world.steps.append(as_manifest(step, feed.epoch))
    feed.close()
    fork = Fork(parent=0, number=0, reason="rollback")
    world.steps.begin(0, fork, "", [world.gid(0, 1), world.gid(0, 2)])
    again = world.feed(n=3, batch_size=1)
    step = taken(again)
    assert (step.step, step.version, names(step)) == (1, Version(1, 0), ["0/0"])
    assert step.dropped == (world.gid(0, 1), world.gid(0, 2))
    assert step.snapshot.lineage == {1: fork}
    assert again.published(Version(1, 0), "d").closed == step.dropped
    assert again.status()["closed_by_reason"] == {"filtered": 2}
    for offset in (4, 5):
        world.score(0, offset)
    assert [names(taken(again)) for _ in range(3)] == [["0/4"], ["0/5"], ["0/3"]]


def test_a_group_whose_tokens_span_a_fork_is_as_old_as_its_stalest_token(world: World) -> None:
    """n = 2 and a fork at step 1: at (1, 1) tokens of (0, 4) are 4 - 1 = 3 old, though (0, 1) is
    the lower version and no step old."""
    world.prompts(0, 10)
    feed = world.feed(n=2, batch_size=1)
    feed.published(v(0), "d")
    world.score(0, 0)
    world.steps.append(as_manifest(taken(feed), feed.epoch))
    feed.published(v(1), "d")
    feed.close()
    world.steps.begin(0, Fork(parent=0, number=1, reason="rollback"), "")
    again = world.feed(n=2, batch_size=1)
    for offset, newest in ((1, 4), (2, 2)):
        group = world.group(0, offset)
        rows = tuple(
            dataclasses.replace(t, segments=(Segment(1, 2, 0, 1), Segment(2, 3, 0, newest)))
            for t in group.trajectories
        )
        value = encode_group(dataclasses.replace(group, trajectories=rows))
        world.write(0, group.group_id, value, "group")
    eventually(lambda: again.status()["closed_by_reason"] == {"stale": 1})
    again.published(Version(1, 1), "d")
    world.score(0, 4)
    assert [names(taken(again)) for _ in range(2)] == [["0/4"], ["0/2"]]


def test_a_feed_whose_trainer_was_fenced_stops(world: World) -> None:
    world.prompts(0, 20)
    old = world.feed(n=0, batch_size=1)
    old.published(v(0), "d")
    newer = world.feed(n=0, batch_size=1)
    with pytest.raises(FeedFailed, match="a newer trainer began"):
        old.published(v(1), "d")
    with pytest.raises(FeedFailed) as caught:
        old.take(DEADLINE_S)
    assert isinstance(caught.value.__cause__, Fenced)
    assert newer.published(v(0), "d").limits == (1, 0), "what the old one granted stays granted"
    assert eventually(lambda: newer.status().get("granted") == 1)


def test_what_a_fenced_feed_wrote_last_does_not_count(world: World) -> None:
    world.prompts(0, 20)
    first = world.feed(n=0, batch_size=1)
    first.published(v(0), "d")
    first.close()
    zombie = Announcement(epoch=first.epoch, version=v(0), digest="d", limits=(9, 0))
    newer = StepLog(world.cluster)
    newer.begin(0)
    newer.close()
    world.producer.append(world.cluster.topic("policy"), 0, encode(zombie))
    feed = world.feed(n=0, batch_size=1)
    assert feed.published(v(0), "d").limits == (1, 0)


def test_an_idle_feed_notices_that_its_trainer_was_fenced(world: World) -> None:
    feed = world.feed()
    eventually(feed.status)
    newer = StepLog(world.cluster)
    epoch = newer.begin(0)
    newer.close()
    with pytest.raises(FeedFailed, match=f"a newer trainer began epoch {epoch}"):
        feed.take(DEADLINE_S)


def test_a_trainer_without_its_begin_in_policy_says_so(world: World) -> None:
    recovered = Recovered(
        epoch=5, step=0, version=v(0), digest="", state=fresh(PARTITIONS), chain=Chain()
    )
    with pytest.raises(LedgerBroken, match="policy holds no begin of epoch 5"):
        fold(configured({}), world.cluster, policy("sync"), recovered)


def test_it_rides_out_a_broker_that_is_killed_and_comes_back(
    own_broker: BrokerProcess, own_cluster: Cluster
) -> None:
    world = World(own_cluster)
    try:
        world.prompts(0, 10)
        feed = world.feed(n=0, batch_size=1)
        feed.published(v(0), "d")
        own_broker.restart()
        world.refuse(0, 0)
        world.score(0, 1)
        assert names(taken(feed)) == ["0/1"]
        assert feed.published(v(1), "d").limits == (3, 0)
    finally:
        world.close()


def test_a_closed_feed_answers_nobody(world: World) -> None:
    feed = world.feed()
    feed.close()
    with pytest.raises(FeedFailed, match="the feed is closed"):
        feed.take(0.0)
    with pytest.raises(FeedFailed, match="the feed is closed"):
        feed.published(v(0), "d")


def test_the_lag_is_what_was_not_read_yet(world: World) -> None:
    world.prompts(0, 3)
    feed = world.feed()
    feed.published(v(0), "d")
    world.score(0, 0)
    assert eventually(lambda: feed.status().get("ready") == 1)
    assert feed.status()["lag"] == {0: 0, 1: 0}
