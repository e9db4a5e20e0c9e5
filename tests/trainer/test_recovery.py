"""Recovery on a real engine, log and store, from a log written by hand: what is executed again,
what opens a rebuild, what is refused, and what it says to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from connectors.arrow import checksum, encode_group
from connectors.config import Config, parse
from connectors.kafka.client import Cluster, Producer
from connectors.kafka.locate import topics
from connectors.kafka.topics import delete_records, ensure_topics
from connectors.records import (
    Announcement,
    Coordinate,
    Fork,
    Group,
    Manifest,
    Version,
    encode,
)
from operators.staleness import policy
from tests.broker_process import BrokerProcess
from tests.models import tiny_model
from tests.trainer.groups import trainable_group
from trainer.checkpoint import CheckpointStore
from trainer.checkpoint_meta import CheckpointMeta
from trainer.engine import StepResult, TrainingEngine
from trainer.execute import execute, settings
from trainer.loop import step_seed
from trainer.recovery import Recovered, fold, recover
from trainer.reexecute import ReexecutionDiffers
from trainer.step_log import ChainBroken, StepLog

B = 2  # groups a step


class OtherMachine(TrainingEngine):
    """It says that it is another one, and rounds in another way."""

    name = "other"

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "device": self.name}

    def step(self, *arguments: Any, **named: Any) -> StepResult:
        rows, micro_batches, advantages, seed, trainer = arguments
        rounded = trainer.model_copy(update={"learning_rate": trainer.learning_rate * 1.001})
        return super().step(rows, micro_batches, advantages, seed, rounded, **named)


class SameBits(TrainingEngine):
    """Another number of threads, which changes no bit."""

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "threads": "7"}


class Unreliable(OtherMachine):
    """Other bits in an environment that says it is the same."""

    def environment(self) -> dict[str, str]:
        return TrainingEngine.environment(self)


class World:
    def __init__(self, cluster: Cluster, model: Path, folder: Path) -> None:
        self.cluster, self.model = cluster, model
        ensure_topics(cluster, topics(1))
        self.config: Config = parse(
            {
                "kafka": {"partitions": 1},
                "model": {"path": str(model)},
                "tasks": {"a": {"reward": "exact_match", "group_size": 2}},
                "trainer": {"groups_per_step": B, "learning_rate": 1e-3},
            },
            base_dir="",
        )
        self.policy = policy("n-step-off", n=9)
        self.store = CheckpointStore(folder / "checkpoints", keep=5)
        self.store.clean()
        self.producer = Producer(cluster)
        self.records: list[Coordinate] = []
        self.engine: TrainingEngine | None = None
        self.steps = StepLog(cluster)

    def start(self, machine: type[TrainingEngine] = TrainingEngine) -> Recovered:
        """A trainer starts, after the one before is gone; its state folded."""
        self.stop()
        self.engine = machine(self.model, self.config.trainer, self.config.model, 1.0)
        self.steps = StepLog(self.cluster)
        found = recover(self.config, self.cluster, self.engine, self.store, self.steps)
        state = fold(self.config, self.cluster, self.policy, found)
        return dataclasses.replace(found, state=state)

    def stop(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.engine = None
        self.steps.close()

    def group(self, offset: int) -> Group:
        group_id = f"{self.cluster.topic('prompts')}/0/{offset}"
        return trainable_group(group_id, Version(0, 0), seed=offset)

    def train(self, start: Recovered, num_steps: int) -> Recovered:
        """Grants, writes and trains so many steps as the trainer that recovered to `start`."""
        assert self.engine is not None
        for step in range(start.step + 1, start.step + num_steps + 1):
            groups = [self.group(B * (step - 1) + i) for i in range(B)]
            granted = Announcement(
                epoch=start.epoch, version=start.version, digest=start.digest, limits=(B * step,)
            )
            self.producer.append(self.cluster.topic("policy"), 0, encode(granted))
            records = tuple(self.write(group) for group in groups)
            seed = step_seed(0, step)
            done = execute(self.engine, groups, self.config.trainer, seed)
            digest, version = self.engine.digest(), Version(start.version.incarnation, step)
            manifest = Manifest(
                step=step,
                epoch=start.epoch,
                version=version,
                records=records,
                micro_batches=done.micro_batches,
                seed=seed,
                digest_before=start.digest,
                digest=digest,
                environment=self.engine.environment(),
                settings=settings(self.config.trainer, 1.0),
            )
            self.steps.append(manifest)
            start = dataclasses.replace(start, step=step, version=version, digest=digest)
        return start

    def write(self, group: Group) -> Coordinate:
        value = encode_group(group)
        topic = self.cluster.topic("trajectories")
        offset = self.producer.append(topic, 0, value, key=group.group_id.encode())
        return Coordinate(0, offset, checksum(value), group.group_id)

    def save(self, found: Recovered) -> None:
        assert self.engine is not None
        meta = CheckpointMeta(
            step=found.step,
            version=found.version,
            digest=found.digest,
            epoch=found.epoch,
            feed=found.state,
        )
        self.store.save(found.step, self.engine.capture().write, msgspec.json.encode(meta))

    def digests(self) -> list[str]:
        return [m.digest for m in self.steps.manifests()]


@pytest.fixture
def world(cluster: Cluster, tiny_model_path: Path, tmp_path: Path) -> Iterator[World]:
    made = World(cluster, tiny_model_path, tmp_path)
    yield made
    made.stop()
    made.producer.close()


def test_a_recovered_trainer_holds_what_the_dead_one_held_and_its_ledger_is_folded(
    world: World,
) -> None:
    held = world.train(world.start(), 3)
    found = world.start()
    assert (found.step, found.version, found.digest) == (3, Version(0, 3), held.digest)
    assert not found.rebuilt
    assert found.state.version == Version(0, 3)
    assert (found.state.counts.granted, found.state.counts.trained) == (3 * B, 3 * B)


def test_the_values_of_prompts_are_recovered_with_the_weights(world: World) -> None:
    spo = world.config.trainer.model_copy(
        update={"advantage": "spo", "advantage_parameters": {"half_life": 1e-6}}
    )
    world.config = world.config.model_copy(update={"trainer": spo})
    world.train(world.start(), 2)
    saved = world.start()
    world.save(saved)
    held = world.train(saved, 3)
    assert world.engine is not None
    tracker = world.engine.tracker
    found = world.start()
    assert (found.step, found.digest, found.rebuilt) == (5, held.digest, False)
    assert world.engine.tracker == tracker
    assert tracker.beliefs
    assert tracker.length > 0


def test_on_another_machine_with_other_bits_training_goes_on_as_a_rebuild(world: World) -> None:
    held = world.train(world.start(), 3)
    found = world.start(OtherMachine)
    assert (found.step, found.version, found.rebuilt) == (3, Version(1, 3), True)
    assert found.digest != held.digest
    assert found.state.version == Version(1, 3)
    assert found.state.lineage == {1: Fork(parent=0, number=3, reason="rebuild")}
    ahead = world.train(found, 2)

    # Killed before it saved anything: the same machine comes to the same weights, in one line.
    again = world.start(OtherMachine)
    assert (again.version, again.digest, again.rebuilt) == (Version(1, 5), ahead.digest, False)
    world.save(again)

    # Back on the first machine, from the other one's checkpoint: nothing is executed again.
    back = world.start()
    assert (back.version, back.digest, back.rebuilt) == (Version(1, 5), ahead.digest, False)
    assert world.steps.chain().lineage == found.state.lineage


def test_back_on_the_first_machine_without_a_checkpoint_it_is_a_second_rebuild(
    world: World,
) -> None:
    world.train(world.start(), 2)
    world.train(world.start(OtherMachine), 2)
    found = world.start()
    assert (found.version, found.rebuilt) == (Version(2, 4), True)
    assert [f.number for f in world.steps.chain().lineage.values()] == [2, 4]
    world.train(found, 1)
    assert world.steps.chain().breaks == []


def test_another_environment_with_equal_bits_is_no_rebuild(world: World) -> None:
    held = world.train(world.start(), 2)
    found = world.start(SameBits)
    assert (found.version, found.digest, found.rebuilt) == (Version(0, 2), held.digest, False)


def test_other_bits_in_an_equal_environment_are_refused_with_what_to_do(world: World) -> None:
    world.train(world.start(), 3)
    digests = world.digests()
    with pytest.raises(ReexecutionDiffers) as caught:
        world.start(Unreliable)
    assert (caught.value.step, caught.value.record) == (1, None)
    assert f"the log says {digests[0]}" in str(caught.value)
    assert "`headwater rollback RUN --to 0` goes on from before it" in str(caught.value)


def test_a_record_that_is_gone_is_named_with_its_step_and_a_rollback_goes_round_it(
    world: World,
) -> None:
    """The checkpoint of step 2 had read nothing yet of what retention then removed."""
    held = world.train(world.start(), 2)
    before = world.start()
    world.save(before)
    world.train(before, 2)
    delete_records(world.cluster, {"trajectories": {0: 2 * B + 1}})
    with pytest.raises(ReexecutionDiffers, match=rf"trajectories/0/{2 * B} \(.*\)") as caught:
        world.start()
    assert caught.value.step == 3
    assert caught.value.record is not None
    assert "headwater rollback RUN --to 2" in str(caught.value)
    world.steps.begin(2, Fork(parent=0, number=2, reason="rollback"), held.digest)
    found = world.start()
    assert (found.version, found.digest) == (Version(1, 2), held.digest)
    assert len(found.state.open) == 2 * B


def test_a_record_that_is_another_one_is_named(world: World) -> None:
    start = world.start()
    world.train(start, 1)
    other = world.steps.manifests()[0]
    altered = msgspec.structs.replace(other.records[1], crc=other.records[1].crc ^ 1)
    bad = msgspec.structs.replace(other, records=(other.records[0], altered))
    world.stop()
    cluster = dataclasses.replace(world.cluster, namespace=world.cluster.namespace + "copy.")
    ensure_topics(cluster, {"steps": 1, "policy": 1})
    steps = StepLog(cluster)
    steps.begin(0)
    steps.append(msgspec.structs.replace(bad, epoch=0))
    steps.close()
    topic = cluster.topic("trajectories")
    ensure_topics(cluster, topics(1))
    for offset in range(B):
        world.producer.append(topic, 0, encode_group(world.group(offset)))
    world.cluster = cluster
    with pytest.raises(ReexecutionDiffers, match="step 1 cannot be executed again") as caught:
        world.start()
    assert caught.value.record == altered


def test_a_model_that_is_not_the_one_the_run_began_with_is_named(
    world: World, tmp_path: Path
) -> None:
    world.train(world.start(), 1)
    world.model = tiny_model(tmp_path / "other", seed=3)
    with pytest.raises(ReexecutionDiffers, match=r"the initial model \(model.path\) has"):
        world.start(OtherMachine)


def test_a_log_that_no_checkpoint_leads_to_is_refused(world: World) -> None:
    world.train(world.start(), 2)
    delete_records(world.cluster, {"steps": {0: 2}})
    with pytest.raises(ReexecutionDiffers, match="no whole checkpoint of step 1 or later"):
        world.start()


def test_after_a_rollback_on_a_trimmed_log_the_initial_model_is_nobodys_way_back(
    world: World,
) -> None:
    """No manifest is left to execute again: without its checkpoint step 2 cannot be reached."""
    start = world.start()
    world.save(held := world.train(start, 2))
    world.train(held, 1)
    world.steps.begin(2, Fork(parent=0, number=2, reason="rollback"), held.digest)
    delete_records(world.cluster, {"steps": {0: 3}})
    (weights,) = Path(world.store.url).glob("step-*/state/engine/*model_states.pt")
    flipped = bytearray(weights.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    weights.write_bytes(flipped)
    with pytest.raises(ReexecutionDiffers, match="no whole checkpoint of step 2 or later"):
        world.start(OtherMachine)


def test_checkpoints_without_a_log_are_not_passed_over(world: World) -> None:
    world.save(world.train(world.start(), 2))
    world.cluster = dataclasses.replace(world.cluster, namespace=f"{world.cluster.namespace}anew.")
    ensure_topics(world.cluster, topics(1))
    for _ in range(2):
        with pytest.raises(ChainBroken, match=r"holds no step, but .* the checkpoint of step 2"):
            world.start()


def test_a_torn_tail_of_steps_or_policy_costs_the_record_that_was_cut_only(
    own_broker: BrokerProcess, own_cluster: Cluster, tiny_model_path: Path, tmp_path: Path
) -> None:
    world = World(own_cluster, tiny_model_path, tmp_path)
    world.train(world.start(), 3)
    digests = world.digests()
    world.stop()
    world.producer.close()
    own_broker.kill9()
    for topic in ("steps", "policy"):
        name = own_cluster.topic(topic)
        (segment,) = (own_broker.data_dir / "topics" / name / "0").glob("*.log")
        with segment.open("r+b") as file:
            file.truncate(segment.stat().st_size - 7)
    own_broker.start()
    world.producer = Producer(own_cluster)
    found = world.start()
    assert (found.step, found.digest) == (2, digests[1])
    assert found.state.counts.granted == 2 * B, "the third announcement was cut"
    assert world.train(found, 1).digest == digests[2], "the same groups, trained as before"
    world.stop()
    world.producer.close()
