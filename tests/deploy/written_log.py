"""A run's log, written record by record: two partitions, two steps of two groups, one group
closed, one scored and waiting, one in the making."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from connectors.arrow import checksum
from connectors.config import Config, parse
from connectors.kafka.client import Cluster, Producer
from connectors.kafka.terminals import outgoing
from connectors.kafka.topics import ensure_topics
from connectors.records import (
    Announcement,
    Begin,
    Closed,
    Coordinate,
    Evaluation,
    Group,
    Manifest,
    Origin,
    Prompt,
    Segment,
    Trajectory,
    Version,
    encode,
)

TOPICS = {
    "prompts": 2, "rollouts": 2, "trajectories": 2, "dead-letters": 2, "evaluations": 2,
    "policy": 1, "steps": 1,
}  # fmt: skip


@dataclass
class WrittenLog:
    """`epoch` of the only trainer."""

    cluster: Cluster
    folder: Path
    epoch: int = 0
    coordinates: dict[tuple[int, int], Coordinate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ensure_topics(self.cluster, TOPICS)
        self.producer = Producer(self.cluster)

    @property
    def config(self) -> Config:
        table = {
            "run": {
                "name": "written",
                "dir": str(self.folder),
                "namespace": self.cluster.namespace,
            },
            "kafka": {"bootstrap_servers": self.cluster.bootstrap_servers, "partitions": 2},
            "model": {"path": str(self.folder / "model")},
            "tasks": {"sums": {"reward": "exact_match", "group_size": 2}},
            "staleness": {"policy": "one-step-off"},
        }
        return parse(table, base_dir=str(self.folder))

    def group_id(self, partition: int, offset: int) -> str:
        return f"{self.cluster.topic('prompts')}/{partition}/{offset}"

    def append(
        self, topic: str, partition: int, value: bytes, key: str = "", **headers: str
    ) -> int:
        return self.producer.append(
            self.cluster.topic(topic), partition, value, key=key.encode(), headers=headers
        )

    def prompts(self, per_partition: int) -> None:
        for partition in (0, 1):
            for i in range(per_partition):
                self.append("prompts", partition, json.dumps({"prompt": f"say {i}"}).encode())

    def begin(self) -> None:
        begun = Begin(epoch=None, writer="w", resumed_step=0, started_at=0.0)
        self.epoch = self.append("steps", 0, encode(begun))
        spoken = Begin(epoch=self.epoch, writer="w", resumed_step=0, started_at=0.0)
        self.append("policy", 0, encode(spoken))

    def announce(self, number: int, *limits: int) -> None:
        record = Announcement(
            epoch=self.epoch, version=Version(0, number), digest=f"{number:016x}", limits=limits
        )
        self.append("policy", 0, encode(record))

    def score(self, partition: int, offset: int, version: int) -> None:
        group = self.group(partition, offset, version)
        at, crc = self.end(partition, group)
        self.coordinates[partition, offset] = Coordinate(partition, at, crc, group.group_id)

    def close(self, partition: int, offset: int, reason: str) -> None:
        group_id = self.group_id(partition, offset)
        self.end(partition, Closed(group_id=group_id, reason=reason, message="why"))

    def end(self, partition: int, terminal: Group | Closed) -> tuple[int, int]:
        """Offset in `trajectories` and checksum of the terminal."""
        record = outgoing(self.cluster, terminal)
        for topic in ("rollouts", "trajectories"):
            at = self.append(topic, partition, record.value, key=record.key, **record.headers)
        return at, checksum(record.value)

    def step(self, number: int, *groups: tuple[int, int], reward: float) -> None:
        record = Manifest(
            step=number,
            epoch=self.epoch,
            version=Version(0, number),
            records=tuple(self.coordinates[g] for g in groups),
            micro_batches=(),
            seed=0,
            digest_before=f"{number - 1:016x}",
            digest=f"{number:016x}",
            metrics={
                "reward/mean": reward, "tokens/trained": 100.0, "seconds/wait": 1.0,
                "seconds/update": 3.0, "seconds/publish": 0.25,
            },
            staleness={"mean": number / 4, "p99": 1.0, "max": float(number - 1)},
            finished_at=10.0 * number,
        )  # fmt: skip
        self.append("steps", 0, encode(record))

    def evaluate(self, number: int, reward: float) -> None:
        record = Evaluation(
            version=Version(0, number), versions=(), task="sums", reward=reward, num_prompts=5
        )
        self.append("evaluations", 0, encode(record))

    def group(self, partition: int, offset: int, version: int) -> Group:
        group_id = self.group_id(partition, offset)
        rows = tuple(
            Trajectory(
                trajectory_id=f"{group_id}/{k}",
                group_id=group_id,
                task="sums",
                tokens=np.arange(5, dtype=np.int32),
                loss_mask=np.array([0, 0, 1, 1, 1], np.int8),
                logprobs=np.zeros(5, np.float32),
                segments=(Segment(2, 5, 0, version),),
                origin=Origin(self.cluster.topic("prompts"), partition, offset),
                reward=float(k),
            )
            for k in range(2)
        )
        prompt = Prompt(task="sums", prompt=f"say {offset}")
        return Group(group_id=group_id, prompt=prompt, trajectories=rows)


def write_example(cluster: Cluster, folder: Path) -> WrittenLog:
    log = WrittenLog(cluster, folder)
    log.prompts(5)
    log.begin()
    log.announce(0, 2, 2)
    log.score(0, 0, 0)
    log.score(1, 0, 0)
    log.close(0, 1, "reward_nan")
    log.evaluate(0, 0.25)
    log.step(1, (0, 0), (1, 0), reward=0.5)
    log.announce(1, 3, 3)
    log.score(1, 1, 0)
    log.score(0, 2, 1)
    log.step(2, (1, 1), (0, 2), reward=0.75)
    log.announce(2, 3, 3)
    log.evaluate(2, 0.5)
    return log
