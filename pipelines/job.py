"""The bytewax job: the rollout half, the reward half, or both in one process.

`run_dataflow` returns after SIGTERM or SIGINT (sources end, the snapshot is written, nothing is
doubled) and raises when a part breaks its promise; the next start goes on from the last snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any, Final

import bytewax.operators as op
from bytewax._bytewax import cli_main
from bytewax.dataflow import Dataflow
from bytewax.errors import BytewaxRuntimeError

from connectors.config import Config
from connectors.engines.pool import EnginePool
from connectors.engines.types import Engine
from connectors.kafka.async_op import end_work
from connectors.kafka.client import BrokerUnavailable, Cluster, OffsetGone, Reader
from connectors.kafka.locate import cluster as find_cluster
from connectors.kafka.locate import topics
from connectors.kafka.source import STOP, SourceOf, StopFlag
from connectors.kafka.topics import cluster_id, ensure_topics, num_partitions
from connectors.run_dir import RunDir
from connectors.signals import stop_on_signals
from connectors.text import Text
from operators.rewards import Rewards
from operators.rollout import Rollout
from pipelines.recovery_folder import Belongs, RecoveryFolder, RecoveryLost
from pipelines.reward import (
    DropBefore,
    reward_half,
    rewards_operator,
    rollouts_source,
    score,
)
from pipelines.rollout import prompts_source, roll, rollout_half, rollout_operator

EPOCH_S: Final = 1.0
"""Between snapshots: what a killed job regenerates, and how often it writes a few KB."""
BROKER_WAIT_S: Final = 60.0
_WRITES: Final = {"rollout": "rollouts", "reward": "trajectories"}


def run_dataflow(
    config: Config,
    run_dir: RunDir,
    stages: set[str],
    *,
    engine: Engine | None = None,
    stop: StopFlag = STOP,
) -> None:
    """Runs the `stages` ("rollout", "reward") until SIGTERM, SIGINT or `stop`, on `engine` or on
    those the run names. ConfigError, BrokerUnavailable, RecoveryLocked or RecoveryLost when it
    cannot start or go on."""
    name = "dataflow" if len(stages) > 1 else next(iter(stages))
    stop_on_signals(stop)
    text = Text(config.resolve(config.model.path))
    rollout = rewards = None
    pool = EnginePool(lambda: run_dir.engine_urls(config))
    if "rollout" in stages:
        rollout = rollout_operator(config, engine or pool, text)
    if "reward" in stages:
        rewards = rewards_operator(config, text)
    with closing(RecoveryFolder(run_dir.recovery(name))) as folder:
        cluster = wait_for_log(config, run_dir, stop)
        if cluster is None:
            return
        trimmed = config.checkpoint.trim_log
        flow = build(cluster, rollout, rewards, stop, anew=folder.anew, trimmed=trimmed)
        run_dir.register(name)
        try:
            run_flow(
                flow,
                folder,
                belongs(flow, cluster, config.kafka.partitions),
                written=lambda: holding(cluster, [t for s, t in _WRITES.items() if s in stages]),
            )
        finally:
            end_work(pool.close)


def build(
    cluster: Cluster,
    rollout: Rollout | None,
    rewards: Rewards | None,
    stop: StopFlag = STOP,
    *,
    anew: bool = False,
    trimmed: bool = False,
) -> Dataflow:
    """The dataflow of the halves given. Its step names are in the snapshots: never rename one.
    `anew`: what was granted before this dataflow began may have lost its prompts to retention.
    `trimmed`: the trainer removes groups of `rollouts` that ended."""
    flow = Dataflow("headwater")
    sources = {}
    if rollout is not None:
        sources["prompts"] = prompts_source(cluster, stop, anew=anew)
    if rewards is not None:
        sources["rollouts"] = rollouts_source(cluster, stop, trimmed=trimmed)
    log = op.input("log", flow, SourceOf(sources))
    split = op.branch("topic", log, lambda pair: pair[1].origin.topic == cluster.topic("prompts"))
    if rollout is not None:
        rollout_half(split.trues, cluster, roll(rollout, cluster), stop)
    if rewards is not None:
        work = score(rewards, DropBefore(cluster), cluster)
        reward_half(split.falses, cluster, work, stop, trimmed=trimmed)
    return flow


def wait_for_log(config: Config, run_dir: RunDir, stop: StopFlag) -> Cluster | None:
    """The cluster with all topics in place; None when told to stop while waiting for it."""
    deadline = time.monotonic() + BROKER_WAIT_S
    while not stop.is_set():
        try:
            cluster = find_cluster(config, run_dir)
            ensure_topics(cluster, topics(config.kafka.partitions))
            return cluster
        except BrokerUnavailable:
            if time.monotonic() > deadline:
                raise
            stop.wait(0.2)
    return None


def holding(cluster: Cluster, topics: Sequence[str]) -> str | None:
    """The first of `topics` (without namespace) that anything was written to, None of none."""
    for topic in topics:
        offsets = dict.fromkeys(range(num_partitions(cluster, topic)), 0)
        with closing(Reader(cluster, cluster.topic(topic), offsets)) as reader:
            if any(reader.ends().values()):
                return cluster.topic(topic)
    return None


def _steps(flow: Dataflow) -> list[str]:
    return sorted(_named(flow.substeps))


def _named(operators: list[Any]) -> Iterator[str]:
    for operator in operators:
        yield operator.step_id
        yield from _named(getattr(operator, "substeps", []))


def belongs(
    flow: Dataflow, cluster: Cluster, partitions: int, work: dict[str, Any] | None = None
) -> Belongs:
    """What snapshots of `flow` on this log are of."""
    return Belongs(
        steps=tuple(_steps(flow)),
        log=cluster_id(cluster),
        namespace=cluster.namespace,
        partitions=partitions,
        work=work or {},
    )


def run_flow(
    flow: Dataflow,
    folder: RecoveryFolder,
    of: Belongs,
    *,
    written: Callable[[], str | None],
) -> None:
    """Runs it to its end on the snapshots in `folder`. bytewax's own errors say where in the flow;
    the cause says what, so that is raised. RecoveryLost also when retention passed what a resumed
    source or work in flight needs."""
    recovery = folder.prepare(of, written)
    try:
        cli_main(  # type: ignore[no-untyped-call]
            flow,
            workers_per_process=1,
            epoch_interval=timedelta(seconds=EPOCH_S),
            recovery_config=recovery,
        )
    except BytewaxRuntimeError as error:
        cause: BaseException = error
        while isinstance(cause, BytewaxRuntimeError) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, OffsetGone):
            raise RecoveryLost(f"{cause}; {folder.remedy}") from error
        if isinstance(cause, Exception) and cause is not error:
            raise cause from error
        raise
