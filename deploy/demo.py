"""`make demo`: the main job end to end, with a kill in the middle and the proof at the end.

    quickstart run, its trainer killed with -9 half way ──▶ curve, samples before and after
    the same run with learning rate 0 (the control)     ──▶ curve beside it
    audit, replay --last 5, trace                       ──▶ what the log alone proves

Exit code 0 when everything the demo claims was seen, 1 with the list of what was not.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connectors.kafka.client import Cluster, KafkaFailure, read_all
from connectors.kafka.locate import cluster as locate
from connectors.kafka.parsed import parsed
from connectors.records import Evaluation, Manifest
from connectors.run_dir import RunDir
from deploy.curve import draw
from deploy.errors import NOT_VERIFIED
from deploy.launcher import headwater_command
from deploy.log import opened
from deploy.run_folder import load_run
from trainer.step_log import chain, read_steps

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "quickstart.toml"
RUN, CONTROL = Path("runs/quickstart"), Path("runs/quickstart-control")
MIN_RISE, MIN_LAST, MAX_DRIFT = 0.4, 0.8, 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a finished run's log holds."""

    manifests: Sequence[Manifest]
    evaluations: Sequence[Evaluation]
    seconds: float


def main() -> int:
    for folder in (RUN, CONTROL):
        _put_aside(folder)
    _title("The main job: prompts -> rollout -> reward -> trajectories -> trainer -> weights")
    main_job = _run(RUN, kill_trainer=True)
    _title("The control: the same job with learning rate 0")
    control = _run(CONTROL, settings=["trainer.learning_rate=0.0"])
    _title("Held-out reward: trained, and the control")
    print(_curves(main_job, control))
    _title("Three held-out prompts, before and after")
    _print_samples(main_job)
    _title("What the log alone proves")
    problems = [*_judge(main_job, control), *_prove(main_job)]
    print(f"\nthe job took {main_job.seconds:.0f} s, the control {control.seconds:.0f} s")
    for problem in problems:
        print(f"NOT SEEN: {problem}")
    if not problems:
        print("everything this demo claims was seen")
    return 1 if problems else 0


def _put_aside(folder: Path) -> None:
    """An earlier demo's run is kept under another name: nothing is ever cleared."""
    if folder.exists():
        kept = folder.with_name(f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        folder.rename(kept)
        print(f"the earlier {folder} is now {kept}")


def _run(folder: Path, *, settings: Sequence[str] = (), kill_trainer: bool = False) -> Outcome:
    started = time.monotonic()
    arguments = [arg for setting in settings for arg in ("--set", setting)]
    process = subprocess.Popen(headwater_command("run", EXAMPLE, "--run-dir", folder, *arguments))
    try:
        if kill_trainer:
            _kill_trainer_half_way(process, folder)
        if (code := process.wait()) != 0:
            raise SystemExit(f"headwater run ended with {code}; its logs are in {folder}/logs")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    seconds = time.monotonic() - started
    run_dir = RunDir(folder)
    with opened(load_run(run_dir), run_dir) as cluster:
        return Outcome(
            manifests=chain(read_steps(cluster)), evaluations=_evaluations(cluster), seconds=seconds
        )


def _kill_trainer_half_way(process: subprocess.Popen[bytes], folder: Path) -> None:
    run_dir = RunDir(folder)
    while process.poll() is None:
        time.sleep(0.5)
        if not run_dir.config_file.is_file():
            continue
        config = load_run(run_dir)
        try:
            done = chain(read_steps(locate(config, run_dir, unavailable_s=5)))
        except KafkaFailure:
            continue  # the broker is still starting
        trainer = next((role for role in run_dir.roles() if role.name == "trainer"), None)
        if trainer is not None and len(done) >= config.trainer.num_steps // 2:
            os.kill(trainer.pid, signal.SIGKILL)
            print(
                f"\n>>> kill -9 of the trainer (pid {trainer.pid}) after step {len(done)}: it must"
                " recover from its checkpoint and the log\n",
                flush=True,
            )
            return


def _evaluations(cluster: Cluster) -> list[Evaluation]:
    records = read_all(cluster, cluster.topic("evaluations"), [0])
    return [evaluation for _, evaluation in parsed(records, Evaluation)]


def _curves(main_job: Outcome, control: Outcome) -> str:
    def held_out(outcome: Outcome) -> list[tuple[int, float]]:
        return [(e.version.number, e.reward) for e in outcome.evaluations]

    rewards = [(m.step, m.metrics["reward/mean"]) for m in main_job.manifests]
    return draw(rewards, held_out(main_job), held_out(control), title="quickstart and its control")


def _print_samples(outcome: Outcome) -> None:
    if not outcome.evaluations:
        return
    first, last = outcome.evaluations[0], outcome.evaluations[-1]
    for before, after in zip(first.samples, last.samples, strict=False):
        print(f"  {before.prompt!r}")
        for evaluation, sample in ((first, before), (last, after)):
            print(
                f"      version {evaluation.version}: {sample.completion!r} "
                f"(reward {sample.reward:g})"
            )


def _judge(main_job: Outcome, control: Outcome) -> list[str]:
    if not main_job.evaluations or not control.evaluations:
        return ["no evaluation was written"]
    first, last = main_job.evaluations[0].reward, main_job.evaluations[-1].reward
    rewards = [e.reward for e in control.evaluations]
    drift = max(rewards) - min(rewards)
    print(
        f"held-out reward {first:.3f} -> {last:.3f}; control {rewards[0]:.3f} -> {rewards[-1]:.3f}"
    )
    status = _status()
    published = sorted(m.metrics["seconds/publish"] for m in main_job.manifests)
    print(
        f"from step to step the trainer waited {status['wait_share']:.0%} of the time; a publish "
        f"took {published[len(published) // 2]:.3f} s (median), {published[-1]:.3f} s at most"
    )
    problems = []
    if last - first < MIN_RISE:
        problems.append(f"held-out reward rose by {last - first:.3f}, less than {MIN_RISE}")
    if last < MIN_LAST:
        problems.append(f"held-out reward ended at {last:.3f}, below {MIN_LAST}")
    if drift > MAX_DRIFT:
        problems.append(f"the control's held-out reward moved by {drift:.3f}")
    return problems


def _prove(outcome: Outcome) -> list[str]:
    last = outcome.manifests[-1]
    problems = []
    for name, arguments, violation in (
        ("audit", (), "found a violation"),
        ("replay", ("--last", "5"), "gave other digests"),
    ):
        code = _show(name, RUN, *arguments).returncode
        if code:
            said = violation if code == NOT_VERIFIED else f"could not be done (exit code {code})"
            problems.append(f"{name} {said}")
    traced = _show("trace", RUN, f"{last.records[0].group_id}/0").stdout
    if not any(
        line.split() == ["trained", "in", "step", str(last.step)] for line in traced.splitlines()
    ):
        problems.append("trace does not find the step a trajectory was trained in")
    return problems


def _show(command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """What the command says, printed as a user sees it."""
    print(f"\n$ headwater {command} {' '.join(map(str, arguments))}", flush=True)
    done = subprocess.run(
        headwater_command(command, *map(str, arguments)),
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    print(done.stdout, end="", flush=True)
    return done


def _status() -> dict[str, Any]:
    answer = subprocess.run(
        headwater_command("status", str(RUN), "--json"), stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def _title(text: str) -> None:
    print(f"\n== {text} ==\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
