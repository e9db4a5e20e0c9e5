"""One live run of an experiment on staleness: from a setting to a record, which is read from the
run's log and kept as a line of JSON.

    Setting ──▶ headwater run --json ──▶ the run's log ──▶ Record ──▶ OUT/EXPERIMENT.jsonl

A setting that has a record is not run again. A run that was interrupted has none: its folder is
removed and it begins anew, because its clock would count the interruption.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

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
from deploy.simulate.subjects import label, subjects
from deploy.simulate.world import simulate
from trainer.stall import kept
from trainer.step_log import chain, read_steps

NUM_SIMULATED: Final = 5
"""Seeds that a prediction is the mean of."""
STOP_S: Final = 90.0


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """`shared`: what all runs of an experiment set, as key=value. `waits`: how long its rollouts do
    so beside the engine, in words."""

    policy: str
    parameters: dict[str, Any]
    correction: str
    seed: int
    shared: tuple[str, ...]
    waits: str = ""

    @property
    def label(self) -> str:
        return label(self.policy, self.parameters)

    @property
    def name(self) -> str:
        """Of its run's folder."""
        parts = re.findall(r"[\w.-]+", f"{self.label} {self.correction} seed {self.seed}")
        return "-".join(parts)

    def overrides(self) -> list[str]:
        pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in self.parameters.items())
        return [
            *self.shared,
            f"staleness.policy={json.dumps(self.policy)}",
            f"staleness.parameters={{{pairs}}}",
            f"trainer.correction={json.dumps(self.correction)}",
            f"run.seed={self.seed}",
        ]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """`at_s`: its end, from the first announcement on. `oldest`: steps that its oldest token is
    old, counted from the trajectories themselves."""

    at_s: float
    reward: float
    staleness_mean: float
    staleness_max: float
    oldest: int
    wait_s: float


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulator says of the same policy and as many steps, calibrated by this run."""

    steps_per_hour: float
    staleness_mean: float
    staleness_max: float
    stalled: str | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """bound      that the policy promises, None = none
    num_dropped  groups that were granted and neither trained nor open at the end
    held_out     mean reward over the held-out prompts at the first and the last evaluated version
    stalled      the report of a stall, which ended the run
    took_s       the whole command
    """

    setting: Setting
    steps: tuple[Step, ...]
    bound: int | None
    staleness_mean: float | None
    num_dropped: int
    held_out: tuple[float | None, float | None]
    took_s: float
    predicted: Predicted | None = None
    stalled: str | None = None


class Results:
    """The records of one experiment, in OUT/EXPERIMENT.jsonl."""

    def __init__(self, folder: Path, experiment: str) -> None:
        self._file = folder / f"{experiment}.jsonl"

    def __iter__(self) -> Iterator[Record]:
        """Half a last line, of a process that was killed, is no record."""
        if self._file.is_file():
            for line in self._file.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    yield msgspec.json.decode(line, type=Record)

    def has(self, setting: Setting) -> bool:
        return any(record.setting == setting for record in self)

    def add(self, record: Record) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        before = self._file.read_bytes() if self._file.is_file() else b""
        whole = before[: before.rfind(b"\n") + 1]
        staged = self._file.with_suffix(".new")
        staged.write_bytes(whole + msgspec.json.encode(record) + b"\n")
        staged.replace(self._file)


class Failed(RuntimeError):
    """The run came to nothing that could be recorded; one line says why."""


# ------------------------------------------------------------------------------------ running
def run(
    config: Path, setting: Setting, folder: Path, *, model: Path, limit_s: float, predict: bool
) -> Record:
    """Runs it in `folder`, which is removed first. Failed when it does not train its steps within
    `limit_s`, unless it stalled: then it is ended and recorded as such."""
    shutil.rmtree(folder, ignore_errors=True)
    run_dir = RunDir(folder)
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
    return read(run_dir, setting, status, took_s=took_s, stalled=stalled, predict=predict)


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
    run_dir: RunDir,
    setting: Setting,
    status: dict[str, Any],
    *,
    took_s: float,
    stalled: str | None = None,
    predict: bool = False,
) -> Record:
    """What the log of an ended run says; `status` is its last one."""
    config = run_folder.load_run(run_dir)
    with opened(config, run_dir) as cluster:
        manifests = chain(read_steps(cluster))
        began = _first_announced_at(cluster)
        oldest = _oldest_versions(config, cluster)
        predicted = None
        if predict and stalled is None:
            predicted = _predicted(config, run_dir, cluster, len(manifests))
    groups = status["groups"]
    return Record(
        setting=setting,
        steps=tuple(_step(manifest, began, oldest) for manifest in manifests),
        bound=status["policy"]["bound"],
        staleness_mean=status["staleness"]["mean"],
        num_dropped=groups["closed"] + groups["dropped"],
        held_out=(status["eval"]["first"], status["eval"]["last"]),
        took_s=took_s,
        predicted=predicted,
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
def _predicted(config: Config, run_dir: RunDir, cluster: Cluster, num_steps: int) -> Predicted:
    """As `headwater simulate --from-run` has it, by the measure that the live run has."""
    source = from_run(config, str(run_dir.path), cluster)
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


def steps_per_hour(ends_s: list[float]) -> float:
    """From the first step's end to the last one's; 0 of fewer than two."""
    if len(ends_s) < 2:
        return 0.0
    return 3600 * (len(ends_s) - 1) / (ends_s[-1] - ends_s[0])
