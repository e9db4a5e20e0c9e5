"""A trainer as a process that is killed at a named point, beside a real engine and a dataflow that
is played: whatever is granted is scored at once, by the version of its grant."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import tomli_w

from connectors.arrow import checksum, encode_group
from connectors.config import Config, load
from connectors.kafka.client import Cluster, Producer
from connectors.kafka.locate import topics
from connectors.kafka.tail import PolicyTail
from connectors.kafka.topics import ensure_topics
from connectors.records import (
    HEADER_CRC,
    HEADER_KIND,
    Announcement,
    Group,
    Version,
)
from connectors.run_dir import RunDir
from tests.trainer.groups import trainable_group
from trainer.step_log import Chain, StepLog

POINTS: Final = {
    "trained": ("trainer.loop", "execute"),  # the optimizer stepped, nothing says so
    "recorded": ("trainer.step_log.StepLog", "append"),  # the manifest is in the log
    "held": ("connectors.weights.WeightsSender", "publish"),  # engines hold it, not announced
    "announced": ("trainer.feed.Feed", "published"),
    "saving": ("trainer.saving.Saver", "save"),  # a checkpoint is copied and being written
    "saved": ("trainer.checkpoint.CheckpointStore", "save"),
    "loaded": ("trainer.engine.TrainingEngine", "load"),
}
"""After which call of what the trainer is killed."""

PROMPTS: Final = 200
_forked = multiprocessing.get_context("forkserver")
_forked.set_forkserver_preload(["trainer.loop"])


class CrashingRun:
    """Two groups a step, one partition, policy one-step-off; no checkpoint unless `every_steps`."""

    def __init__(
        self, cluster: Cluster, model: Path, folder: Path, engines: list[str], **trainer: Any
    ) -> None:
        self.cluster = cluster
        self.run_dir = RunDir(folder)
        folder.mkdir()
        table = {
            "run": {"namespace": cluster.namespace, "dir": str(folder)},
            "kafka": {"bootstrap_servers": cluster.bootstrap_servers, "partitions": 1},
            "model": {"path": str(model), "context_tokens": 64},
            "engine": {"urls": engines},
            "tasks": {"a": {"reward": "exact_match", "group_size": 2}},
            "staleness": {"policy": "one-step-off"},
            "trainer": {"groups_per_step": 2, "learning_rate": 1e-3, **trainer},
            "checkpoint": {"every_steps": 1000},
        }
        self.run_dir.config_file.write_text(tomli_w.dumps(table))
        ensure_topics(cluster, topics(1))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._thread.start()

    @property
    def config(self) -> Config:
        return load(self.run_dir.config_file)

    @property
    def chain(self) -> Chain:
        steps = StepLog(self.cluster)
        try:
            return steps.chain()
        finally:
            steps.close()

    def start(
        self,
        num_steps: int,
        *,
        crash: str | None = None,
        nth: int = 1,
        context: BaseContext = _forked,
    ) -> BaseProcess:
        """A trainer; killed with -9 after the `nth` time of the point `crash`."""
        arguments = (str(self.run_dir.path), num_steps, crash, nth)
        process = context.Process(target=_train, args=arguments)  # type: ignore[attr-defined]
        process.start()
        started: BaseProcess = process
        return started

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    # ------------------------------------------------------------------------------ the dataflow
    def _play(self) -> None:
        producer, tail, limit = Producer(self.cluster), PolicyTail(self.cluster), 0
        for _ in range(PROMPTS):
            producer.send(self.cluster.topic("prompts"), 0, b"{}")
        producer.flush()
        while not self._stop.is_set():
            for _, announcement in tail.poll(0.05):
                self._score(producer, range(limit, announcement.limits[0]), announcement)
                limit = max(limit, announcement.limits[0])
        producer.close()
        tail.close()

    def _score(self, producer: Producer, offsets: range, announcement: Announcement) -> None:
        for offset in offsets:
            value = encode_group(self.group(offset, announcement.version))
            producer.append(
                self.cluster.topic("trajectories"),
                0,
                value,
                key=f"{self.cluster.topic('prompts')}/0/{offset}".encode(),
                headers={HEADER_KIND: "group", HEADER_CRC: f"{checksum(value):08x}"},
            )

    def group(self, offset: int, version: Version) -> Group:
        group_id = f"{self.cluster.topic('prompts')}/0/{offset}"
        return trainable_group(group_id, version, seed=offset)


def _train(folder: str, num_steps: int, crash: str | None, nth: int) -> None:
    from trainer.loop import train

    logging.basicConfig(filename=f"{folder}/trainer.log", level=logging.INFO)
    run_dir = RunDir(folder)
    config = load(run_dir.config_file, [f"trainer.num_steps={num_steps}"])
    if crash is not None:
        kill_after(crash, nth)
    train(config, run_dir, threading.Event())


def kill_after(crash: str, nth: int) -> None:
    """This process ends by SIGKILL right after the `nth` time of the point `crash`."""
    owner, name = POINTS[crash]
    module, _, attribute = owner.rpartition(".")
    holder: Any = __import__(owner, fromlist=["_"]) if attribute.islower() else None
    if holder is None:
        holder = getattr(__import__(module, fromlist=["_"]), attribute)
    original, calls = getattr(holder, name), iter(range(1, 1 << 30))

    def call(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        if next(calls) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(holder, name, call)
