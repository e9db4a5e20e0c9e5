"""The training loop on a real engine, log and checkpoint store; feed and publisher are played."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from connectors.config import Config, parse
from connectors.kafka.client import Cluster
from connectors.kafka.topics import ensure_topics
from connectors.records import Coordinate, Group, Manifest, Version
from connectors.run_dir import RunDir
from connectors.weights import Snapshot
from tests.trainer.groups import trainable_group
from trainer import loop, stall
from trainer.actions import told
from trainer.ages import ages_of
from trainer.checkpoint import CheckpointFailed, CheckpointStore
from trainer.engine import TrainingEngine
from trainer.feed_state import fresh
from trainer.loop import Loop
from trainer.overdue import recorded, weights_of
from trainer.recovery import Recovered
from trainer.saving import Saver
from trainer.step_input import StepInput
from trainer.step_log import Fenced, StepLog
from trainer.tensorboard import Curves


def group(step: int) -> Group:
    return trainable_group(f"p/0/{step}", Version(0, step - 1), seed=step)


WEIGHTS = {Version(0, 2): 0.5}
POLICY = ("staleness/drops", "staleness/cancels", "staleness/waits", "seconds/wait/")
"""Metrics of what the staleness policy did."""


class PlayedFeed:
    def __init__(self, num_steps: int) -> None:
        self._steps = deque(range(1, num_steps + 1))

    def take(self, timeout_s: float) -> StepInput | None:
        if not self._steps:
            return None
        step = self._steps.popleft()
        return StepInput(
            step=step,
            version=Version(0, step - 1),
            records=(Coordinate(0, step, 0, f"p/0/{step}"),),
            groups=(group(step),),
            dropped=(),
            snapshot=fresh(1),
            ages=ages_of((group(step),), Version(0, step - 1), {}),
            weights=WEIGHTS if step == 3 else {},
            settings={"staleness_policy": "played", **(recorded(WEIGHTS) if step == 3 else {})},
            actions={"drops/stale": 2, "cancels/close/stale": 1} if step == 1 else {},
            waits={"rollouts": 0.5} if step == 1 else {},
            mean_length=6.5 if step == 1 else None,
        )


class PlayedPublisher:
    last_seconds = 0.5

    def __init__(self) -> None:
        self.submitted: list[tuple[Version, str, bool | None]] = []

    def spare(self) -> Snapshot | None:
        return None

    def submit(
        self, snapshot: Snapshot, version: Version, master_changed: bool | None = None
    ) -> None:
        self.submitted.append((version, snapshot.digest, master_changed))

    def check(self) -> None:
        return None

    def wait_published(self, version: Version, timeout_s: float) -> bool:
        return True


class PoisonedEngine(TrainingEngine):
    """The gradient of the second step is NaN."""

    num_steps = 0

    def step(self, *arguments: Any, **named: Any) -> Any:
        self.num_steps += 1
        if self.num_steps != 2:
            return super().step(*arguments, **named)
        hook = self.named_parameters()[3][1].register_hook(lambda gradient: gradient * float("nan"))
        try:
            return super().step(*arguments, **named)
        finally:
            hook.remove()


class World:
    def __init__(self, cluster: Cluster, model: Path, folder: Path, num_steps: int) -> None:
        ensure_topics(cluster, {"steps": 1, "policy": 1})
        self.config: Config = parse(
            {
                "model": {"path": str(model)},
                "tasks": {"a": {"reward": "exact_match", "group_size": 2}},
                "trainer": {"num_steps": num_steps, "learning_rate": 1e-3},
                "checkpoint": {"every_steps": 2},
            },
            base_dir="",
        )
        self.engine = PoisonedEngine(model, self.config.trainer, self.config.model, 1.0)
        self.steps = StepLog(cluster)
        self.publisher = PlayedPublisher()
        self.store = CheckpointStore(folder / "checkpoints", keep=5)
        self.store.clean()
        self.saver = Saver(self.store, self.engine)
        self.curves = Curves(folder / "curves", 0)
        self.start = self.engine.digest()
        recovered = Recovered(
            epoch=self.steps.begin(0),
            step=0,
            version=Version(0, 0),
            digest=self.start,
            state=fresh(1),
            chain=self.steps.chain(),
        )
        self.loop = Loop(
            self.config, self.engine, self.steps, PlayedFeed(num_steps), self.publisher,
            self.saver, self.curves, recovered,
        )  # type: ignore[arg-type]  # fmt: skip

    def close(self) -> None:
        self.saver.close()
        self.engine.close()
        self.steps.close()
        self.curves.close()


def played_manifests(cluster: Cluster, model: Path, folder: Path) -> list[Manifest]:
    """Of a run of three steps."""
    with closing(World(cluster, model, folder, num_steps=3)) as world:
        world.loop.run(threading.Event())
        return world.steps.manifests()


@pytest.fixture
def world(cluster: Cluster, tiny_model_path: Path, tmp_path: Path) -> Iterator[World]:
    made = World(cluster, tiny_model_path, tmp_path, num_steps=3)
    yield made
    made.close()


def test_a_nan_gradient_skips_the_step_keeps_the_weights_and_is_announced(world: World) -> None:
    world.loop.run(threading.Event())
    first, second, third = world.steps.manifests()
    assert (first.skipped, second.skipped, third.skipped) == (None, "nan_gradient", None)
    assert world.start != first.digest
    assert second.digest == first.digest != third.digest
    # The skipped version is submitted under its own number with the bytes of before: a relabelling.
    assert world.publisher.submitted == [
        (Version(0, 0), world.start, None),
        (Version(0, 1), first.digest, True),
        (Version(0, 2), first.digest, False),
        (Version(0, 3), third.digest, True),
    ]
    assert world.store.steps() == [2, 3]  # every two steps, and the last


def test_a_manifest_says_what_the_policy_did_and_what_it_is_executed_again_with(
    world: World,
) -> None:
    world.loop.run(threading.Event())
    first, second, third = world.steps.manifests()
    policy = {k: v for k, v in first.metrics.items() if k.startswith(POLICY)}
    assert policy == {
        "staleness/drops/stale": 2, "staleness/cancels/close/stale": 1,
        "staleness/waits/rollouts": 1, "seconds/wait/rollouts": 0.5,
    }  # fmt: skip
    assert not any(name.startswith(POLICY) for name in second.metrics)
    assert told(first) == {"drops/stale": 2, "cancels/close/stale": 1, "waits/rollouts": 1}
    assert [m.settings["staleness_policy"] for m in (first, second, third)] == ["played"] * 3
    assert weights_of(first.settings) == {}
    assert weights_of(third.settings) == WEIGHTS
    assert third.metrics["tokens/reweighted"] == 10.0


def test_a_manifest_tells_reward_age_and_length_apart_and_what_is_wrong_is_logged_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Each step's engine log-probs of -5 are made up: all fresh tokens differ, in all steps."""
    caplog.set_level(logging.INFO, "trainer.alerts")
    world.loop.run(threading.Event())
    first, second, _ = world.steps.manifests()
    prefixes = ("reward/task/", "reward/staleness/", "tokens/age/", "length/")
    assert {k: v for k, v in first.metrics.items() if k.startswith(prefixes)} == {
        "reward/task/a": 0.5, "reward/staleness/0": 0.5, "tokens/age/0": 10,
        "length/generated": 5, "length/trained": 5, "length/arrived": 6.5,
    }  # fmt: skip
    assert "length/arrived" not in second.metrics
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert said[0].startswith("step 1: ALERT: gap: 100% of the 10 tokens that the trained version")


