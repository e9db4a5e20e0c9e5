"""Groups without a signal: told by their own advantages, dropped as they arrive, on a real broker
and in the simulated run of the ledger."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from connectors.config import ConfigError, Trainer, parse
from connectors.kafka.client import Cluster, read_all
from connectors.records import Group
from tests.trainer.groups import trainable_group
from tests.trainer.ledger_acts import act
from tests.trainer.presets import CASES, Case
from tests.trainer.test_feed import PARTITIONS, World, as_manifest, eventually, names, taken, v
from trainer.actions import FILTERED, drop_reasons
from trainer.credit import no_signal
from trainer.intake import DROUGHT_STEPS, Drought


# ------------------------------------------------------------------------------------ the signal
def rewarded(*rewards: float) -> Group:
    """One sample of five trained tokens each."""
    first = trainable_group("p/0/0", v(0), seed=0)
    row = first.trajectories[0]
    rows = (
        replace(row, trajectory_id=f"p/0/0/{k}", reward=np.float32(reward).item())
        for k, reward in enumerate(rewards)
    )
    return replace(first, trajectories=tuple(rows))


def filtering(**settings: Any) -> Trainer:
    return Trainer(filter_groups=True, **settings)


@pytest.mark.parametrize(
    ("settings", "rewards", "filtered"),
    [
        ({}, (0.1, 0.1, 0.1), True),  # whose mean is not 0.1 in floating point
        ({}, (0.0, 0.0, 1.0), False),
        ({"advantage": "grpo-passk"}, (1.0, 1.0, 0.0), True),  # the best has no lead
        ({"advantage": "grpo-passk"}, (1.0, 0.0, 0.0), False),
        ({"advantage": "maxrl"}, (0.0, 0.0), True),
        ({"advantage": "opo"}, (0.5,), False),  # alone it keeps its reward
        ({"advantage": "opo"}, (0.0,), True),
        ({"advantage": "gpg"}, (2.0, 2.0), True),
    ],
)
def test_a_group_carries_no_signal_where_all_its_advantages_are_zero(
    settings: dict[str, Any], rewards: tuple[float, ...], filtered: bool
) -> None:
    assert no_signal(rewarded(*rewards), filtering(**settings)) is filtered
    assert not no_signal(rewarded(*rewards), Trainer(**settings)), "unless it is asked for"


def test_a_penalty_for_length_is_a_signal_and_tokens_nobody_trains_are_none() -> None:
    equal = rewarded(1.0, 1.0)
    short, long = equal.trajectories
    masked = replace(long, loss_mask=np.array([0, 0, 0, 1, 0, 0, 0, 0], np.int8))
    uneven = replace(equal, trajectories=(short, masked))
    overlong = {"max_length": 5, "buffer": 3}
    assert not no_signal(uneven, filtering(overlong=overlong))
    assert no_signal(uneven, filtering())
    none = (
        replace(t, loss_mask=np.zeros(8, np.int8), reward=float(k))
        for k, t in enumerate((short, long))
    )
    assert no_signal(replace(equal, trajectories=tuple(none)), filtering())


@pytest.mark.parametrize("name", ["reinforce++", "reinforce++-baseline", "spo"])
def test_an_advantage_relative_to_the_step_filters_nothing_so_it_is_refused(name: str) -> None:
    table: dict[str, Any] = {"model": {"path": "m"}, "tasks": {"t": {"reward": "exact_match"}}}
    table["trainer"] = {"advantage": name, "filter_groups": True}
    said = f"trainer.filter_groups: the advantages of {name} are relative to the step"
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse(table, base_dir="/")


def test_a_drought_is_said_once_and_again_after_a_group_with_a_signal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drought = Drought(3)
    for letter in "ffsffffsfff":
        drought.saw(letter == "f")
    said = [record.getMessage() for record in caplog.records]
    assert [" ".join(text.split()[:5]) for text in said] == [
        "the last 3 groups were", "a group carries a signal", "the last 3 groups were",
    ]  # fmt: skip
    assert "after 4 filtered ones" in said[1]


# --------------------------------------------------------------------------------------- the feed
@pytest.fixture
def world(cluster: Cluster) -> Iterator[World]:
    world = World(cluster)
    yield world
    world.close()


def is_odd(group: Group) -> bool:
    """Of the feed's groups, by the offset of the prompt."""
    return int(group.group_id.rsplit("/", 1)[1]) % 2 == 1


