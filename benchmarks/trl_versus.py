"""Time of a step, end to end, beside TRL's GRPOTrainer: the same model, prompts, batch and budget
of tokens on the same machine, both sides in turns.

    python -P -m benchmarks.trl_versus                      everything, then the table
    python -P -m benchmarks.trl_versus --workloads tiny --seeds 1 --steps 20
    python -P -m benchmarks.trl_versus --table              what is there so far

tiny    the quickstart: 16 prompts x 8 samples a step of at most 12 tokens
slow    the same with a reward that sleeps four times what TRL's rollout takes: a judge elsewhere
135m    examples/smollm2.toml: 4 x 8 samples of at most 8 tokens

TRL generates, scores, trains, one after the other. Headwater does so beside each other, and trains
tokens a little old: by `deadline` as it is by default (look-ahead 2, at most 4 versions), by
`one-step-off` (at most 1) and, where the reward is slow, by `deadline` with a look-ahead of 4. The
steady state is measured, from the end of one step to the end of another; the first steps are left
out.

TRL is installed into a virtual environment of its own at the first start. Every run appends a line
to OUT/runs.jsonl; what has one is not run again. OUT/table.json is the table with its settings. 1
if a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks import staleness_runs, trl_headwater, trl_venv
from benchmarks.trl_tables import TRL, Differ, details, rollout_s, summary, table
from benchmarks.trl_workload import SLOWNESS, WORKLOADS, Order, Run, Workload, prompt_lines
from connectors.config import ConfigError
from connectors.files import replace_file
from deploy.errors import EnvironmentFailure
from deploy.launcher import CHILD_ENVIRONMENT, headwater_command

SYSTEMS: Final = (TRL, *trl_headwater.POLICIES)
BUILDERS: Final = {"quickstart": "quickstart/model.py:build", "smollm2": "smollm2/model.py:build"}


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parser().parse_args(arguments)
    workloads = chosen_workloads(chosen)
    results, num_failed = Results(chosen.out), 0
    if not chosen.table:
        num_failed = execute(chosen, workloads, results)
    show([run for one in workloads for run in results.of(one)], workloads, chosen.out)
    return 1 if num_failed else 0


class Results:
    """The runs so far, in OUT/runs.jsonl."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "runs.jsonl"

    def __iter__(self) -> Iterator[Run]:
        yield from map(Run.read, self._text().splitlines())

    def of(self, workload: Workload) -> list[Run]:
        """Those of as many steps."""
        num_steps = workload.num_steps
        return [r for r in self if (r.workload, len(r.ends_s)) == (workload.name, num_steps)]

    def add(self, run: Run) -> None:
        """A process that is killed leaves no half line."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._file, f"{self._text()}{run.text}\n".encode())

    def _text(self) -> str:
        return self._file.read_text() if self._file.is_file() else ""


# ------------------------------------------------------------------------------------ runs
def plan(
    workloads: Sequence[Workload], systems: Sequence[str], num_seeds: int
) -> Iterator[tuple[Workload, str, int]]:
    """One seed after the other, and within it one side after the other: whatever else the machine
    does is shared out."""
    for seed in range(num_seeds):
        for workload in workloads:
            for system in systems:
                if workload.is_slow or system != trl_headwater.AHEAD:
                    yield workload, system, seed


def execute(chosen: argparse.Namespace, workloads: Sequence[Workload], results: Results) -> int:
    """How many failed."""
    python = trl_venv.installed(chosen.venv)
    due = [
        (workload, system, seed)
        for workload, system, seed in plan(workloads, chosen.systems, chosen.seeds)
        if (system, seed) not in {(run.system, run.seed) for run in results.of(workload)}
    ]
    num_failed = 0
    for number, (workload, system, seed) in enumerate(due, start=1):
        print(f"{number}/{len(due)}  {workload.name} {system} seed {seed}", end="  ", flush=True)
        try:
            run = one_run(chosen, python, workload, system, seed, results)
        except (
            trl_venv.Failed, staleness_runs.Failed, ConfigError, EnvironmentFailure, MissingRun
        ) as error:  # fmt: skip
            print(f"FAILED: {error}", flush=True)
            num_failed += 1
        else:
            results.add(run)
            print(f"{len(run.ends_s)} steps in {run.ends_s[-1]:.0f} s", flush=True)
    return num_failed


class MissingRun(RuntimeError):
    """Another run has to be there before."""


def one_run(
    chosen: argparse.Namespace,
    python: Path,
    workload: Workload,
    system: str,
    seed: int,
    results: Results,
) -> Run:
    sleep_s = sleep_of(results) if workload.is_slow else None
    folder = chosen.out / "runs" / f"{workload.name}-{system}-{seed}"
    prompts = chosen.out / f"prompts-{workload.name}-{seed}.jsonl"
    source = trl_headwater.EXAMPLES / workload.example / "prompts.jsonl"
    chosen.out.mkdir(parents=True, exist_ok=True)
    lines = prompt_lines(source.read_text().splitlines(), seed, sleep_s)
    prompts.write_text("".join(f"{line}\n" for line in lines))
    model, load = model_of(workload, chosen.out), os.getloadavg()[0]
    if system == TRL:
        order = Order(
            workload=workload,
            seed=seed,
            model=str(model.resolve()),
            prompts=str(prompts.resolve()),
            num_threads=chosen.threads,
        )
        found = trl_venv.run(python, order, folder, limit_s=chosen.limit_s)
    else:
        found = trl_headwater.run(
            workload, system, seed,
            model=model, prompts=prompts, folder=folder, limit_s=chosen.limit_s,
            overrides=chosen.overrides,
        )  # fmt: skip
    return replace(found, sleep_s=sleep_s or 0.0, load=load)


def sleep_of(results: Results) -> float:
    """Seconds that a slow reward sleeps, on either side: see SLOWNESS."""
    sought = ("tiny", TRL, 0)
    first = next((r for r in results if (r.workload, r.system, r.seed) == sought), None)
    if first is None:
        raise MissingRun("a slow reward is as slow as TRL's run of `tiny`, seed 0, says: run that")
    num_skipped = WORKLOADS["tiny"].of_steps(len(first.ends_s)).num_skipped
    return round(SLOWNESS * rollout_s(first, num_skipped), 3)


def model_of(workload: Workload, out: Path) -> Path:
    """The example's model, built once for all runs."""
    folder = out.resolve() / f"model-{workload.example}"
    if not folder.is_dir():
        print("building the model", end="  ", flush=True)
        staged = folder.with_suffix(".new")
        command = headwater_command(
            "build-model", BUILDERS[workload.example], staged, "--base-dir", trl_headwater.EXAMPLES
        )
        subprocess.run(
            command, check=True, capture_output=True, env={**os.environ, **CHILD_ENVIRONMENT}
        )
        staged.rename(folder)
    return folder


