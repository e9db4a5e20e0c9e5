"""A run's log as the numbers that `status` shows, folded record by record.

Enter: announcements, the records of `steps` and `trajectories`, evaluations. Leave: counts and
averages, at a cost that does not grow with the log: sums are kept, not taken anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from connectors.arrow import CorruptRecord
from connectors.kafka.client import Record
from connectors.kafka.terminals import UnknownRecord, terminal
from connectors.records import (
    HEADER_KIND,
    Announcement,
    Closed,
    Evaluation,
    Manifest,
    StepRecord,
    Version,
    parse_group_id,
)
from deploy.history import Grants
from operators.settled import Intervals, settle
from trainer.step_log import Chain

RECENT_STEPS: Final = 10
"""What `reward.mean`, `tokens_per_s` and `publish_s` look back on."""


@dataclass(slots=True)
class StepSums:
    """Sums over the steps of a chain, each added once.

    staleness  over trained tokens: "mean" (weighted sum), "p99" and "max" (largest of the steps')
    elapsed_s  from step to step of the same trainer; `wait_s`: the part of it spent in `take`
    """

    num_steps: int = 0
    num_trained: int = 0
    dropped: set[str] = field(default_factory=set)
    metrics: dict[str, float] = field(default_factory=dict)
    staleness: dict[str, float] = field(default_factory=dict)
    staleness_weight: float = 0.0
    rewards: list[tuple[int, float]] = field(default_factory=list)  # (step, mean reward)
    elapsed_s: float = 0.0
    wait_s: float = 0.0
    last: Manifest | None = None

    def add(self, manifest: Manifest) -> None:
        self.num_steps += 1
        self.num_trained += len(manifest.records)
        self.dropped.update(manifest.dropped)
        for name, value in manifest.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        if "reward/mean" in manifest.metrics:
            self.rewards.append((manifest.step, manifest.metrics["reward/mean"]))
        self._add_staleness(manifest)
        if self.last is not None and self.last.epoch == manifest.epoch:
            self.elapsed_s += manifest.finished_at - self.last.finished_at
            self.wait_s += manifest.metrics.get("seconds/wait", 0.0)
        self.last = manifest

    def _add_staleness(self, manifest: Manifest) -> None:
        if not manifest.staleness:
            return
        weight, sums = manifest.metrics.get("tokens/trained", 1.0), self.staleness
        self.staleness_weight += weight
        sums["mean"] = sums.get("mean", 0.0) + weight * manifest.staleness.get("mean", 0.0)
        for name in ("p99", "max"):
            sums[name] = max(sums.get(name, 0.0), manifest.staleness.get(name, 0.0))


@dataclass(slots=True)
class Fold:
    """The log so far. Pure: `RunStatus` feeds it."""

    grants: Grants = field(default_factory=Grants)
    chain: Chain = field(default_factory=Chain)
    closed_by_reason: Counter[str] = field(default_factory=Counter)
    evaluations: list[Evaluation] = field(default_factory=list)
    version: Version | None = None
    _sums: StepSums = field(default_factory=StepSums)
    _settled: dict[tuple[str, int], Intervals] = field(default_factory=dict)
    _closed: set[str] = field(default_factory=set)  # by a terminal
    _refunded: set[str] = field(default_factory=set)  # by an announcement, and by no terminal yet

    def announce(self, announcement: Announcement) -> None:
        self.grants.observe(announcement)
        self._refunded.update(g for g in announcement.closed if g not in self._closed)
        self.version = announcement.version

    def step(self, offset: int, record: StepRecord) -> None:
        before = self.chain.manifests
        self.chain.observe(offset, record)
        if self.chain.manifests is not before:
            self._sums = StepSums()  # the log is a trimmed one, and the chain began anew
        for manifest in self.chain.manifests[self._sums.num_steps :]:
            self._sums.add(manifest)

    def end(self, record: Record) -> None:
        """A record of `trajectories`; the first terminal of a group counts."""
        group_id = (record.key or b"").decode(errors="replace")
        try:
            prompt = parse_group_id(group_id)
        except ValueError:
            return  # of no group
        place = (prompt.topic, prompt.partition)
        self._settled[place], is_first = settle(self._settled.get(place, ()), prompt.offset)
        if is_first and record.headers.get(HEADER_KIND) == "closed":
            self.closed_by_reason[_reason(record)] += 1
            self._closed.add(group_id)
            self._refunded.discard(group_id)

    def evaluate(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)

    # ------------------------------------------------------------------------------------ answers
    @property
    def num_settled(self) -> int:
        """Groups that have a terminal."""
        return sum(end - start for spans in self._settled.values() for start, end in spans)

    def groups(self) -> dict[str, int]:
        granted, trained = self.grants.num_granted, self._sums.num_trained
        closed = len(self._closed)
        dropped = len(self._sums.dropped | self._refunded)
        return {
            "granted": granted,
            "trained": trained,
            "closed": closed,
            "dropped": dropped,
            "open": granted - trained - closed - dropped,
        }

    def total(self, metric: str) -> float:
        return self._sums.metrics.get(metric, 0.0)

    def staleness(self) -> dict[str, float | None]:
        """Over all trained tokens; p99 is the largest of the steps' (theirs cannot be merged)."""
        sums, weight = self._sums.staleness, self._sums.staleness_weight
        if not weight:
            return {"mean": None, "p99": None, "max": None}
        return {"mean": sums["mean"] / weight, "p99": sums["p99"], "max": sums["max"]}

    def rewards(self) -> list[tuple[int, float]]:
        """(step, mean training reward)."""
        return self._sums.rewards

    def held_out(self) -> list[tuple[int, float]]:
        """(version's number, mean held-out reward over the tasks), the newest of each version."""
        by_version: dict[Version, dict[str, Evaluation]] = {}
        for e in self.evaluations:
            by_version.setdefault(e.version, {})[e.task] = e
        return [
            (version.number, mean([e.reward for e in tasks.values()]) or 0.0)
            for version, tasks in sorted(by_version.items())
        ]

    def tokens_per_s(self) -> float | None:
        """Tokens trained a second of wall time, over the recent steps."""
        recent = [
            m for m in self.chain.manifests[-RECENT_STEPS - 1 :] if m.epoch == self.chain.epoch
        ]  # of one trainer: the time between two of them is not training
        if len(recent) < 2:
            return None
        elapsed_s = recent[-1].finished_at - recent[0].finished_at
        tokens = sum(m.metrics.get("tokens/trained", 0.0) for m in recent[1:])
        return tokens / elapsed_s if elapsed_s > 0 else None

    def wait_share(self) -> float | None:
        """Share of the time from step to step that the trainer waited for groups; a trainer's first
        step and what lies between two trainers do not count."""
        elapsed_s = self._sums.elapsed_s
        return self._sums.wait_s / elapsed_s if elapsed_s > 0 else None


def mean(values: Sequence[float]) -> float | None:
    """None without values."""
    return sum(values) / len(values) if values else None


def _reason(record: Record) -> str:
    """Of a closed group; a record that cannot be read closes its group as malformed."""
    try:
        ended = terminal(record)
    except (CorruptRecord, UnknownRecord):
        return "malformed"
    return ended.reason if isinstance(ended, Closed) else "malformed"
