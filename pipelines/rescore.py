"""Scores a range of a run's rollouts again, with another reward, into another namespace.

rollouts of the run, first to last ─▶ [first terminal] ─▶ [score] ─▶ NS trajectories
                                                                 └─▶ NS dead-letters

The reward half of the dataflow with another source and another scorer: what closed before scoring
passes through, no version is too old, and every group gets the new reward, also those that an agent
had rewarded. Killed and started again it goes on: each group is written once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Final

import bytewax.operators as op
import msgspec
from bytewax.dataflow import Dataflow

from connectors.config import Config, ConfigError
from connectors.kafka.async_op import end_work
from connectors.kafka.client import Cluster, Reader
from connectors.kafka.source import LogSource, StopFlag
from connectors.kafka.topics import ensure_topics
from connectors.records import Closed, Group
from connectors.run_dir import RunDir
from connectors.text import Text
from operators.rewards import Rewards
from pipelines.job import belongs, holding, run_flow
from pipelines.recovery_folder import RecoveryFolder
from pipelines.reward import reward_half, rewards_operator, score

TOPICS: Final = ("trajectories", "dead-letters")
Span = tuple[Mapping[int, int], Mapping[int, int]]
"""By partition of `rollouts`, the first offset and the one to stop before."""


class Rescoring(msgspec.Struct, frozen=True, kw_only=True):
    """`reward` and the `task` it is for (None: all tasks); per partition of `rollouts` the `first`
    offset and the one to stop before. Remembered beside the snapshots."""

    reward: str
    task: str | None
    first: dict[str, int]
    stop: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """`done`: the whole range is scored. `written`: records, by this call; `records`,
    `dead_letters`: in the namespace now."""

    what: Rescoring
    done: bool
    written: int
    records: int
    dead_letters: int


def rescore(
    config: Config,
    run_dir: RunDir,
    rollouts: Cluster,
    namespace: str,
    *,
    reward: str,
    task: str | None,
    span: Span | None,
    stop: StopFlag,
) -> Rescored:
    """Scores until the range is done or `stop`. `rollouts`: the run's log. `span`: the range to
    score; None goes on with the range of an earlier start, or takes all there is. RecoveryLost when
    the namespace holds another rescoring; ConfigError for what cannot be scored."""
    into = dataclasses.replace(rollouts, namespace=namespace)
    if namespace == config.run.namespace:
        raise ConfigError(f"--namespace {namespace}: is the run's own; name another")
    ensure_topics(into, dict.fromkeys(TOPICS, config.kafka.partitions))
    changed = _with_reward(config, reward, task)
    rewards = rewards_operator(changed, Text(config.resolve(config.model.path)))
    folder = RecoveryFolder(run_dir.recovery(f"rescore-{namespace.strip('.')}"))
    with closing(folder):
        known = folder.known()
        if span is None and known is not None and not folder.anew:
            was = msgspec.convert(known.work, Rescoring)
            what = msgspec.structs.replace(was, reward=reward, task=task)
        else:
            first, last = span or _all(rollouts, config.kafka.partitions)
            what = Rescoring(reward=reward, task=task, first=_named(first), stop=_named(last))
        before = _count(into, "trajectories", config.kafka.partitions)
        flow = _build(rollouts, into, rewards, what, stop)
        of = belongs(flow, into, config.kafka.partitions, msgspec.to_builtins(what))
        try:
            run_flow(flow, folder, of, written=lambda: holding(into, TOPICS[:1]))
        finally:
            end_work(_nothing)
    counts = {topic: _count(into, topic, config.kafka.partitions) for topic in TOPICS}
    return Rescored(
        what=what,
        done=not stop.is_set(),
        written=counts["trajectories"] - before,
        records=counts["trajectories"],
        dead_letters=counts["dead-letters"],
    )


def _build(
    rollouts: Cluster, into: Cluster, rewards: Rewards, what: Rescoring, stop: StopFlag
) -> Dataflow:
    async def afresh(group: Group) -> Group | Closed:
        unscored = (
            dataclasses.replace(row, reward=float("nan"), reward_parts={})
            for row in group.trajectories
        )
        return await rewards(dataclasses.replace(group, trajectories=tuple(unscored)))

    def wanted(ended: Group | Closed) -> bool:
        return what.task is None or ended.task == what.task

    flow = Dataflow("headwater")
    # A partition outside the range is one whose range is empty.
    source = LogSource(
        rollouts,
        "rollouts",
        granted=False,
        stop=stop,
        first={int(p): at for p, at in what.first.items()},
        end={int(p): at for p, at in what.stop.items()},
    )
    log = op.input("log", flow, source)
    reward_half(log, rollouts, score(afresh, None, into, wanted), stop, into=into)
    return flow


def _with_reward(config: Config, reward: str, task: str | None) -> Config:
    if task is not None and task not in config.tasks:
        raise ConfigError(f"--task {task}: the run has only {', '.join(config.tasks)}")
    tasks = {
        name: section.model_copy(update={"reward": reward})
        for name, section in config.tasks.items()
        if task in (None, name)
    }
    return config.model_copy(update={"tasks": tasks})


def _all(rollouts: Cluster, partitions: int) -> Span:
    offsets = dict.fromkeys(range(partitions), 0)
    with closing(Reader(rollouts, rollouts.topic("rollouts"), offsets)) as reader:
        return reader.starts(), reader.ends()


def _named(offsets: Mapping[int, int]) -> dict[str, int]:
    return {str(p): at for p, at in offsets.items()}


def _count(cluster: Cluster, topic: str, partitions: int) -> int:
    offsets = dict.fromkeys(range(partitions), 0)
    with closing(Reader(cluster, cluster.topic(topic), offsets)) as reader:
        return sum(reader.ends().values())


async def _nothing() -> None:
    """No client has to be closed."""