# ------------------------------------------------------------------------------------ the table
def show(runs: Sequence[Run], workloads: Sequence[Workload], out: Path) -> None:
    try:
        entries = summary(runs, {one.name: one for one in workloads})
    except Differ as error:
        sys.exit(f"no table: {error}")
    if not entries:
        return print("nothing has been run")
    about = {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load_before_runs": [f(load for e in entries for load in e["load"]) for f in (min, max)],
        "sleep_s": max(entry["sleep_s"] for entry in entries),
    }
    (out / "table.json").write_text(json.dumps({"about": about, "entries": entries}, indent=2))
    print(f"\n{', '.join(f'{name} {value}' for name, value in about.items())}\n")
    for workload in workloads:
        print(
            f"{workload.name}: {workload.says}; {workload.groups_per_step} x {workload.group_size} "
            f"samples a step, at most {workload.max_tokens} tokens, learning rate "
            f"{workload.learning_rate:g}; {workload.num_steps} steps, of which the first "
            f"{workload.num_skipped} are left out"
        )
    print(f"\n{table(entries)}\n\n{details(entries)}")


# ------------------------------------------------------------------------------------ arguments
def chosen_workloads(chosen: argparse.Namespace) -> list[Workload]:
    found = [WORKLOADS[name] for name in chosen.workloads]
    return found if chosen.steps is None else [one.of_steps(chosen.steps) for one in found]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="benchmarks.trl_versus",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--seeds", type=int, default=5)
    found.add_argument("--workloads", type=_of(WORKLOADS), default=tuple(WORKLOADS))
    found.add_argument("--systems", type=_of(SYSTEMS), default=SYSTEMS)
    found.add_argument("--steps", type=int, help="instead of each workload's own number")
    found.add_argument("--out", type=Path, default=Path("runs/trl"))
    found.add_argument("--venv", type=Path, default=trl_venv.FOLDER, help="for TRL")
    found.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1,
        help="of TRL, which takes all cores; on a busy machine one is faster than two",
    )  # fmt: skip
    found.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE",
        help="of Headwater's runs, beside what is set here",
    )  # fmt: skip
    found.add_argument("--limit-s", type=float, default=900.0, help="of one run")
    found.add_argument("--table", action="store_true", help="run nothing")
    return found


def _of(known: Sequence[str] | dict[str, Workload]):  # type: ignore[no-untyped-def]
    def names(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        if wrong := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"no {wrong[0]!r}, there are {', '.join(known)}")
        return tuple(name for name in known if name in chosen)

    return names


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # either ends the run at hand, too
    sys.exit(main())
