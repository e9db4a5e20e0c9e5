"""Where a run stands: an incremental fold of its log, and the health of its roles.

`RunStatus.read()` reads what is new in `policy`, `steps`, `trajectories` and `evaluations` and
answers the `status` object; `deploy.fold` is what it remembers of them.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from connectors.config import Config
from connectors.kafka.client import Cluster
from connectors.kafka.parsed import parsed
from connectors.kafka.tail import PolicyTail
from connectors.records import Evaluation, StepRecord
from connectors.run_dir import RunDir
from deploy.base import StepRecords, Unprovable, base_of
from deploy.fold import RECENT_STEPS, Fold, mean
from deploy.health import roles_of
from deploy.held_out import held_out
from deploy.history import Follower, Prompts
from deploy.nearline_sums import Ends
from trainer import stall
from trainer.alerts import alerts
from trainer.staleness import configured_policy, lookahead_of
from trainer.traffic import topics_of

SECONDS: Final = ("wait", "logprobs", "update", "publish")


class RunStatus:
    """Reads one run's log for as long as it lives. KafkaFailure when there is no log to read."""

    def __init__(self, config: Config, run_dir: RunDir, cluster: Cluster) -> None:
        self._config, self._run_dir = config, run_dir
        partitions = range(config.kafka.partitions)
        self.incomplete: str | None = None
        steps = StepRecords.now(cluster)
        try:
            base = base_of(config, run_dir, cluster, steps)
        except Unprovable as error:
            base, self.incomplete = None, str(error)
        feed = base.feed if base is not None else None
        ends = Ends(topics_of(cluster), feed.traffic if feed else None)
        self.fold = Fold(Prompts(cluster.topic("prompts"), feed), base, ends)
        self._tail = PolicyTail(
            cluster, offset=feed.policy_offset if feed else 0, epoch=feed.epoch if feed else -1
        )
        self._topics = {
            name: Follower(cluster, name, [0] if name == "steps" else partitions)
            for name in ("prompts", "rollouts", "trajectories", "steps", "evaluations")
        }
        for partition, offset in (feed.terminals_from() if feed else {}).items():
            self._topics["trajectories"].seek(partition, offset)
        self._policy = configured_policy(config)

    def read(self) -> dict[str, Any]:
        """The `status` object, now."""
        self.catch_up()
        return self.answer()

    def catch_up(self) -> None:
        """Folds what was written up to the call."""
        self._hear()
        for _, evaluation in parsed(self._topics["evaluations"].news(), Evaluation):
            self.fold.evaluate(evaluation)
        foreign: dict[int, str] = {}
        for offset, step in parsed(self._topics["steps"].news(), StepRecord, foreign):
            self.fold.step(offset, step)
        if foreign:
            self.incomplete = "; ".join(foreign.values())
        for record in self._topics["trajectories"].news():
            self.fold.end(record)
        self._hear()  # again: what has ended by now is granted by what is there now
        for name in ("prompts", "rollouts"):
            self._topics[name].skip()

    def _hear(self) -> None:
        for _, announcement in self._tail.catch_up():
            self.fold.announce(announcement)

    def answer(self) -> dict[str, Any]:
        """The `status` object as of the last `catch_up`."""
        fold = self.fold
        rewards = fold.rewards(RECENT_STEPS)
        return {
            "run": self._config.run.name,
            "step": fold.chain.step,
            "version": None if fold.version is None else msgspec.structs.asdict(fold.version),
            "policy": {
                "name": self._policy.name,
                "bound": self._policy.bound,
                "lookahead": lookahead_of(self._policy),
            },
            "groups": fold.groups(),
            "closed_by_reason": dict(fold.closed_by_reason),
            "staleness": fold.staleness(),
            "staleness_actions": fold.staleness_actions(),
            "stall": stall.kept(self._run_dir),
            "alerts": list(alerts(fold.last, self._config.trainer.gap_alert)),
            "tokens": fold.tokens(),
            "seconds": {name: round(fold.total(f"seconds/{name}"), 3) for name in SECONDS},
            "eval": held_out(fold.held_out()),
            "lag": self._lag(),
            "roles": roles_of(self._config, self._run_dir),
            "reward": {
                "last": rewards[-1][1] if rewards else None,
                "mean": mean([reward for _, reward in rewards]),
            },
            "tokens_per_s": fold.tokens_per_s(),
            "publish_s": fold.publish_s(),
            "wait_share": fold.wait_share(),
            "epoch": fold.chain.epoch,
            "skipped": int(fold.total("skipped")),
            "nearline": None if self._config.nearline is None else fold.nearline(),
            "lineage": fold.lineage(),
            "given_up": fold.given_up,
            "from_step": 1 if fold.base is None else fold.base.step + 1,
            "incomplete": self.incomplete,
        }

    def close(self) -> None:
        self._tail.close()
        for topic in self._topics.values():
            topic.close()

    def _lag(self) -> dict[str, int]:
        """Records between two stages: prompts not granted, groups generating, being scored, waiting
        for the trainer."""
        written = {name: sum(topic.ends.values()) for name, topic in self._topics.items()}
        granted = self.fold.prompts.num_granted
        of_prompts = written["rollouts"] - self.fold.traffic.num_terminals
        return {
            "prompts": max(0, written["prompts"] - granted),
            "rollouts": max(0, granted - of_prompts),
            "trajectories": max(0, written["rollouts"] - written["trajectories"]),
            "trainer": self.fold.num_ready(),
        }
