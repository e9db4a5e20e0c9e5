"""A run's `policy` and `trajectories`, written by hand, for what trains on them a second time; and
a shadow trainer on it as a process that can be killed.

Two partitions; groups end out of order within their partition. Among the first are one that is
closed, one with a second terminal, one damaged and one that no step can train.
"""

from __future__ import annotations

import multiprocessing
import random
import threading
from contextlib import closing
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from connectors.config import Config, parse
from connectors.kafka.client import Cluster, Producer, Reader, Record
from connectors.kafka.locate import topics
from connectors.kafka.terminals import outgoing
from connectors.kafka.topics import ensure_topics
from connectors.records import (
    Announcement,
    Begin,
    Closed,
    Group,
    Version,
    encode,
)
from connectors.run_dir import RunDir
from tests.trainer.crashing import kill_after
from tests.trainer.groups import trainable_group

PARTITIONS: Final = 2
CLOSED, TWICE, DAMAGED, UNTRAINABLE = (0, 1), (1, 0), (1, 2), (0, 3)
_started = multiprocessing.get_context("forkserver")
_started.set_forkserver_preload(["trainer.shadow", "deepspeed", "torch.utils.tensorboard"])


def recorded_group(cluster: Cluster, partition: int, offset: int, reward: float = 1.0) -> Group:
    """Of that place; rewards 0 and `reward`."""
    return trainable_group(
        f"{cluster.topic('prompts')}/{partition}/{offset}",
        Version(0, offset // 4),
        seed=1000 * partition + offset,
        reward=reward,
        beyond=10**6 if (partition, offset) == UNTRAINABLE else 0,  # of any vocabulary
    )


class RecordedLog:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        ensure_topics(cluster, topics(PARTITIONS))
        self._limits = [0] * PARTITIONS
        self._number = -1
        begin = Begin(epoch=0, writer="test", resumed_step=0, started_at=0.0)
        with closing(Producer(cluster)) as producer:
            producer.append(cluster.topic("policy"), 0, encode(begin))

    def grant(self, *more: int) -> None:
        """So many more prompts of each partition, in one announcement."""
        self._number += 1
        self._limits = [a + b for a, b in zip(self._limits, more, strict=True)]
        announced = Announcement(
            epoch=0, version=Version(0, self._number), digest="0" * 16, limits=tuple(self._limits)
        )
        with closing(Producer(self.cluster)) as producer:
            producer.append(self.cluster.topic("policy"), 0, encode(announced))

    def end(self, partition: int, *offsets: int, reward: float = 1.0) -> None:
        """Writes the terminals of these prompts, in this order."""
        with closing(Producer(self.cluster)) as producer:
            for offset in offsets:
                self._end(producer, partition, offset, reward)
            producer.flush()

    def _end(self, producer: Producer, partition: int, offset: int, reward: float) -> None:
        place = (partition, offset)
        ended: Group | Closed = recorded_group(self.cluster, partition, offset, reward)
        if place == CLOSED:
            ended = Closed(group_id=ended.group_id, reason="reward_nan", message="why")
        record = outgoing(self.cluster, ended)
        value = record.value[:-1] + b"?" if place == DAMAGED else record.value
        for _ in range(2 if place == TWICE else 1):
            producer.send(
                self.cluster.topic("trajectories"),
                partition,
                value,
                key=record.key.encode(),
                headers=record.headers,
            )


def record_run(cluster: Cluster, per_partition: int, seed: int = 0) -> RecordedLog:
    """A whole one: each partition's groups ended in an order shuffled within a window."""
    log, rng = RecordedLog(cluster), random.Random(seed)
    for start in range(0, per_partition, 4):
        count = min(4, per_partition - start)
        log.grant(*[count] * PARTITIONS)
    for partition in range(PARTITIONS):
        order = sorted(range(per_partition), key=lambda o: o + rng.uniform(0, 5))
        log.end(partition, *order)
    return log


def shadow_config(
    log: Cluster, folder: Path, model: Path, *, name: str, **source: Any
) -> tuple[Config, Cluster]:
    """A shadow's configuration on the run recorded in `log`, and the cluster it writes to."""
    own = Cluster(
        bootstrap_servers=log.bootstrap_servers, namespace=f"{log.namespace}shadow.{name}."
    )
    table = {
        "run": {"name": name, "dir": str(folder), "namespace": own.namespace},
        "kafka": {"bootstrap_servers": log.bootstrap_servers, "partitions": PARTITIONS},
        "model": {"path": str(model), "context_tokens": 64},
        "tasks": {"a": {"reward": "exact_match", "group_size": 2}},
        "trainer": {
            "groups_per_step": 2,
            "learning_rate": 1e-3,
            "num_steps": 1000,
            "source": {
                "run": str(folder.parent / "run"),
                "grants": log.namespace,
                "namespace": log.namespace,
                "starts": [0] * PARTITIONS,
                **source,
            },
        },
        "checkpoint": {"every_steps": 3},
    }
    return parse(table, base_dir=str(folder)), own


class PausedReader(Reader):
    """Brings what it reads in other pieces, at other times: often nothing, or one record."""

    _random = random.Random(7)

    def poll(self, timeout_s: float = 0.0, max_records: int = 500) -> list[Record]:
        if self._random.random() < 0.5:
            return []
        return super().poll(timeout_s, self._random.choice([1, 1, 2, 7]))


def start_shadow(
    config: Config, own: Cluster, *, paused: bool = False, crash: tuple[str, int] | None = None
) -> BaseProcess:
    """Trains to the log's end in a process of its own; `crash`: killed there (`kill_after`)."""
    process = _started.Process(target=_train, args=(config, own, paused, crash), daemon=True)
    process.start()
    return process


def _train(config: Config, own: Cluster, paused: bool, crash: tuple[str, int] | None) -> None:
    import trainer.merge
    from trainer.shadow import shadow

    if paused:
        trainer.merge.Reader = PausedReader  # type: ignore[misc]
    if crash is not None:
        kill_after(*crash)
    assert config.run.dir is not None
    shadow(config, RunDir(config.run.dir), own, threading.Event(), follow=False)
