"""The bytewax job: the rollout half, the reward half, or both in one process.

`run_dataflow` returns after SIGTERM or SIGINT (sources end, the snapshot is written, nothing is
doubled) and raises when a part breaks its promise; the next start goes on from the last snapshot.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import bytewax.operators as op
import msgspec
from bytewax._bytewax import cli_main
from bytewax.dataflow import Dataflow
from bytewax.errors import BytewaxRuntimeError
from bytewax.recovery import RecoveryConfig, init_db_dir

from connectors.config import Config
from connectors.engines.client import EnginePool
from connectors.engines.types import Engine
from connectors.files import FileLock, Locked, replace_file
from connectors.kafka.async_op import end_work
from connectors.kafka.client import BrokerUnavailable, Cluster, Reader
from connectors.kafka.locate import cluster as find_cluster
from connectors.kafka.locate import topics
from connectors.kafka.source import STOP, SourceOf, StopFlag
from connectors.kafka.topics import ensure_topics, num_partitions
from connectors.run_dir import RunDir
from connectors.signals import stop_on_signals
from connectors.text import Text
from operators.rewards import Rewards
from operators.rollout import Rollout
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
_STEPS_FILE: Final = "steps.json"
_RESTART_FILE: Final = "restart"
"""Put there by hand: begin anew. What was written before stays, and counts."""


class RecoveryLocked(RuntimeError):
    """Another process works on this recovery folder."""


class RecoveryLost(RuntimeError):
    """The recovery folder is gone, damaged, or of a differently named dataflow."""


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
    cannot start."""
    name = "dataflow" if len(stages) > 1 else next(iter(stages))
    folder = run_dir.recovery(name)
    stop_on_signals(stop)
    text = Text(config.resolve(config.model.path))
    rollout = rewards = None
    pool = EnginePool(lambda: run_dir.engine_urls(config))
    if "rollout" in stages:
        rollout = rollout_operator(config, engine or pool, text)
    if "reward" in stages:
        rewards = rewards_operator(config, text)
    with closing(_lock(folder)):
        cluster = wait_for_log(config, run_dir, stop)
        if cluster is None:
            return
        flow = build(cluster, rollout, rewards, stop)
        _prepare_recovery(folder, flow, cluster, stages)
        run_dir.register(name)
        try:
            _run(flow, RecoveryConfig(folder))
        finally:
            end_work(pool.close)


def build(
    cluster: Cluster, rollout: Rollout | None, rewards: Rewards | None, stop: StopFlag = STOP
) -> Dataflow:
    """The dataflow of the halves given. Its step names are in the snapshots: never rename one."""
    flow = Dataflow("headwater")
    sources = {}
    if rollout is not None:
        sources["prompts"] = prompts_source(cluster, stop)
    if rewards is not None:
        sources["rollouts"] = rollouts_source(cluster, stop)
    log = op.input("log", flow, SourceOf(sources))
    split = op.branch("topic", log, lambda pair: pair[1].origin.topic == cluster.topic("prompts"))
    if rollout is not None:
        rollout_half(split.trues, cluster, roll(rollout, cluster), stop)
    if rewards is not None:
        reward_half(split.falses, cluster, score(rewards, DropBefore(cluster), cluster), stop)
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


def _lock(folder: Path) -> FileLock:
    """Two processes on one recovery folder would both run. RecoveryLocked for the second."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(folder / "lock")
    except Locked as error:
        raise RecoveryLocked(
            f"{folder} is locked: process {error.pid} runs this dataflow"
        ) from error


def _prepare_recovery(folder: Path, flow: Dataflow, cluster: Cluster, stages: set[str]) -> None:
    """A new folder for a new run, or a check that the old one is whole and of this dataflow.
    bytewax silently drops the state of a renamed step and dies on a lost file without saying which.
    """
    steps_file, steps = folder / _STEPS_FILE, _steps(flow)
    restart = folder / _RESTART_FILE
    if restart.exists():
        steps_file.unlink(missing_ok=True)
    databases = sorted(folder.glob("part-*.sqlite3"))
    if steps_file.exists():
        if not databases:
            raise RecoveryLost(f"{folder} has lost its database; {_remedy(folder)}")
        _check_databases(folder, databases)
        known = msgspec.json.decode(steps_file.read_bytes(), type=list[str])
        if known != steps:
            changed = sorted(set(known) ^ set(steps))
            raise RecoveryLost(
                f"{folder} is of a dataflow with other steps ({', '.join(changed)}): their state "
                f"would be lost; run the version that wrote it, or {_remedy(folder)}"
            )
        return
    for file in folder.glob("part-*"):  # of a start that was killed before the first snapshot
        file.unlink()
    if not restart.exists() and not databases and (written := _written(cluster, stages)):
        raise RecoveryLost(
            f"{folder} is empty, but {written} holds this dataflow's records; {_remedy(folder)}"
        )
    init_db_dir(folder, 1)
    replace_file(steps_file, msgspec.json.encode(steps))
    restart.unlink(missing_ok=True)


def _check_databases(folder: Path, databases: Sequence[Path]) -> None:
    for file in databases:
        try:
            with closing(sqlite3.connect(file)) as database:
                found = database.execute("PRAGMA quick_check").fetchone()[0]
        except sqlite3.DatabaseError as error:
            found = str(error)
        if found != "ok":
            raise RecoveryLost(f"{file} is damaged ({found}); {_remedy(folder)}")


def _remedy(folder: Path) -> str:
    return (
        f"restore the folder from a copy, or create the file {folder / _RESTART_FILE} to work "
        "through all granted prompts again (what was written stays, the rest is generated anew)"
    )


def _written(cluster: Cluster, stages: set[str]) -> str | None:
    """The topic a run of these stages has written to, None for a new run."""
    topics = [t for s, t in (("rollout", "rollouts"), ("reward", "trajectories")) if s in stages]
    for topic in topics:
        count = num_partitions(cluster, topic)
        reader = Reader(cluster, cluster.topic(topic), dict.fromkeys(range(count), 0))
        try:
            if any(reader.ends().values()):
                return cluster.topic(topic)
        finally:
            reader.close()
    return None


def _steps(flow: Dataflow) -> list[str]:
    return sorted(_named(flow.substeps))


def _named(operators: list[Any]) -> Iterator[str]:
    for operator in operators:
        yield operator.step_id
        yield from _named(getattr(operator, "substeps", []))


def _run(flow: Dataflow, recovery: RecoveryConfig) -> None:
    """bytewax's own errors say where in the flow; the cause says what, so that is raised."""
    try:
        cli_main(  # type: ignore[no-untyped-call]
            flow,
            workers_per_process=1,
            epoch_interval=timedelta(seconds=EPOCH_S),
            recovery_config=recovery,
        )
    except BytewaxRuntimeError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, Exception) and cause is not error:
            raise cause from error
        raise
