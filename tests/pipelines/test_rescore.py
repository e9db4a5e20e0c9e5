"""Scoring a run's rollouts again, in this process; killed and end to end: tests/deploy."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from connectors.arrow import decode_group
from connectors.config import Config, ConfigError
from connectors.kafka.client import Cluster, Record, read_all
from connectors.records import HEADER_KIND, Closed, Prompt, decode_as
from connectors.run_dir import RunDir
from pipelines.recovery_folder import RecoveryLost
from pipelines.rescore import Rescored, Span, rescore
from tests.deploy.written_log import WrittenLog
from tests.operators.engine_fake import tokenizer

CODE = """
def score(sample, prompt):
    return {"reward": 7.0, "size": len(sample.trajectory.tokens)}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer(folder)
    return folder


class Run:
    """`rollouts`: in partition 0 four groups (rewarded by their agent), one of another task, one
    that closed, one damaged; in partition 1 two groups."""

    def __init__(self, cluster: Cluster, folder: Path, model: Path) -> None:
        (folder / "code.py").write_text(CODE)
        self.log, self.folder, self.model = WrittenLog(cluster, folder), folder, model
        log = self.log
        for offset in range(4):
            log.end(0, log.group(0, offset, 0))
        other = log.group(0, 4, 0)
        log.end(0, dataclasses.replace(other, prompt=Prompt(task="other", prompt="x")))
        log.end(0, Closed(group_id=log.group_id(0, 5), reason="time_cap", task="sums"))
        log.append("rollouts", 0, b"?", key=log.group_id(0, 6), kind="group", crc32c="0" * 8)
        for offset in range(2):
            log.end(1, log.group(1, offset, 0))

    @property
    def config(self) -> Config:
        made = self.log.config
        section = made.model.model_copy(update={"path": str(self.model)})
        tasks = made.tasks | {"other": made.tasks["sums"]}
        return made.model_copy(update={"model": section, "tasks": tasks})

    def rescore(self, namespace: str = "", **changes: Any) -> Rescored:
        asked: Mapping[str, Any] = {"reward": "code.py:score", "task": None, "span": None} | changes
        return rescore(
            self.config,
            RunDir(self.folder),
            self.log.cluster,
            namespace or self.namespace,
            **asked,
            stop=threading.Event(),
        )

    @property
    def namespace(self) -> str:
        return self.log.cluster.namespace + "again."

    def written(self, topic: str) -> list[Record]:
        again = dataclasses.replace(self.log.cluster, namespace=self.namespace)
        return read_all(again, again.topic(topic), [0, 1])


@pytest.fixture
def run(cluster: Cluster, tmp_path: Path, model: Path) -> Run:
    return Run(cluster, tmp_path, model)


def places(records: list[Record], kind: str) -> list[str]:
    found = [r.key for r in records if r.headers[HEADER_KIND] == kind]
    return sorted(key.decode()[-3:] for key in found if key is not None)


def test_every_terminal_gets_the_new_reward_or_passes(run: Run) -> None:
    done = run.rescore()
    assert (done.done, done.written, done.records, done.dead_letters) == (True, 9, 9, 1)
    records = run.written("trajectories")
    assert places(records, "group") == ["0/0", "0/1", "0/2", "0/3", "0/4", "1/0", "1/1"]
    for record in records:
        if record.headers[HEADER_KIND] == "group":
            rows = decode_group(record.value).trajectories
            assert [(t.reward, dict(t.reward_parts)) for t in rows] == [(7.0, {"size": 5.0})] * 2
    closed = [decode_as(r.value, Closed) for r in records if r.headers[HEADER_KIND] == "closed"]
    assert {c.reason for c in closed} == {"time_cap", "malformed"}
    (letter,) = run.written("dead-letters")
    assert letter.headers["code"] == "corrupt_record"
    again = run.rescore()
    assert (again.written, again.records) == (0, 9)  # nothing is left to do


def test_a_task_and_a_range_are_kept_to_and_remembered(run: Run) -> None:
    span: Span = {0: 3, 1: 1}, {0: 6, 1: 2}
    done = run.rescore(task="sums", span=span)
    assert places(run.written("trajectories"), "group") == ["0/3", "1/1"]
    assert places(run.written("trajectories"), "closed") == ["0/5"]
    again = run.rescore(task="sums")
    assert (again.what, again.records) == (done.what, 3)
    for changed in ({"task": "other"}, {"reward": "exact_match", "task": "sums"},
                    {"task": "sums", "span": ({0: 0, 1: 0}, {0: 1, 1: 1})}):  # fmt: skip
        with pytest.raises(RecoveryLost, match="is of other work"):
            run.rescore(**changed)


def test_what_cannot_be_scored_is_refused(run: Run) -> None:
    with pytest.raises(ConfigError, match="is the run's own"):
        run.rescore(run.log.cluster.namespace)
    with pytest.raises(ConfigError, match="--task none: the run has only sums, other"):
        run.rescore(task="none")
    with pytest.raises(ConfigError, match="no_such"):
        run.rescore(reward="code.py:no_such")
