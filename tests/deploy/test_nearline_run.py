"""A trainer of live traffic alone, on a real engine and broker, killed in between: what its log
proves, replays and says."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from connectors.config import Config, ConfigError, parse
from connectors.kafka.client import Cluster, Producer
from connectors.kafka.locate import topics
from connectors.kafka.terminals import outgoing
from connectors.kafka.topics import ensure_topics
from connectors.records import Closed, Group, Version, encode
from connectors.run_dir import RunDir
from connectors.traffic import Call, Choice, Feedback
from deploy.audit_log import audit_run
from deploy.status import RunStatus
from deploy.trace import trace_lines, trace_run
from deploy.view import status_lines
from tests.trainer.session_groups import correction, session_group
from trainer.checkpoint import run_store
from trainer.credit import no_signal
from trainer.engine import TrainingEngine
from trainer.execute import untrainable
from trainer.feed import Feed
from trainer.loop import run_loop
from trainer.recovery import fold, recover
from trainer.replay import replay
from trainer.shadow import Nobody
from trainer.staleness import allowance_of, configured_policy, granted_per_step
from trainer.step_log import StepLog


class NearlineRun:
    """`calls` and feedback are at the same offset as the terminal of what they name."""

    def __init__(self, cluster: Cluster, model: Path, folder: Path) -> None:
        self.cluster, self.model, self.run_dir = cluster, model, RunDir(folder)
        ensure_topics(cluster, topics(1))
        self.producer = Producer(cluster)
        self.num_sessions = 0

    def config(self, **changes: Any) -> Config:
        table = {
            "run": {"dir": str(self.run_dir.path), "namespace": self.cluster.namespace},
            "kafka": {"bootstrap_servers": self.cluster.bootstrap_servers, "partitions": 1},
            "model": {"path": str(self.model), "context_tokens": 64},
            "tasks": {"a": {"reward": "feedback"}},
            "trainer": {
                "groups_per_step": 2, "learning_rate": 1e-3, "advantage": "spo", "num_steps": 3,
                **changes,
            },
            "checkpoint": {"every_steps": 2},
            "nearline": {"bound": 2},
        }  # fmt: skip
        return parse(table, base_dir=str(self.run_dir.path))

    def append(self, topic: str, value: bytes, key: str = "", **headers: str) -> int:
        return self.producer.append(
            self.cluster.topic(topic), 0, value, key=key.encode(), headers=headers
        )

    def end(self, terminal: Group | Closed) -> None:
        record = outgoing(self.cluster, terminal)
        for topic in ("rollouts", "trajectories"):
            self.append(topic, record.value, record.key, **record.headers)

    def session(self, reward: float, number: int | None = 0, **more: Any) -> Group:
        """One that was served by version `number`; text without one."""
        self.num_sessions += 1
        seed = self.num_sessions
        call = Call(
            id=f"c{seed}", session=f"s{seed}", task="a", time=1.0, finished_at=2.0,
            messages=[{"role": "user", "content": f"ask {seed}"}],
            choices=(Choice(message={"role": "assistant", "content": "x"}),),
        )  # fmt: skip
        at = self.append("agent-traffic", encode(call), call.session)
        group_id = f"{self.cluster.topic('agent-traffic')}/0/{at}"
        version = None if number is None else Version(0, number)
        group = session_group(group_id, version, seed=seed, reward=reward, **more)
        self.end(group)
        return group

    def correct(self, group: Group, reward: float) -> Group:
        said = Feedback(id=f"f-{group.group_id}", name="thumb", value=reward, time=9.0, session="s")
        at = self.append("feedback", encode(said), "s")
        group_id = f"{self.cluster.topic('feedback')}/0/{at}"
        before = repr(group.trajectories[0].reward)
        made = correction(group, group_id, before=before, reward=reward)
        self.end(made)
        return made

    def train(self, num_steps: int) -> str:
        """A trainer until that step, from what is in the log; the digest it ends at."""
        config = self.config(num_steps=num_steps)
        policy, stop = configured_policy(config), threading.Event()
        store = run_store(config, self.run_dir)
        store.clean()
        with (
            closing(TrainingEngine(self.model, config.trainer, config.model, 1.0)) as engine,
            closing(StepLog(self.cluster)) as steps,
        ):
            found = recover(config, self.cluster, engine, store, steps)
            found = dataclasses.replace(found, state=fold(config, self.cluster, policy, found))
            feed = Feed(
                self.cluster, policy, state=found.state, epoch=found.epoch,
                batch_size=granted_per_step(config), allowance=allowance_of(config, self.cluster),
                untrainable=lambda g: untrainable(
                    g, config.trainer, engine.vocabulary_size, engine.max_tokens
                ),
                no_signal=lambda g: no_signal(g, config.trainer),
            )  # fmt: skip
            with closing(feed):
                run_loop(
                    config, self.run_dir, self.cluster, engine, steps, found, feed, Nobody(),
                    store, stop,
                )  # fmt: skip
            return engine.digest()

    def status(self) -> dict[str, Any]:
        with closing(RunStatus(self.config(), self.run_dir, self.cluster)) as status:
            return status.read()


@pytest.fixture
def run(cluster: Cluster, tiny_model_path: Path, tmp_path: Path) -> Iterator[NearlineRun]:
    made = NearlineRun(cluster, tiny_model_path, tmp_path)
    yield made
    made.producer.close()


def test_a_killed_trainer_of_live_traffic_trains_each_session_once_and_replays(
    run: NearlineRun,
) -> None:
    """Bound 2 and two a step: of what version 0 wrote six fit. A correction goes with its step."""
    sessions = [run.session(reward) for reward in (1.0, 0.0, 0.5, 1.0)]
    late = run.correct(sessions[0], 0.0)
    run.session(0.25)
    run.session(1.0)  # the seventh: too old when its turn came
    run.session(1.0, None)  # text, for which spo's correction has no log-probs
    closed = f"{run.cluster.topic('agent-traffic')}/0/99"
    run.end(Closed(group_id=closed, reason="no_label"))
    digest = run.train(3)
    shutil.rmtree(sorted(run.run_dir.checkpoints.iterdir())[-1])  # step 3 is in the log alone
    assert run.train(3) == digest
    run.session(1.0, 3)
    run.session(0.0, 3)
    run.train(4)

    found = audit_run(run.config(), run.run_dir, run.cluster)
    assert found.ok, found
    assert found.traffic == {
        "trained": 8, "closed": 1, "dropped": 2, "queued": 0, "duplicates": 0, "scoring": 0,
    }  # fmt: skip
    assert found.dropped_by_reason == {"malformed": 1, "stale": 1}
    again = replay(run.cluster, run.run_dir, run.config())
    assert (again.steps, again.equal) == (4, True)

    status = run.status()
    nearline = status["nearline"]
    assert (nearline["groups"], nearline["corrections"]) == (8, 1)
    assert nearline["dropped_by_reason"] == {"malformed": 1, "stale": 1}
    assert nearline["closed_by_reason"] == {"no_label": 1}
    versions = {row["version"]: row for row in nearline["prequential"]}
    assert {v: row["sessions"] for v, row in versions.items()} == {"0.0": 5, "0.3": 2}
    assert versions["0.0"]["reward"] == pytest.approx((1.0 + 0.0 + 0.5 + 1.0 + 0.25) / 5)
    assert (status["groups"]["open"], status["groups"]["trained"]) == (0, 0)
    lines = status_lines(status)
    assert any(line.startswith("traffic    8 groups trained (1 corrections)") for line in lines)

    traced = trace_run(run.config(), run.run_dir, run.cluster, f"{sessions[1].group_id}/0")
    assert traced["origin"]["prompt"]["id"] == "c2"
    assert traced["traffic"] == {"session": "s2", "served": "0.0", "label": "final"}
    assert traced["trained_step"] == 1
    corrected = trace_run(run.config(), run.run_dir, run.cluster, late.group_id)
    assert corrected["traffic"]["corrects"] == sessions[0].group_id
    assert corrected["trained_step"] == 3
    assert "  traffic     session s2, served 0.0, label final" in trace_lines(traced)


def test_an_id_of_live_traffic_that_is_not_in_the_log_is_one_clear_line(run: NearlineRun) -> None:
    wanted = f"{run.cluster.topic('agent-traffic')}/0/7"
    with pytest.raises(ConfigError, match="there is no such"):
        trace_run(run.config(), run.run_dir, run.cluster, wanted)
    assert msgspec.json.encode(run.status()["nearline"])
