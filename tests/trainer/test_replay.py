"""Replay across forks, and of records that are not what was trained."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from connectors.arrow import encode_group
from connectors.kafka.client import Cluster
from connectors.kafka.locate import topics
from connectors.kafka.topics import ensure_topics
from connectors.records import Fork
from connectors.run_dir import RunDir
from tests.trainer.test_recovery import B, OtherMachine, World
from trainer.replay import NothingToReplay, Replay, difference_lines, replay
from trainer.step_log import StepLog


class Trained(World):
    def __init__(self, cluster: Cluster, model: Path, folder: Path) -> None:
        super().__init__(cluster, model, folder)
        self.run_dir = RunDir(folder)

    def replay(self, *, until: int | None = None) -> Replay:
        """On this machine."""
        self.stop()
        return replay(self.cluster, self.run_dir, self.config, until=until)


@pytest.fixture
def world(cluster: Cluster, tiny_model_path: Path, tmp_path: Path) -> Iterator[Trained]:
    made = Trained(cluster, tiny_model_path, tmp_path)
    yield made
    made.stop()
    made.producer.close()


def test_a_rollback_s_line_is_replayed_and_not_what_it_gave_up(world: Trained) -> None:
    held = world.train(world.start(), 1)
    world.train(dataclasses.replace(held), 2)
    world.steps.begin(1, Fork(parent=0, number=1, reason="rollback"), held.digest)
    world.train(world.start(), 3)
    done = world.replay()
    assert (done.steps, done.last, done.equal) == (4, 4, True)


def test_replay_goes_on_from_the_checkpoint_of_a_rebuild_made_elsewhere(world: Trained) -> None:
    world.train(world.start(), 2)
    world.save(world.start(OtherMachine))
    world.train(world.start(), 2)  # back here, from that checkpoint
    assert world.replay().equal
    elsewhere = world.start()
    world.stop()
    shutil.rmtree(world.run_dir.checkpoints)
    with pytest.raises(NothingToReplay, match=r"steps up to 2 come out .*--to 2"):
        world.replay()
    assert world.replay(until=2).equal
    assert elsewhere.version.incarnation == 1


def test_steps_of_several_optimizer_steps_are_replayed_and_recovered(world: Trained) -> None:
    settings = {"num_minibatches": B, "proximal": "recompute", "kl_coefficient": 0.1, "kl": "k2"}
    trainer = world.config.trainer
    several = trainer.model_copy(update=settings)
    world.config = world.config.model_copy(update={"trainer": several})
    world.train(world.start(), 2)
    world.save(world.start())
    held = world.train(world.start(), 2)
    assert all(len(manifest.micro_batches) == B for manifest in world.steps.manifests())
    found = world.start()
    assert (found.step, found.digest, found.rebuilt) == (4, held.digest, False)
    world.config = world.config.model_copy(update={"trainer": trainer})  # now another one's
    assert (world.replay().steps, world.replay().equal) == (4, True)


def test_a_step_of_another_machine_differs_here_and_is_named(world: Trained) -> None:
    world.train(world.start(), 2)
    found = world.start(OtherMachine)
    world.save(found)
    world.train(found, 2)
    done = world.replay()
    assert not done.equal
    assert done.first_difference == {"step": 3, "record": None}
    assert "device other then, cpu now" in difference_lines(done)[0]


def test_a_record_that_is_another_one_but_trains_the_same_is_named_all_the_same(
    world: Trained,
) -> None:
    world.train(world.start(), 2)
    first, second = world.steps.manifests()
    records = list(second.records)
    records[1] = msgspec.structs.replace(records[1], crc=records[1].crc ^ 1)
    world.stop()
    cluster = dataclasses.replace(world.cluster, namespace=world.cluster.namespace + "copy.")
    ensure_topics(cluster, topics(1))
    steps = StepLog(cluster)
    steps.begin(0)
    for manifest in (first, msgspec.structs.replace(second, records=tuple(records))):
        steps.append(msgspec.structs.replace(manifest, epoch=0))
    steps.close()
    for offset in range(2 * B):
        value = encode_group(world.group(offset))
        world.producer.append(cluster.topic("trajectories"), 0, value)
    original, world.cluster = world.cluster, cluster
    done = world.replay()
    assert done.differs is None
    assert not done.equal
    assert done.first_difference == {
        "step": None,
        "record": "trajectories/0/3",
        "group_id": f"{original.topic('prompts')}/0/3",
        "trained_in": 2,
        "crc_trained": f"{records[1].crc:08x}",
        "crc": f"{records[1].crc ^ 1:08x}",
    }
    assert "trajectories/0/3" in difference_lines(done)[0]
