"""Where a run stands: an incremental fold of its log, and the health of its roles.

`RunStatus.read()` reads what is new in `policy`, `steps`, `trajectories` and `evaluations` and
answers the `status` object. Of trajectories it keeps a set of settled prompts and counts, never
tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import msgspec

from connectors.config import Config
from connectors.kafka.client import Cluster, Record
from connectors.kafka.tail import PolicyTail
from connectors.records import (
    HEADER_KIND,
    Announcement,
    Closed,
    Evaluation,
    StepRecord,
    Version,
    decode_as,
)
from connectors.run_dir import RunDir
from deploy.health import roles_of
from deploy.history import Follower, Grants
from trainer.feed import configured_policy
from trainer.step_log import Chain

RECENT_STEPS: Final = 10
"""What `reward.mean`, `tokens_per_s` and `publish_s` look back on."""
SECONDS: Final = ("wait", "logprobs", "update", "publish")


@dataclass(slots=True)
class Fold:
    """The log so far. Pure: `RunStatus` feeds it."""

    grants: Grants = field(default_factory=Grants)
    chain: Chain = field(default_factory=Chain)
    settled: set[bytes] = field(default_factory=set)  # keys of groups that have a terminal
    closed_by_reason: Counter[str] = field(default_factory=Counter)
    closed: set[str] = field(default_factory=set)
    refunded: set[str] = field(default_factory=set)  # by announcements: closed or dropped
    evaluations: list[Evaluation] = field(default_factory=list)
    version: Version | None = None

    def announce(self, announcement: Announcement) -> None:
        self.grants.observe(announcement)
        self.refunded.update(announcement.closed)
        self.version = announcement.version

    def end(self, record: Record) -> None:
        """A record of `trajectories`; the first terminal of a group counts."""
        key = record.key or b""
        if key in self.settled:
            return
        self.settled.add(key)
        if record.headers.get(HEADER_KIND) == "closed":
            closed: Closed = decode_as(record.value, Closed)
            self.closed_by_reason[closed.reason] += 1
            self.closed.add(closed.group_id)

    def evaluate(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)

    # ------------------------------------------------------------------------------------ answers
    def groups(self) -> dict[str, int]:
        manifests = self.chain.manifests
        trained = sum(len(m.records) for m in manifests)
        dropped = len({g for m in manifests for g in m.dropped} | self.refunded - self.closed)
        granted = self.grants.num_granted
        return {
            "granted": granted,
            "trained": trained,
            "closed": len(self.closed),
            "dropped": dropped,
            "open": granted - trained - len(self.closed) - dropped,
        }

    def total(self, metric: str) -> float:
        return sum(m.metrics.get(metric, 0.0) for m in self.chain.manifests)

    def staleness(self) -> dict[str, float | None]:
        """Over all trained tokens; p99 is the largest of the steps' (theirs cannot be merged)."""
        found = [
            (m.metrics.get("tokens/trained", 1.0), m.staleness)
            for m in self.chain.manifests
            if m.staleness
        ]
        weight = sum(w for w, _ in found)
        if not weight:
            return {"mean": None, "p99": None, "max": None}
        return {
            "mean": sum(w * s.get("mean", 0.0) for w, s in found) / weight,
            "p99": max(s.get("p99", 0.0) for _, s in found),
            "max": max(s.get("max", 0.0) for _, s in found),
        }

    def rewards(self) -> list[tuple[int, float]]:
        """(step, mean training reward)."""
        return [
            (m.step, m.metrics["reward/mean"])
            for m in self.chain.manifests
            if "reward/mean" in m.metrics
        ]

    def held_out(self) -> list[tuple[int, float]]:
        """(version's number, mean held-out reward over the tasks), the newest of each version."""
        by_version: dict[Version, dict[str, Evaluation]] = {}
        for e in self.evaluations:
            by_version.setdefault(e.version, {})[e.task] = e
        return [
            (version.number, _mean([e.reward for e in tasks.values()]) or 0.0)
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
        pairs = [(a, b) for a, b in pairwise(self.chain.manifests) if a.epoch == b.epoch]
        elapsed_s = sum(b.finished_at - a.finished_at for a, b in pairs)
        wait_s = sum(b.metrics.get("seconds/wait", 0.0) for _, b in pairs)
        return wait_s / elapsed_s if elapsed_s > 0 else None


class RunStatus:
    """Reads one run's log for as long as it lives. KafkaFailure when there is no log to read."""

    def __init__(self, config: Config, run_dir: RunDir, cluster: Cluster) -> None:
        self._config, self._run_dir = config, run_dir
        self.fold = Fold()
        partitions = config.kafka.partitions
        self._tail = PolicyTail(cluster)
        self._topics = {
            name: Follower(cluster, name, 1 if name == "steps" else partitions)
            for name in ("prompts", "rollouts", "trajectories", "steps", "evaluations")
        }
        self._policy = configured_policy(config)

    def read(self) -> dict[str, Any]:
        """The `status` object, now."""
        self.catch_up()
        return self.answer()

    def catch_up(self) -> None:
        """Folds what was written up to the call."""
        for _, announcement in self._tail.catch_up():
            self.fold.announce(announcement)
        for record in self._topics["steps"].news():
            step: StepRecord = decode_as(record.value, StepRecord)
            self.fold.chain.observe(record.offset, step)
        for record in self._topics["trajectories"].news():
            self.fold.end(record)
        for record in self._topics["evaluations"].news():
            self.fold.evaluate(decode_as(record.value, Evaluation))
        for name in ("prompts", "rollouts"):
            self._topics[name].skip()

    def answer(self) -> dict[str, Any]:
        """The `status` object as of the last `catch_up`."""
        fold, manifests = self.fold, self.fold.chain.manifests
        rewards, held_out = fold.rewards(), fold.held_out()
        latest = fold.evaluations[-1].version if fold.evaluations else None
        return {
            "run": self._config.run.name,
            "step": fold.chain.step,
            "version": None if fold.version is None else msgspec.structs.asdict(fold.version),
            "policy": {
                "name": self._policy.name,
                "bound": self._policy.bound,
                "lookahead": self._config.staleness.lookahead,
            },
            "groups": fold.groups(),
            "closed_by_reason": dict(fold.closed_by_reason),
            "staleness": fold.staleness(),
            "tokens": {
                name: int(fold.total(f"tokens/{name}"))
                for name in ("generated", "trained", "masked", "dropped")
            },
            "seconds": {name: round(fold.total(f"seconds/{name}"), 3) for name in SECONDS},
            "eval": {
                "first": held_out[0][1] if held_out else None,
                "last": held_out[-1][1] if held_out else None,
                "num_prompts": sum(e.num_prompts for e in _newest(fold.evaluations, latest)),
            },
            "lag": self._lag(),
            "roles": roles_of(self._config, self._run_dir),
            "reward": {
                "last": rewards[-1][1] if rewards else None,
                "mean": _mean([reward for _, reward in rewards[-RECENT_STEPS:]]),
            },
            "tokens_per_s": fold.tokens_per_s(),
            "publish_s": _mean(
                [s for m in manifests[-RECENT_STEPS:] if (s := m.metrics.get("seconds/publish"))]
            ),
            "wait_share": fold.wait_share(),
            "epoch": fold.chain.epoch,
        }

    def close(self) -> None:
        self._tail.close()
        for topic in self._topics.values():
            topic.close()

    def _lag(self) -> dict[str, int]:
        """Records between two stages: prompts not granted, groups generating, being scored, waiting
        for the trainer."""
        written = {name: sum(topic.ends.values()) for name, topic in self._topics.items()}
        groups = self.fold.groups()
        granted = groups["granted"]
        return {
            "prompts": max(0, written["prompts"] - granted),
            "rollouts": max(0, granted - written["rollouts"]),
            "trajectories": max(0, written["rollouts"] - written["trajectories"]),
            "trainer": max(
                0, len(self.fold.settled) - sum(groups[n] for n in ("trained", "closed", "dropped"))
            ),
        }


def _newest(evaluations: Sequence[Evaluation], version: Version | None) -> list[Evaluation]:
    """The newest evaluation of each task at `version`."""
    return list({e.task: e for e in evaluations if e.version == version}.values())


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
