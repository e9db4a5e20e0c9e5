"""One live run of an experiment on staleness: from a setting to a record, which is read from the
run's log.

    Setting ──▶ headwater run --json ──▶ the run's log ──▶ Record
                                             └──▶ simulator ──┘

A run that was interrupted leaves no record. It begins anew, because its clock would count the
interruption.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.staleness_records import Predicted, Record, Setting, Step, steps_per_hour
from connectors.arrow import decode_group
from connectors.config import Config
from connectors.kafka.client import Cluster, read_all
from connectors.records import HEADER_KIND, Announcement, Manifest, PolicyRecord, decode_as
from connectors.run_dir import RunDir
from deploy import run_folder
from deploy.launcher import headwater_command, last_line
from deploy.log import opened
from deploy.simulate.outcome import Outcome
from deploy.simulate.sources import from_run
from deploy.simulate.subjects import subjects
from deploy.simulate.world import simulate
from trainer.stall import kept
from trainer.step_log import chain, read_steps

NUM_SIMULATED: Final = 5
"""Seeds that a prediction is the mean of."""
STOP_S: Final = 90.0


class Failed(RuntimeError):
    """The run came to nothing that could be recorded; one line says why."""


# ------------------------------------------------------------------------------------ running
def run(
    config: Path, setting: Setting, folder: Path, *, model: Path, limit_s: float, predict: bool
) -> Record:
    """Runs it in `folder`, which is removed first. Failed when it does not train its steps within
    `limit_s`, unless it stalled: then it is ended and recorded as such. EnvironmentFailure when
    another run is at work in `folder`."""
    run_dir = RunDir(folder)
    with run_folder.locked(run_dir):
        shutil.rmtree(folder)
    arguments = ["run", str(config), "--run-dir", str(folder), "--json"]
    overrides = (f"model.path={json.dumps(str(model.resolve()))}", *setting.overrides())
    sets = [part for override in overrides for part in ("--set", override)]
    began = time.monotonic()
    folder.mkdir(parents=True)
    answer, said = folder / "status.json", folder / "run.log"
    with answer.open("wb") as out, said.open("wb") as err:
        process = subprocess.Popen(headwater_command(*arguments, *sets), stdout=out, stderr=err)
        try:
            stalled, ended = _watch(process, run_dir, began + limit_s)
        finally:
            _stop(process)
    if not ended and stalled is None:
        raise Failed(f"not done within {limit_s:g} s ({last_line(said)})")
    if process.returncode != 0:
        raise Failed(f"exit code {process.returncode}: {last_line(said)}")
    status = json.loads(answer.read_bytes())
    took_s = time.monotonic() - began
    config = run_folder.load_run(run_dir)
    with opened(config, run_dir) as cluster:
        record = read(config, cluster, setting, status, took_s=took_s, stalled=stalled)
        if not predict or stalled is not None:
            return record
        predicted = prediction(config, folder, cluster, len(record.steps))
    return msgspec.structs.replace(record, predicted=predicted)


def _watch(
    process: subprocess.Popen[bytes], run_dir: RunDir, deadline: float
) -> tuple[str | None, bool]:
    """The report of a stall, and whether the run ended by itself."""
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return None, True
        if (report := kept(run_dir)) is not None:
            return report, False
        time.sleep(0.2)
    return None, False


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ------------------------------------------------------------------------------------ reading
def read(
    config: Config,
    cluster: Cluster,
    setting: Setting,
    status: Mapping[str, Any],
    *,
    took_s: float,
    stalled: str | None = None,
) -> Record:
    """What the log of an ended run says; `status` is its last one."""
    began = _first_announced_at(cluster)
    oldest = _oldest_versions(config, cluster)
    groups = status["groups"]
    return Record(
        setting=setting,
        steps=tuple(_step(manifest, began, oldest) for manifest in chain(read_steps(cluster))),
        bound=status["policy"]["bound"],
        staleness_mean=status["staleness"]["mean"],
        num_dropped=groups["closed"] + groups["dropped"],
        held_out=(status["eval"]["first"], status["eval"]["last"]),
        took_s=took_s,
        stalled=stalled,
    )


def _step(manifest: Manifest, began: float, oldest: dict[str, int]) -> Step:
    return Step(
        at_s=manifest.finished_at - began,
        reward=manifest.metrics["reward/mean"],
        staleness_mean=manifest.staleness["mean"],
        staleness_max=manifest.staleness["max"],
        oldest=max(manifest.step - 1 - oldest[record.group_id] for record in manifest.records),
        wait_s=manifest.metrics["seconds/wait"],
    )


def _first_announced_at(cluster: Cluster) -> float:
    for record in read_all(cluster, cluster.topic("policy"), [0]):
        said: PolicyRecord = decode_as(record.value, PolicyRecord)
        if isinstance(said, Announcement):
            return said.announced_at
    raise Failed("nothing was ever announced")


def _oldest_versions(config: Config, cluster: Cluster) -> dict[str, int]:
    """Of each group that was generated; a run of one incarnation."""
    topic, partitions = cluster.topic("trajectories"), range(config.kafka.partitions)
    found = {}
    for record in read_all(cluster, topic, partitions):
        if record.headers.get(HEADER_KIND) == "group":
            group = decode_group(record.value)
            if group.oldest is not None:
                found[group.group_id] = group.oldest.number
    return found


# ------------------------------------------------------------------------------------ predicting
def prediction(config: Config, folder: Path, cluster: Cluster, num_steps: int) -> Predicted:
    """As `headwater simulate --from-run` has it, by the measure that the live run has."""
    source = from_run(config, str(folder), cluster)
    (subject,) = subjects(None, source.workload.shape, configured=source.configured)
    outcomes = [
        simulate(source.workload, subject.policy, num_steps=num_steps, seed=seed)
        for seed in range(NUM_SIMULATED)
    ]
    return Predicted(
        steps_per_hour=sum(map(_simulated_rate, outcomes)) / NUM_SIMULATED,
        staleness_mean=sum(one.staleness.mean for one in outcomes) / NUM_SIMULATED,
        staleness_max=max(one.staleness.max for one in outcomes),
        stalled=next((one.stalled for one in outcomes if one.stalled is not None), None),
    )


def _simulated_rate(outcome: Outcome) -> float:
    return steps_per_hour([step.train_to for step in outcome.timeline.steps])
