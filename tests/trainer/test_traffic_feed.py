"""Live traffic through the feed's thread on a real broker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from connectors.arrow import checksum, encode_group
from connectors.config import Config, ConfigError, parse
from connectors.kafka.client import Cluster, read_all
from connectors.records import (
    HEADER_CRC,
    HEADER_KIND,
    Closed,
    Fork,
    Group,
    Manifest,
    Origin,
    Version,
    encode,
)
from tests.trainer.session_groups import session_group
from tests.trainer.test_feed import PARTITIONS, World, as_manifest, eventually, taken, v
from trainer.feed import Feed
from trainer.feed_state import FeedState, fresh
from trainer.recovery import Recovered, fold
from trainer.staleness import (
    allowance_of,
    configured_policy,
    granted_per_step,
    shape_of,
)
from trainer.step_input import StepInput
from trainer.traffic import bound_of, labels_of

SECTION = {"share": 1.0, "bound": 2}


def configured(
    nearline: dict[str, Any] | None = SECTION, groups_per_step: int = 2, **staleness: Any
) -> Config:
    table: dict[str, Any] = {
        "model": {"path": "m"},
        "kafka": {"partitions": PARTITIONS},
        "tasks": {"t": {"reward": "exact_match"}},
        "trainer": {"groups_per_step": groups_per_step, "advantage": "spo"},
        "staleness": staleness or {"policy": "n-step-off", "lookahead": 0},
    }
    if nearline is not None:
        table["nearline"] = nearline
    return parse(table, base_dir="/")


class TrafficWorld(World):
    """`config` says what live traffic has."""

    config = configured()

    def start(self, state: FeedState | None = None, **more: Any) -> Feed:
        """A trainer starts: its begin, and its feed."""
        state = state or fresh(PARTITIONS)
        policy = configured_policy(self.config)
        epoch = self.steps.begin(state.version.number)
        chain = self.steps.chain()
        recovered = Recovered(
            epoch=epoch, step=chain.step, version=chain.version, digest="", state=state, chain=chain
        )
        feed = Feed(
            self.cluster,
            policy,
            state=fold(self.config, self.cluster, policy, recovered),
            epoch=epoch,
            batch_size=granted_per_step(self.config),
            allowance=allowance_of(self.config, self.cluster),
            **more,
        )
        self.feeds.append(feed)
        return feed

    def call(self, partition: int, offset: int) -> str:
        return str(Origin(self.cluster.topic("agent-traffic"), partition, offset))

    def session(self, partition: int, offset: int, number: int | None = 0, **more: Any) -> Group:
        """Its group is in `trajectories`."""
        version = None if number is None else v(number)
        group = session_group(self.call(partition, offset), version, **more)
        self.write(partition, group.group_id, encode_group(group), "group")
        return group

    def close_session(self, partition: int, offset: int, reason: str) -> None:
        closed = Closed(group_id=self.call(partition, offset), reason=reason)
        self.write(partition, closed.group_id, encode(closed), "closed")

    def letters(self) -> list[bytes]:
        topic = self.cluster.topic("dead-letters")
        return [letter.value for letter in read_all(self.cluster, topic, range(PARTITIONS))]


@pytest.fixture
def world(cluster: Cluster) -> Iterator[TrafficWorld]:
    made = TrafficWorld(cluster)
    yield made
    made.close()


def offsets(step: StepInput) -> list[int]:
    return [int(record.group_id.rsplit("/", 1)[1]) for record in step.records]


def made(step: StepInput, feed: Feed) -> Manifest:
    return msgspec.structs.replace(as_manifest(step, feed.epoch), settings=dict(step.settings))


def test_live_traffic_alone_fills_steps_in_the_order_it_came_and_no_prompt_is_granted(
    world: TrafficWorld,
) -> None:
    world.prompts(0, 10)
    feed = world.start()
    assert feed.published(v(0), "d").limits == (0, 0)
    assert eventually(lambda: feed.status()["waiting_for"] == "traffic")
    groups = [world.session(0, offset, num_branches=2) for offset in (4, 9, 11)]
    step = taken(feed)
    assert (step.version, offsets(step)) == (v(0), [4, 9])
    assert [g.group_id for g in step.groups] == [g.group_id for g in groups[:2]]
    assert [t.trajectory_id for t in step.groups[0].trajectories] == [
        f"{groups[0].group_id}/0", f"{groups[0].group_id}/0/1",
    ]  # fmt: skip
    assert (bound_of(step.settings), labels_of(step.settings)) == (2, (0.0, 1.0))
    assert eventually(lambda: feed.status()["queued"] == 1)
    assert feed.published(v(1), "d").limits == (0, 0)


def test_what_cannot_be_trained_within_its_own_bound_is_dropped_counted_and_listed(
    world: TrafficWorld,
) -> None:
    """Two a step and bound 2: six fit; the policy's own bound is 0."""
    for offset in range(8):
        world.session(0, offset)
    feed = world.start()
    feed.published(v(0), "d")
    first, *others = (taken(feed) for _ in range(3))
    assert [offsets(step) for step in (first, *others)] == [[0, 1], [2, 3], [4, 5]]
    assert first.dropped == (world.call(0, 6), world.call(0, 7))
    assert first.actions == {"traffic/stale": 2}
    status = feed.status()
    assert status["traffic"]["trained"] == 6
    assert status["traffic"]["dropped_by_reason"] == {"stale": 2}
    world.session(1, 0, 1)
    world.session(1, 1, 3)
    step = taken(feed)
    assert (offsets(step), dict(step.ages)) == ([0, 1], {v(1): 2, v(3): 0})
    assert step.dropped == ()


