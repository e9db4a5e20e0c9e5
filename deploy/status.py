"""Where a run stands: an incremental fold of its log, and the health of its roles.

`RunStatus.read()` reads what is new in `policy`, `steps`, `trajectories` and `evaluations` and
answers the `status` object; `deploy.fold` is what it remembers of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from connectors.config import Config
from connectors.kafka.client import Cluster
from connectors.kafka.tail import PolicyTail
from connectors.records import (
    Evaluation,
    StepRecord,
    Version,
    decode_as,
)
from connectors.run_dir import RunDir
from deploy.fold import RECENT_STEPS, Fold, mean
from deploy.health import roles_of
from deploy.history import Follower
from trainer.staleness import configured_policy

SECONDS: Final = ("wait", "logprobs", "update", "publish")


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
        # From the end of the stream to its start: what ended is granted by the time that is read.
        for record in self._topics["evaluations"].news():
            with contextlib.suppress(msgspec.DecodeError):  # a foreign record
                self.fold.evaluate(decode_as(record.value, Evaluation))
        for record in self._topics["steps"].news():
            self.fold.step(record.offset, decode_as(record.value, StepRecord))
        for record in self._topics["trajectories"].news():
            self.fold.end(record)
        for _, announcement in self._tail.catch_up():
            self.fold.announce(announcement)
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
                "mean": mean([reward for _, reward in rewards[-RECENT_STEPS:]]),
            },
            "tokens_per_s": fold.tokens_per_s(),
            "publish_s": mean(
                [s for m in manifests[-RECENT_STEPS:] if (s := m.metrics.get("seconds/publish"))]
            ),
            "wait_share": fold.wait_share(),
            "epoch": fold.chain.epoch,
            "skipped": sum(m.skipped is not None for m in manifests),
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
                0, self.fold.num_settled - sum(groups[n] for n in ("trained", "closed", "dropped"))
            ),
        }


def _newest(evaluations: Sequence[Evaluation], version: Version | None) -> list[Evaluation]:
    """The newest evaluation of each task at `version`."""
    return list({e.task: e for e in evaluations if e.version == version}.values())