def test_a_stall_of_the_trainer_before_is_over_before_its_steps_are_executed_again(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_topics(cluster, {"steps": 1, "policy": 1})
    run_dir = RunDir(tmp_path)
    stall.keep(run_dir, "stalled: x")

    def recover(*arguments: object) -> None:
        assert stall.kept(run_dir) is None
        raise RuntimeError("it executes steps again")

    monkeypatch.setattr(loop, "recover", recover)
    monkeypatch.setattr(loop.gang, "engine", lambda *of_run: closing(StepLog(cluster)))
    table = {
        "run": {"dir": str(tmp_path), "namespace": cluster.namespace},
        "kafka": {"bootstrap_servers": cluster.bootstrap_servers},
        "model": {"path": str(tmp_path)},
        "tasks": {"a": {"reward": "exact_match", "group_size": 2}},
    }
    with pytest.raises(RuntimeError, match="executes steps again"):
        loop.train(parse(table, base_dir=""), run_dir, threading.Event())


def test_a_stop_ends_after_the_step_at_hand_with_a_checkpoint(world: World) -> None:
    stop = threading.Event()
    publish = world.publisher.submit

    def submit(snapshot: Snapshot, version: Version, master_changed: bool | None = None) -> None:
        publish(snapshot, version, master_changed)
        if version.number == 1:
            stop.set()

    world.publisher.submit = submit  # type: ignore[method-assign]
    world.loop.run(stop)
    assert [m.step for m in world.steps.manifests()] == [1]
    assert world.store.steps() == [1]


def test_a_checkpoint_that_cannot_be_written_ends_the_loop_at_the_next_look(
    world: World, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").write_text("no folder any more")
    with pytest.raises(CheckpointFailed, match="step 2 could not be written"):
        world.loop.run(threading.Event())


def test_a_fenced_trainer_publishes_and_checkpoints_nothing_more(
    world: World, cluster: Cluster
) -> None:
    newer = StepLog(cluster)
    newer.begin(0)
    newer.close()
    with pytest.raises(Fenced):
        world.loop.run(threading.Event())
    assert [version for version, _, _ in world.publisher.submitted] == [Version(0, 0)]
    assert world.store.steps() == []
    assert world.steps.manifests() == []
