"""The audit of simulated runs with crashes, rebuilds and rollbacks, in any interleaving: it finds
nothing, at no moment, in the whole log or from any checkpoint on."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.records import Begin, Closed, PolicyRecord, Version, decode_as
from deploy.audit import audit
from deploy.findings import Audit, History, Terminal
from operators.staleness import policy
from tests.trainer.ledger_acts import act
from tests.trainer.ledger_world import TOPIC, World
from tests.trainer.presets import CASES, Case
from trainer.checkpoint_meta import CheckpointMeta
from trainer.feed_state import FeedState


def audited(
    world: World, base: CheckpointMeta | None = None, traffic_topics: tuple[str, ...] = ()
) -> Audit:
    feed = base.feed if base else None
    lanes = [
        [terminal(world, partition, offset) for offset in range(len(log))]
        for partition, log in enumerate(world.trajectories)
    ]
    arrived = [e.coordinate for e in feed.open if e.coordinate is not None] if feed else []
    arrived += [queued.coordinate for queued in feed.traffic.queue] if feed else []
    return audit(
        History(
            prompts_topic=TOPIC,
            steps=list(enumerate(world.steps_log)),
            policy=[(offset, spoken(world, offset)) for offset in range(len(world.policy_log))],
            terminals={p: lane[feed.read[p] if feed else 0 :] for p, lane in enumerate(lanes)},
            rollouts=lambda wanted, since: [],
            strategy=world.make(),
            batch_size=world.batch_size,
            group_size=world.group_size,
            patience_s=0.0,
            prompt_ends=dict(enumerate(world.ends)),
            base=base,
            arrived=[lanes[at.partition][at.offset] for at in arrived],
            traffic_topics=traffic_topics,
        )
    )


def terminal(world: World, partition: int, offset: int) -> Terminal:
    record = world.trajectories[partition][offset]
    if isinstance(record, Closed):
        return Terminal(
            group_id=record.group_id, partition=partition, offset=offset, crc=1, kind="closed"
        )
    at = record.at
    return Terminal(
        group_id=at.group_id, partition=partition, offset=offset, crc=at.crc, kind="group",
        versions=frozenset[Version]({record.oldest, record.newest}),
    )  # fmt: skip


def spoken(world: World, offset: int) -> PolicyRecord:
    said = world.policy_log[offset]
    if isinstance(said, int):
        return Begin(epoch=said, writer="w", resumed_step=0, started_at=0.0)
    return msgspec.structs.replace(said, digest="")  # as the simulated steps have none


def bases(world: World) -> list[CheckpointMeta]:
    """The checkpoints that are on the chain, as the trainer that trained their step saved them."""
    chain, found = world.chain, []
    for data in world.checkpoints:
        feed = decode_as(data, FeedState)
        step = feed.version.number
        manifest = chain.manifest(step)
        if manifest is not None and chain.version_at(step) == feed.version == manifest.version:
            found.append(
                CheckpointMeta(
                    step=step, version=feed.version, digest="", epoch=manifest.epoch, feed=feed
                )
            )
    return found


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 3),
    batch_size=st.integers(1, 4),
    num_partitions=st.integers(1, 3),
    with_rollbacks=st.booleans(),
    acts=st.lists(st.integers(0, 2**20), min_size=200, max_size=200),
)
def test_a_run_that_went_right_passes_at_every_moment_and_from_every_checkpoint(
    n: int, batch_size: int, num_partitions: int, with_rollbacks: bool, acts: list[int]
) -> None:
    world = World(lambda: policy("n-step-off", n=n), batch_size, num_partitions)
    for done, seed in enumerate(acts):
        act(world, random.Random(seed), with_rollbacks=with_rollbacks)
        if done % 40 == 39:
            check(world)
    world.drain()
    check(world)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_right_run_passes_under_every_policy(case: Case) -> None:
    """Its grants are checked where they follow from the log."""
    for seed in range(2):
        chance = random.Random(seed)
        world = case.world(batch_size=3, num_partitions=2)
        for _ in range(300):
            act(world, chance, with_rollbacks=seed == 1)
        check(world)
        world.drain()
        check(world)
        assert audited(world).grants_checked == world.make().auditable


def check(world: World) -> None:
    whole = audited(world)
    assert whole.ok, whole
    for base in bases(world):
        found = audited(world, base)
        assert found.ok, (base, found)
        assert counts(found) == counts(whole)


def counts(found: Audit) -> list[int]:
    """A group that was dropped and then closed is one or the other, by what was read first."""
    groups = found.groups
    untrained = groups["closed"] + groups["dropped"]
    return [groups["granted"], groups["trained"], untrained, groups["open"]]
