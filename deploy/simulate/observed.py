"""What a run's log says of its speed: samples, groups and steps as numbers, the newest of a long
run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from connectors.arrow import CorruptRecord
from connectors.kafka.client import Cluster, Record
from connectors.kafka.terminals import UnknownRecord, terminal
from connectors.records import Group, Manifest, Trajectory
from deploy.history import Follower
from deploy.step_sums import StepSums
from trainer.step_log import read_steps

NEWEST_GROUPS: Final = 4_000
NEWEST_STEPS: Final = 500
MOST_PUBLISHED: Final = 50


@dataclass(slots=True)
class Rollouts:
    """Of `trajectories`. A sample is one trajectory with its branches.

    started, ended, tokens, prompt_tokens, turns   one entry a sample; Unix seconds
    reward_s        of each group, from its last sample's end until it is in the topic
    num_groups, closed   ends by kind; `closed` by reason
    """

    started: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    reward_s: list[float] = field(default_factory=list)
    num_groups: int = 0
    closed: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, cluster: Cluster, num_partitions: int) -> Rollouts:
        found = cls()
        with closing(Follower(cluster, "trajectories", range(num_partitions))) as follower:
            follower.skip()
            for partition, end in follower.ends.items():
                follower.seek(partition, end - NEWEST_GROUPS // num_partitions)
            for record in follower.news():
                found.observe(record)
        return found

    def observe(self, record: Record) -> None:
        """What cannot be read says nothing, and is the audit's to name."""
        try:
            ended = terminal(record)
        except (CorruptRecord, UnknownRecord):
            return
        if not isinstance(ended, Group):
            self.closed[ended.reason] += 1
            return
        rows = [row for row in ended.trajectories if row.source == "rollout"]
        if not rows:
            return
        self.num_groups += 1
        samples: dict[str, list[Trajectory]] = {}
        for row in rows:
            k = row.trajectory_id.removeprefix(row.group_id + "/").partition("/")[0]
            samples.setdefault(k, []).append(row)
        for branches in samples.values():
            self._sample(branches)
        last = max(row.finished_at for row in rows)
        self.reward_s.append(max(0.0, record.timestamp_ms / 1000 - last))

    def _sample(self, branches: list[Trajectory]) -> None:
        written = [sum(s.end - s.start for s in row.segments) for row in branches]
        self.started.append(min(row.created_at for row in branches))
        self.ended.append(max(row.finished_at for row in branches))
        self.tokens.append(max(1, sum(written)))
        self.prompt_tokens.append(max(0, len(branches[0].tokens) - written[0]))
        self.turns.append(sum(row.turns for row in branches))


@dataclass(slots=True)
class Steps:
    """Of `steps`.

    seconds, tokens   of each step with a step before it: without waiting; trained
    publish_s         of each publish
    """

    seconds: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    publish_s: list[float] = field(default_factory=list)
    sums: StepSums = field(default_factory=StepSums)

    @classmethod
    def of(cls, cluster: Cluster) -> Steps:
        newest: deque[Manifest] = deque(maxlen=NEWEST_STEPS)
        for _, record in read_steps(cluster):
            if isinstance(record, Manifest):
                slim = msgspec.structs.replace(record, micro_batches=(), environment={})
                newest.append(slim)
        return cls().observe(newest)

    def observe(self, manifests: Iterable[Manifest]) -> Steps:
        last: Manifest | None = None
        for manifest in manifests:
            self.sums.add(manifest, last)
            elapsed_s, wait_s, trained = (
                self.sums.recent(name, 1)[0] for name in ("elapsed_s", "wait_s", "tokens/trained")
            )
            if elapsed_s > 0:
                self.seconds.append(max(0.0, elapsed_s - wait_s))
                self.tokens.append(trained)
                self.publish_s.append(manifest.metrics.get("seconds/publish", 0.0))
            last = manifest
        return self

    def came_to(self) -> dict[str, Any]:
        """By the names of an outcome's JSON; from the first step's end to the last one's."""
        sums, elapsed_s = self.sums, self.sums["elapsed_s"]
        weight = sums["staleness_weight"]
        return {
            "steps_per_hour": 3600 * len(self.seconds) / elapsed_s,
            "trained_tokens_per_s": sum(self.tokens) / elapsed_s,
            "trainer_wait_share": sums["wait_s"] / elapsed_s,
            "staleness": {
                "mean": sums["staleness_sum"] / weight if weight else None,
                "p99": sums["staleness_p99"],
                "max": sums["staleness_max"],
            },
        }