def test_a_share_of_the_step_is_live_traffics_and_never_waited_for(world: TrafficWorld) -> None:
    world.config = configured({"share": 0.5}, groups_per_step=4)
    world.prompts(0, 10)
    feed = world.start()
    assert feed.published(v(0), "d").limits == (2, 0), "two of the four"
    for offset in range(3):
        world.session(1, offset)
    world.score(0, 0)
    world.score(0, 1)
    step = taken(feed)
    assert [r.group_id for r in step.records] == [
        world.gid(0, 0), world.gid(0, 1), world.call(1, 0), world.call(1, 1),
    ]  # fmt: skip
    assert feed.published(v(1), "d").limits == (4, 0)
    world.score(0, 2, 1)
    world.score(0, 3, 1)
    assert len(taken(feed).records) == 3


def test_tokens_of_a_version_no_step_made_and_what_cannot_be_trained_are_dead_letters(
    world: TrafficWorld,
) -> None:
    feed = world.start(untrainable=lambda g: "no" if g.trajectories[0].reward < 0 else None)
    feed.published(v(0), "d")
    early, bad = world.session(0, 0, 7), world.session(0, 1, reward=-1.0)
    for offset in (2, 3):
        world.session(0, offset)
    step = taken(feed)
    assert (offsets(step), step.actions) == ([2, 3], {"traffic/malformed": 2})
    assert world.letters() == [encode_group(early), encode_group(bad)]


def test_a_corrupt_terminal_closes_its_session_and_closed_ones_are_counted_by_reason(
    world: TrafficWorld,
) -> None:
    feed = world.start()
    feed.published(v(0), "d")
    world.write(0, world.call(0, 0), b"no arrow at all", "group")
    world.close_session(0, 1, "no_label")
    world.close_session(0, 2, "no_label")
    world.session(0, 1)
    traffic = eventually(lambda: t if (t := feed.status()["traffic"])["duplicates"] else None)
    assert traffic["closed_by_reason"] == {"malformed": 1, "no_label": 2}
    assert world.letters() == [b"no arrow at all"]
    assert feed.status()["ungranted"] == 0


def test_after_a_crash_each_session_is_trained_once_from_the_checkpoint_on(
    world: TrafficWorld,
) -> None:
    """One checkpoint, one manifest after it, one step that died with the trainer."""
    feed = world.start()
    feed.published(v(0), "d")
    for offset in range(5):
        world.session(offset % 2, offset)
    eventually(lambda: feed.status()["traffic"]["trained"] == 2)
    one, two = taken(feed), taken(feed)
    world.session(0, 10, 1)
    three = taken(feed)
    for step in (one, two):
        world.steps.append(made(step, feed))
    feed.close()
    state = msgspec.json.decode(encode(one.snapshot), type=FeedState)
    again = world.start(state)
    step = taken(again)
    assert (step.step, step.records) == (3, three.records)
    assert [g.group_id for g in step.groups] == [r.group_id for r in three.records]
    status = again.status()["traffic"]
    assert (status["trained"], status["duplicates"], status["dropped_by_reason"]) == (6, 0, {})


