"""Where the part of a run's log that is kept begins, and what was known there.

A whole log begins at its first records. A trimmed one (or one that retention passed) begins at the
oldest checkpoint whose later manifests and terminals are all kept: the ledger in it (`FeedState`)
says what had become of every prompt by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

import msgspec

from connectors.config import Config
from connectors.kafka.client import Cluster, Reader
from connectors.kafka.locate import topics
from connectors.kafka.parsed import parsed
from connectors.kafka.topics import partition_counts
from connectors.records import Begin, Manifest, StepRecord
from connectors.run_dir import RunDir
from deploy.history import slim
from trainer.checkpoint import CheckpointFailed, CorruptCheckpoint, run_store
from trainer.checkpoint_meta import CheckpointMeta
from trainer.step_log import Chain

READ: Final = ("prompts", "rollouts", "trajectories", "policy", "steps")
"""Topics that the audit reads."""


class Unprovable(RuntimeError):
    """Neither the whole log nor a checkpoint from which it is whole is there."""


@dataclass(slots=True, kw_only=True)
class Survey:
    """`steps` read once: which manifests count, and which of them were given up.

    breaks        what the chain itself does not check
    num_void      manifests that a fenced trainer wrote
    first         manifest that counts
    first_epoch   of the manifests before the first `Begin`, in a trimmed log
    """

    chain: Chain = field(default_factory=Chain)
    breaks: list[str] = field(default_factory=list)
    num_void: int = 0
    first: Manifest | None = None
    first_epoch: int = -1
    _begun: bool = False

    def observe(self, offset: int, record: StepRecord) -> None:
        if isinstance(record, Begin):
            self._begin(offset, record)
            return
        if self._begun and record.epoch > self.chain.epoch:
            self.breaks.append(
                f"step {record.step} at offset {offset} names epoch {record.epoch}, which never "
                "began"
            )
        kept = slim(record)
        self.chain.observe(offset, kept)
        if not self._begun:
            self.first_epoch = self.chain.epoch
        manifests = self.chain.manifests
        counts = bool(manifests) and manifests[-1] is kept
        self.num_void += not counts
        if len(manifests) == 1 and counts and not self.chain.given_up:
            self.first = kept

    def _begin(self, offset: int, begin: Begin) -> None:
        self._begun = True
        digest = self.chain.digest_at(begin.fork.number) if begin.fork else None
        num_forks = len(self.chain.forks)
        self.chain.observe(offset, begin)
        if begin.fork is None or len(self.chain.forks) == num_forks:
            return
        if begin.fork.reason == "rollback" and digest not in (None, begin.digest):
            self.breaks.append(
                f"incarnation {begin.incarnation} was forked after step {begin.fork.number} with "
                f"{begin.digest}; that step had left {digest}"
            )

    @property
    def rollbacks(self) -> list[Begin]:
        return [b for b in self.chain.forks if b.fork and b.fork.reason == "rollback"]

    def given_up_by(self, manifest: Manifest) -> Begin | None:
        """The rollback that gave up a manifest that counted, None while it is on the chain."""
        return next(
            (
                begin
                for begin in self.rollbacks
                if begin.fork and (begin.epoch or 0) > manifest.epoch
                and manifest.step > begin.fork.number
            ),
            None,
        )  # fmt: skip


def counted(
    records: Iterable[tuple[int, StepRecord]], survey: Survey
) -> Iterator[Begin | Manifest]:
    """The forks that count, each with its epoch, and the manifests of no fenced trainer, given-up
    ones too, in log order."""
    forks = {begin.epoch: begin for begin in survey.chain.forks}
    epoch = survey.first_epoch
    for offset, record in records:
        if isinstance(record, Begin):
            epoch = offset
            if (fork := forks.get(epoch)) is not None:
                yield fork
        elif record.epoch == epoch:
            yield record


def surveyed(records: Iterable[tuple[int, StepRecord]]) -> Survey:
    found = Survey()
    for offset, record in records:
        found.observe(offset, record)
    return found


@dataclass(slots=True)
class StepRecords:
    """`steps` from its start to `end`, read anew at each iteration; what is no record of it is
    named in `unreadable`."""

    cluster: Cluster
    end: int
    unreadable: dict[int, str] = field(default_factory=dict)

    @classmethod
    def now(cls, cluster: Cluster) -> StepRecords:
        """Up to the end at the call."""
        with closing(Reader(cluster, cluster.topic("steps"), {0: 0})) as reader:
            return cls(cluster, reader.ends()[0])

    def __iter__(self) -> Iterator[tuple[int, StepRecord]]:
        with closing(Reader(self.cluster, self.cluster.topic("steps"), {0: 0})) as reader:
            reader.rewind()
            records = reader.read_to({0: self.end}, 5_000)
            before = takewhile(lambda record: record.offset < self.end, records)
            yield from parsed(before, StepRecord, self.unreadable)


def check_partitions(config: Config, cluster: Cluster) -> None:
    """Unprovable when a topic is missing or has another partition count than the run began with."""
    there = partition_counts(cluster, READ)
    for name in READ:
        count = topics(config.kafka.partitions)[name]
        if there.get(name) != count:
            raise Unprovable(
                f"topic {cluster.topic(name)} has {there.get(name, 'no')} partitions, the run "
                f"began with {count}: set kafka.partitions to that, or restore the topic"
            )


def base_of(
    config: Config, run_dir: RunDir, cluster: Cluster, steps: Iterable[tuple[int, StepRecord]]
) -> CheckpointMeta | None:
    """What is known where the kept log begins; None for a whole log. Unprovable when a trimmed log
    goes on from no checkpoint that is kept."""
    starts = {name: _starts(cluster, name, count) for name, count in (
        ("steps", 1), ("trajectories", config.kafka.partitions), ("policy", 1),
    )}  # fmt: skip
    gone = [
        f"{name}/{partition} before {start}"
        for name, parts in starts.items()
        for partition, start in parts.items()
        if start > 0
    ]
    if not gone:
        return None
    survey = surveyed(steps)
    store, passed_over = run_store(config, run_dir), []
    try:
        for step in store.steps():
            try:
                kept = msgspec.json.decode(store.meta(step), type=CheckpointMeta)
            except (CorruptCheckpoint, msgspec.DecodeError) as error:
                passed_over.append(f"step {step}: {error}")
                continue
            why = _unfit(kept, survey, starts)
            if why is None:
                return kept
            passed_over.append(f"step {step}: {why}")
    except CheckpointFailed as error:
        passed_over.append(str(error))
    raise Unprovable(
        f"the log does not hold {', '.join(gone)} any more, and no checkpoint it goes on from is "
        f"kept ({'; '.join(passed_over) or 'there is none'}): what was there cannot be proven"
    )


def _unfit(kept: CheckpointMeta, survey: Survey, starts: dict[str, dict[int, int]]) -> str | None:
    """Why the log does not go on from that checkpoint, or None."""
    chain, feed = survey.chain, kept.feed
    if not kept.counts(chain):
        return "it is not on the chain, or the steps after it are gone"
    if feed.policy_offset < starts["policy"][0]:
        return f"policy is needed from {feed.policy_offset}, it starts at {starts['policy'][0]}"
    needed = feed.terminals_from()
    for partition, start in starts["trajectories"].items():
        if needed.get(partition, 0) < start:
            return (
                f"trajectories/{partition} is needed from {needed.get(partition, 0)}, it starts at "
                f"{start}"
            )
    return None


def _starts(cluster: Cluster, topic: str, count: int) -> dict[int, int]:
    offsets = dict.fromkeys(range(count), 0)
    with closing(Reader(cluster, cluster.topic(topic), offsets)) as reader:
        return reader.starts()
