"""Headwater's side of the comparison with TRL: `headwater run` on the example's configuration, read
from its log."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from benchmarks import staleness_runs
from benchmarks.staleness_records import Setting
from benchmarks.trl_workload import Run, Workload
from connectors.arrow import decode_group
from connectors.config import load
from connectors.kafka.client import Cluster, read_all
from connectors.records import HEADER_KIND, Group, Manifest
from connectors.run_dir import RunDir
from connectors.text import Text
from deploy import run_folder
from deploy.log import opened
from trainer.step_log import chain, read_steps

EXAMPLES: Final = Path(__file__).resolve().parent.parent / "examples"
AHEAD: Final = "deadline-ahead-4"
POLICIES: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "deadline": ("deadline", {"bound": 4, "lookahead": 2}),
    AHEAD: ("deadline", {"bound": 4, "lookahead": 4}),
    "one-step-off": ("one-step-off", {}),
}
"""Systems of ours, by name: the default policy as it is, with all the look-ahead that its bound
allows (for rewards that take long), and the strictest that overlaps at all."""
PARTS: Final = ("wait", "logprobs", "update", "snapshot")
"""Of a manifest's `seconds/`."""
PACKAGES: Final = ("torch", "transformers", "deepspeed")


def example(workload: Workload) -> Path:
    return EXAMPLES / f"{workload.example}.toml"


def setting(
    workload: Workload, system: str, seed: int, prompts: Path, overrides: Sequence[str] = ()
) -> Setting:
    """What is set beside the example's own configuration."""
    reward = ["../benchmarks/trl_reward.py:slow"] if workload.is_slow else []
    policy, parameters = POLICIES[system]
    return Setting(
        policy=policy,
        parameters=parameters,
        correction="tis",
        seed=seed,
        shared=(
            f"tasks.{workload.task}.prompts={json.dumps(str(prompts.resolve()))}",
            f"tasks.{workload.task}.group_size={workload.group_size}",
            *(f"tasks.{workload.task}.reward={json.dumps(name)}" for name in reward),
            f"sampling.max_tokens={workload.max_tokens}",
            f"trainer.groups_per_step={workload.groups_per_step}",
            f"trainer.num_steps={workload.num_steps}",
            f"trainer.learning_rate={workload.learning_rate}",
            f"checkpoint.every_steps={workload.num_steps}",  # after the last one
            "eval.every_versions=0",
            *overrides,
        ),
    )


def run(
    workload: Workload,
    system: str,
    seed: int,
    *,
    model: Path,
    prompts: Path,
    folder: Path,
    limit_s: float,
    overrides: Sequence[str] = (),
) -> Run:
    """Failed also when it was ended early; else as staleness_runs.run."""
    chosen = setting(workload, system, seed, prompts, overrides)
    with Processors(RunDir(folder)) as processors:
        began = time.time()
        record = staleness_runs.run(
            example(workload), chosen, folder, model=model, limit_s=limit_s, predict=False
        )
    config = run_folder.load_run(RunDir(folder))
    with opened(config, RunDir(folder)) as cluster:
        manifests = chain(read_steps(cluster))
        steps = trained(cluster, range(config.kafka.partitions), manifests)
    if len(steps) < workload.num_steps:
        raise staleness_runs.Failed(f"it was ended after {len(steps)} steps")
    ends = [manifest.finished_at for manifest in manifests]
    return Run(
        workload=workload.name,
        system=system,
        seed=seed,
        ends_s=[end - began for end in ends],
        rewards=[reward_of(groups) for groups in steps],
        num_tokens=[tokens_of(groups) for groups in steps],
        parts_s={
            part: [m.metrics.get(f"seconds/{part}", 0.0) for m in manifests] for part in PARTS
        },
        processor_s=processors.a_step(ends, workload.num_skipped),
        prompt_ids=dict(prompt_of(group) for groups in steps for group in groups),
        staleness_mean=record.staleness_mean or 0.0,
        settings={**settings_of(workload, chosen), "stop_ids": sorted(Text(model).stop_ids)},
        versions={package: version(package) for package in PACKAGES},
    )


def settings_of(workload: Workload, chosen: Setting) -> dict[str, Any]:
    """What a user could have chosen otherwise, as it took effect."""
    config = load(example(workload), chosen.overrides())
    return {
        "policy": chosen.label,
        "engine": f"{config.engine.kind} x {config.engine.count}",
        "engine.max_running": config.engine.max_running,
        "trainer.num_threads": config.trainer.num_threads,
        "trainer.max_tokens_per_microbatch": config.trainer.max_tokens_per_microbatch,
    }


# ------------------------------------------------------------------------------------ the log
def trained(
    cluster: Cluster, partitions: Sequence[int], manifests: Sequence[Manifest]
) -> list[list[Group]]:
    """The groups of each step."""
    found = {}
    for record in read_all(cluster, cluster.topic("trajectories"), partitions):
        if record.headers.get(HEADER_KIND) == "group":
            group = decode_group(record.value)
            found[group.group_id] = group
    return [[found[record.group_id] for record in manifest.records] for manifest in manifests]


def reward_of(groups: Sequence[Group]) -> float:
    return float(np.mean([row.reward for group in groups for row in group.trajectories]))


def tokens_of(groups: Sequence[Group]) -> int:
    return sum(int(row.loss_mask.sum()) for group in groups for row in group.trajectories)


def prompt_of(group: Group) -> tuple[str, list[int]]:
    """Its id and its token ids."""
    row = group.trajectories[0]
    return str(group.prompt.id), row.tokens[: int(row.loss_mask.argmax())].tolist()


# ------------------------------------------------------------------------------------ processors
class Processors:
    """Looks every LOOK_S at how much of a processor each role of a run has used."""

    LOOK_S: Final = 0.5

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._seen: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Processors:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(self.LOOK_S):
            roles = {role.name: role.pid for role in self._run_dir.roles()}
            for name, pid in roles.items():
                with contextlib.suppress(psutil.Error):
                    self._note(name, psutil.Process(pid))
            with contextlib.suppress(psutil.Error):
                if (parent := psutil.Process(next(iter(roles.values()), 0)).parent()) is not None:
                    self._note("run", parent)

    def _note(self, name: str, process: psutil.Process) -> None:
        used = process.cpu_times()
        self._seen[name].append((time.time(), used.user + used.system))

    def a_step(self, ends: Sequence[float], num_skipped: int) -> dict[str, float]:
        """Seconds of a processor a step, after the first `num_skipped`; `ends` in Unix seconds."""
        return per_step(self._seen, ends, num_skipped)


def per_step(
    seen: Mapping[str, Sequence[tuple[float, float]]], ends: Sequence[float], num_skipped: int
) -> dict[str, float]:
    """From (time, seconds used until then) of each process, straight between two looks."""
    window = [ends[num_skipped - 1], ends[-1]]
    found = {}
    for name, looks in seen.items():
        at, used = zip(*looks, strict=True)
        first, last = np.interp(window, at, used)
        found[name] = float(last - first) / (len(ends) - num_skipped)
    return found
