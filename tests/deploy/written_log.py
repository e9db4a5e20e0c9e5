"""A run's log, written record by record: two partitions, two steps of two groups, one group
closed, one in the making. A ledger folds what is written, so that checkpoints can be made of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from connectors.arrow import checksum
from connectors.config import Config, parse
from connectors.kafka.client import Cluster, Producer
from connectors.kafka.terminals import outgoing
from connectors.kafka.topics import delete_records, ensure_topics
from connectors.records import (
    Announcement,
    Begin,
    Closed,
    Coordinate,
    Evaluation,
    Fork,
    Group,
    Manifest,
    Origin,
    Prompt,
    Segment,
    Trajectory,
    Version,
    encode,
)
from connectors.run_dir import RunDir
from operators.staleness import policy
from trainer.accounts import LedgerBroken
from trainer.checkpoint import run_store
from trainer.checkpoint_meta import CheckpointMeta
from trainer.feed_state import fresh
from trainer.ledger import FeedCore

TOPICS = {
    "prompts": 2, "rollouts": 2, "trajectories": 2, "dead-letters": 2, "evaluations": 2,
    "policy": 1, "steps": 1,
}  # fmt: skip


@dataclass
class WrittenLog:
    """`epoch` and `incarnation` of the trainer at work; `digests` of the steps on the chain."""

    cluster: Cluster
    folder: Path
    epoch: int = 0
    incarnation: int = 0
    digests: dict[int, str] = field(default_factory=lambda: {0: f"{0:016x}"})
    coordinates: dict[tuple[int, int], Coordinate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ensure_topics(self.cluster, TOPICS)
        self.producer = Producer(self.cluster)
        self.ledger = FeedCore(
            policy("one-step-off"),
            fresh(2),
            prompts_topic=self.cluster.topic("prompts"),
            batch_size=2,
            group_size=2,
        )

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
            "trainer": {"groups_per_step": 2},
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
        self._begin(Begin(epoch=None, writer="w", resumed_step=0, started_at=0.0,
                          incarnation=self.incarnation))  # fmt: skip

    def rollback(self, number: int, *excluded: str) -> None:
        """And a trainer that knows it; the ledger is not folded across it."""
        fork = Fork(parent=self.incarnation, number=number, reason="rollback")
        self.incarnation += 1
        self.digests = {s: d for s, d in self.digests.items() if s <= number}
        self._begin(Begin(epoch=None, writer="f", resumed_step=number, started_at=0.0, fork=fork,
                          incarnation=self.incarnation, digest=self.digests[number],
                          excluded=excluded))  # fmt: skip
        self.begin()

    def _begin(self, begun: Begin) -> None:
        self.epoch = self.append("steps", 0, encode(begun))
        self.append("policy", 0, encode(msgspec.structs.replace(begun, epoch=self.epoch)))

    def announce(self, number: int, *limits: int, closed: tuple[str, ...] = ()) -> None:
        record = Announcement(
            epoch=self.epoch,
            version=Version(self.incarnation, number),
            digest=self.digests[number],
            limits=limits,
            closed=closed,
        )
        offset = self.append("policy", 0, encode(record))
        self.ledger.apply_announcement(offset, record)

    def score(self, partition: int, offset: int, version: int, incarnation: int = 0) -> None:
        group = self.group(partition, offset, version, incarnation)
        at, crc = self.end(partition, group)
        self.coordinates[partition, offset] = Coordinate(partition, at, crc, group.group_id)
        made = Version(incarnation, version)
        self.ledger.arrived(self.coordinates[partition, offset], made, made, 2)

    def close(self, partition: int, offset: int, reason: str) -> None:
        group_id = self.group_id(partition, offset)
        at, _ = self.end(partition, Closed(group_id=group_id, reason=reason, message="why"))
        self.ledger.closed(group_id, reason, at=(partition, at))

    def end(self, partition: int, terminal: Group | Closed) -> tuple[int, int]:
        """Offset in `trajectories` and checksum of the terminal."""
        record = outgoing(self.cluster, terminal)
        for topic in ("rollouts", "trajectories"):
            at = self.append(topic, partition, record.value, key=record.key, **record.headers)
        return at, checksum(record.value)

    def step(
        self,
        number: int,
        *groups: tuple[int, int],
        reward: float,
        dropped: tuple[str, ...] = (),
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        digest = f"{self.incarnation:04x}{number:012x}"
        record = Manifest(
            step=number,
            epoch=self.epoch,
            version=Version(self.incarnation, number),
            records=tuple(self.coordinates[g] for g in groups),
            micro_batches=(),
            seed=0,
            digest_before=self.digests[number - 1],
            digest=digest,
            metrics={
                "reward/mean": reward, "tokens/trained": 100.0, "seconds/wait": 1.0,
                "seconds/update": 3.0, "seconds/publish": 0.25, **(metrics or {}),
            },
            dropped=dropped,
            staleness={"mean": number / 4, "p99": 1.0, "max": float(number - 1)},
            finished_at=10.0 * number,
        )  # fmt: skip
        self.digests[number] = digest
        self.append("steps", 0, encode(record))
        with contextlib.suppress(LedgerBroken):  # of a log that is made wrong on purpose
            self.ledger.apply_manifest(record)

    def checkpoint(self) -> None:
        """Of the last step, as the trainer would save it."""
        state = self.ledger.snapshot()
        step = state.version.number
        meta = CheckpointMeta(
            step=step, version=state.version, digest=self.digests[step], epoch=self.epoch,
            feed=state,
        )  # fmt: skip
        store = run_store(self.config, RunDir(self.folder))
        store.clean()
        store.save(step, lambda folder: None, encode(meta))

    def trim(self, **before: dict[int, int]) -> None:
        """Removes what lies below the offsets given for partitions of topics."""
        delete_records(self.cluster, before)

    def evaluate(self, number: int, reward: float) -> None:
        record = Evaluation(
            version=Version(0, number), versions=(), task="sums", reward=reward, num_prompts=5
        )
        self.append("evaluations", 0, encode(record))

    def group(self, partition: int, offset: int, version: int, incarnation: int = 0) -> Group:
        group_id = self.group_id(partition, offset)
        rows = tuple(
            Trajectory(
                trajectory_id=f"{group_id}/{k}",
                group_id=group_id,
                task="sums",
                tokens=np.arange(5, dtype=np.int32),
                loss_mask=np.array([0, 0, 1, 1, 1], np.int8),
                logprobs=np.zeros(5, np.float32),
                segments=(Segment(2, 5, incarnation, version),),
                origin=Origin(self.cluster.topic("prompts"), partition, offset),
                reward=float(k),
                reward_parts={"length": 3.0},
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