def test_a_filtered_group_is_refunded_counted_and_listed_and_no_dead_letter(world: World) -> None:
    world.prompts(0, 10)
    feed = world.feed(n=0, batch_size=2, no_signal=is_odd)
    feed.published(v(0), "d")
    world.score(0, 1, 0)
    assert eventually(lambda: world.limits() == (3, 0)), "a replacement is granted at once"
    assert world.announced[-1].closed == (world.gid(0, 1),)
    world.score(0, 0)
    world.score(0, 2)
    step = taken(feed)
    assert names(step) == ["0/0", "0/2"]
    assert (step.dropped, step.actions) == ((world.gid(0, 1),), {"drops/filtered": 1})
    assert step.mean_length == 2.0, "of all three groups' samples, two tokens each"
    status = feed.status()
    assert status["dropped_by_reason"] == status["closed_by_reason"] == {"filtered": 1}
    assert status["credit_balance"] == 0
    assert read_all(world.cluster, world.cluster.topic("dead-letters"), range(PARTITIONS)) == []


@pytest.mark.parametrize("listed", [True, False])
def test_a_feed_after_a_crash_filters_what_the_one_before_it_did(
    world: World, listed: bool
) -> None:
    """0/1 was announced as refunded; a manifest lists it, or the step died with the trainer."""
    world.prompts(0, 10)
    feed = world.feed(n=0, batch_size=2, no_signal=is_odd)
    feed.published(v(0), "d")
    for offset in (1, 0, 2):
        world.score(0, offset)
    step = taken(feed)
    eventually(lambda: world.limits() == (3, 0))
    if listed:
        world.steps.append(as_manifest(step, feed.epoch))
    feed.close()
    again = world.feed(n=0, batch_size=2, no_signal=is_odd)
    if not listed:
        second = taken(again)
        assert (second.records, second.dropped) == (step.records, step.dropped)
        assert second.actions == step.actions
    status = eventually(again.status)
    assert status["dropped_by_reason"] == {"filtered": 1}
    assert (status["trained"], status["closed"], status["duplicates"]) == (2, 1, 0)
    again.published(v(1), "d1")
    for offset in (4, 3, 5, 6):
        world.score(0, offset, 1)
    third = taken(again)
    assert (names(third), third.dropped) == (["0/4", "0/6"], (world.gid(0, 3), world.gid(0, 5)))


def test_a_run_that_filters_everything_says_so(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "trainer.intake")
    world.prompts(0, 3 * DROUGHT_STEPS)
    feed = world.feed(n=0, batch_size=1, no_signal=lambda group: True)
    feed.published(v(0), "d")
    for offset in range(2 * DROUGHT_STEPS):
        world.score(0, offset)
    eventually(lambda: feed.status()["closed"] == 2 * DROUGHT_STEPS)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"the last {DROUGHT_STEPS} groups were all filtered")


# ------------------------------------------------------------------------------------- the ledger
@pytest.mark.parametrize("case", CASES, ids=str)
def test_filtering_keeps_what_the_ledger_promises_under_every_policy(case: Case) -> None:
    """The world asserts the books, the bound, and in `drain` that the run goes on. What can be
    filtered is never trained; where nothing is rolled back, `filtered` is why it was dropped."""
    num_filtered = 0
    for seed in range(2):
        chance = random.Random(seed)
        world = case.world(chance.randint(1, 3), chance.randint(1, 2))
        world.no_signal = lambda group_id: hash_of(group_id) % 3 == 0
        world.ends[0] += 60
        for _ in range(300):
            act(world, chance, with_rollbacks=seed == 1)
            world.check()
        world.drain()
        manifests = world.chain.manifests
        assert not any(world.no_signal(r.group_id) for m in manifests for r in m.records)
        dropped = {g: why for m in manifests for g, why in drop_reasons(m).items()}
        dropped |= world.core.accounts.dropped
        filtered = {g for g, why in dropped.items() if why == FILTERED}
        num_filtered += len(filtered)
        if seed == 0:
            assert all(map(world.no_signal, filtered))
    assert num_filtered


def hash_of(group_id: str) -> int:
    partition, offset = map(int, group_id.rsplit("/", 2)[1:])
    return 7 * partition + 5 * offset