def test_a_queued_session_is_read_again_and_dropped_where_it_is_gone_or_too_old_now(
    world: TrafficWorld,
) -> None:
    world.config = configured({"share": 1.0, "bound": 5})
    for offset in range(6):
        world.session(0, offset)
    feed = world.start()
    one = taken(feed)
    world.steps.append(made(one, feed))
    eventually(lambda: feed.status()["open_step"] == 3)
    feed.close()
    queue = one.snapshot.traffic.queue
    assert len(queue) == 4
    gone = msgspec.structs.replace(
        queue[0], coordinate=msgspec.structs.replace(queue[0].coordinate, offset=99)
    )
    other = msgspec.structs.replace(
        queue[1], coordinate=msgspec.structs.replace(queue[1].coordinate, crc=1)
    )
    traffic = msgspec.structs.replace(one.snapshot.traffic, queue=(gone, other, *queue[2:]))
    world.config = configured({"share": 1.0, "bound": 1})
    again = world.start(msgspec.structs.replace(one.snapshot, traffic=traffic))
    step = taken(again)
    assert offsets(step) == [4, 5]
    assert step.actions == {"traffic/no_record": 1, "traffic/malformed": 1}
    again.close()
    world.config = configured({"share": 1.0, "bound": 0})
    late = world.start(one.snapshot)
    found = eventually(lambda: late.status()["traffic"]["dropped_by_reason"])
    assert found == {"stale": 4}


def test_text_waits_its_turn_at_any_age(world: TrafficWorld) -> None:
    world.config = configured({"share": 1.0, "bound": 0})
    feed = world.start()
    feed.published(v(0), "d")
    for offset in range(8):
        world.session(0, offset, None)
    assert [offsets(taken(feed)) for _ in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_long_backlog_waits_in_the_topic_and_none_of_it_is_lost(
    world: TrafficWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.intake.QUEUED_STEPS", 2)
    num = 1200  # more than two polls return
    for offset in range(num):
        group = session_group(world.call(0, offset), None)
        value = encode_group(group)
        headers = {HEADER_KIND: "group", HEADER_CRC: f"{checksum(value):08x}"}
        topic, key = world.cluster.topic("trajectories"), group.group_id.encode()
        world.producer.send(topic, 0, value, key=key, headers=headers)
    world.producer.flush()
    feed = world.start()
    assert eventually(lambda: feed.status()["waiting_for"] == "trainer")
    for _ in range(3):
        assert feed.status()["lag"][0] > num // 4, "it does not read on while nobody takes a step"
    assert [o for _ in range(num // 2) for o in offsets(taken(feed))] == list(range(num))


@pytest.mark.parametrize(
    ("share", "groups_per_step", "granted"),
    [(1.0, 8, 0), (0.5, 8, 4), (0.01, 8, 7), (0.99, 8, 0), (0.5, 1, 0), (0.3, 10, 7)],
)
def test_what_is_left_of_a_step_is_the_policys(
    share: float, groups_per_step: int, granted: int
) -> None:
    config = configured({"share": share}, groups_per_step=groups_per_step)
    assert granted_per_step(config) == granted
    assert shape_of(config).batch_size == max(1, granted)
    assert granted_per_step(configured(None, groups_per_step=groups_per_step)) == groups_per_step


@pytest.mark.parametrize("at_deadline", ["mask", "reweight"])
def test_weights_by_version_do_not_go_with_a_second_bound(at_deadline: str) -> None:
    config = configured(policy="deadline", at_deadline=at_deadline)
    with pytest.raises(ConfigError, match=f"at_deadline: '{at_deadline}' weighs .*nearline.bound"):
        configured_policy(config)
    configured_policy(config.model_copy(update={"nearline": None}))


def test_versions_are_those_of_the_lineage(world: TrafficWorld) -> None:
    """A session of a version that a rollback gave up is as far as the way back and forth."""
    feed = world.start()
    feed.published(v(0), "d")
    for offset in range(4):
        world.session(0, offset)
    for _ in range(2):
        world.steps.append(made(taken(feed), feed))
    feed.close()
    world.steps.begin(0, Fork(parent=0, number=1, reason="rollback"), "")
    again = world.start()
    again.published(Version(1, 1), "d")
    world.session(1, 0, 2)
    step = taken(again)
    assert dict(step.ages) == {v(0): 1}, "2 and 3, which the rollback gave back, go first"
    world.session(1, 1, 2)
    assert dict(taken(again).ages) == {v(2): 2}
