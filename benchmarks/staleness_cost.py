"""What staleness costs and what it buys: live runs of the quickstart's task, one after another.

    python -P -m benchmarks.staleness_cost cost       reward for bounds 0, 1, 4, 8 and 16
    python -P -m benchmarks.staleness_cost presets    every strict policy, with long-tailed rollouts
    python -P -m benchmarks.staleness_cost table      what is there so far, as tables
    python -P -m benchmarks.staleness_cost plot       and as pictures, OUT/*.svg

cost     `deadline` with a look-ahead as large as its bound, with and without the correction of the
         loss. Steps are small, and the engine takes many sequences at once: so groups do get about
         as old as they may.
presets  each policy that can be strict, at --bound where it has one. Beside it stands what the
         simulator predicts from the same run's log.

Every run appends a line to OUT/EXPERIMENT.jsonl. What has one is not run again, so both go on where
they stopped. All settings of one seed come before those of the next, so whatever else the machine
does is shared out. 1 if a run failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import long_tail, staleness_plot, staleness_tables
from benchmarks.staleness_records import Record, Results, Setting
from benchmarks.staleness_runs import Failed, run
from connectors.config import ConfigError, load
from deploy.errors import EnvironmentFailure
from deploy.launcher import CHILD_ENVIRONMENT, headwater_command
from deploy.simulate.subjects import BOUNDS, Subject, subjects
from operators.staleness import PRESETS
from operators.staleness.preset import RunShape
from trainer.staleness import shape_of

EXAMPLES: Final = Path(__file__).resolve().parent.parent / "examples"
QUICKSTART: Final = EXAMPLES / "quickstart.toml"
MODEL: Final = "quickstart/model.py:build"
AGENT: Final = "../benchmarks/long_tail.py:rollout"

SMALL: Final = (
    "trainer.groups_per_step=4",
    "engine.max_running=256",
    "checkpoint.every_steps=1000",
    "checkpoint.keep=1",
)
COST: Final = (*SMALL, "trainer.num_steps=80", "eval.every_versions=80", "eval.max_prompts=64")
LONG_TAILED: Final = (
    *SMALL,
    "trainer.num_steps=60",
    "eval.every_versions=0",
    f"tasks.sort.agent={AGENT}",
)


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parser().parse_args(arguments)
    if chosen.command == "cost":
        return execute(chosen, list(cost_settings(chosen)))
    if chosen.command == "presets":
        return execute(chosen, list(preset_settings(chosen)))
    cost, presets = (list(Results(chosen.out, name)) for name in ("cost", "presets"))
    if chosen.command == "table":
        staleness_tables.show(cost, presets, target=chosen.target)
    else:
        staleness_plot.draw(chosen.out, cost, presets)
    return 0


# ------------------------------------------------------------------------------------ settings
def cost_settings(chosen: argparse.Namespace) -> Iterator[Setting]:
    for seed in range(chosen.seeds):
        for bound in chosen.bounds:
            for correction in chosen.corrections:
                yield Setting(
                    policy="deadline",
                    parameters={"bound": bound, "lookahead": bound},
                    correction=correction,
                    seed=seed,
                    shared=(*COST, *chosen.overrides),
                )


def preset_settings(chosen: argparse.Namespace) -> Iterator[Setting]:
    shared = (*LONG_TAILED, *chosen.overrides)
    policies = strict_policies(shape_of(load(QUICKSTART, shared)), chosen.bound)
    if chosen.policies is not None:
        policies = [one for one in policies if one[0] in chosen.policies]
    for seed in range(chosen.seeds):
        for name, parameters in policies:
            yield Setting(
                policy=name,
                parameters=parameters,
                correction="tis",
                seed=seed,
                shared=shared,
                waits=long_tail.SAID,
            )


def strict_policies(shape: RunShape, bound: int) -> list[tuple[str, dict[str, Any]]]:
    """Every preset that bounds staleness at `bound`, or at the one bound it has; those that are
    strict at bound 0 alone, at that. `deadline` with its own look-ahead and with all it may."""
    found = []
    for name in PRESETS:
        bounds = (bound, 0) if name in BOUNDS or name == "windowed-fifo" else (None,)
        tried = (_subject(name, shape, one) for one in bounds)
        strict = next((s for s in tried if s is not None and s.policy.bound is not None), None)
        if strict is not None:
            found.append((name, dict(strict.parameters)))
        if name == "deadline":
            found.append((name, {"bound": bound, "lookahead": bound}))
    return found


def _subject(name: str, shape: RunShape, bound: int | None) -> Subject | None:
    try:
        return subjects(name, shape, bound=bound)[0]
    except ConfigError:  # a bound that this one cannot have
        return None


# ------------------------------------------------------------------------------------ runs
def execute(
    chosen: argparse.Namespace, settings: Sequence[Setting], run: Callable[..., Record] = run
) -> int:
    results = Results(chosen.out, chosen.command)
    due = [setting for setting in settings if not results.has(setting)]
    print(f"{len(settings)} runs, {len(settings) - len(due)} of them are there", flush=True)
    num_failed = 0
    for number, setting in enumerate(due, start=1):
        print(f"{number}/{len(due)}  {setting.name}", end="  ", flush=True)
        try:
            record = run(
                QUICKSTART,
                setting,
                chosen.out / "runs" / chosen.command / setting.name,
                model=_model(chosen.out),
                limit_s=chosen.limit_s,
                predict=chosen.command == "presets",
            )
        except (Failed, ConfigError, EnvironmentFailure) as error:
            print(f"FAILED: {error}", flush=True)
            num_failed += 1
        else:
            results.add(record)
            print(_line(record), flush=True)
    return 1 if num_failed else 0


def _line(record: Record) -> str:
    mean = "-" if record.staleness_mean is None else f"{record.staleness_mean:.2f}"
    oldest = max((step.oldest for step in record.steps), default=0)
    return (
        f"{len(record.steps)} steps in {record.took_s:.0f} s, staleness mean {mean} max {oldest} "
        f"(bound {record.bound}){' STALLED' if record.stalled else ''}"
    )


def _model(out: Path) -> Path:
    """The quickstart's model, built once for all runs."""
    folder = out / "model"
    if not folder.is_dir():
        print("building the model", end="  ", flush=True)
        staged = out / "model.new"
        command = headwater_command("build-model", MODEL, staged, "--base-dir", EXAMPLES)
        subprocess.run(
            command, check=True, capture_output=True, env={**os.environ, **CHILD_ENVIRONMENT}
        )
        staged.rename(folder)
    return folder


# ------------------------------------------------------------------------------------ arguments
def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="benchmarks.staleness_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = found.add_subparsers(dest="command", required=True)
    for name in ("cost", "presets"):
        runs = commands.add_parser(name)
        runs.add_argument("--seeds", type=int, default=5 if name == "cost" else 1)
        runs.add_argument("--limit-s", type=float, default=300.0, help="of one run")
        runs.add_argument(
            "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE",
            help="of every run, beside what is set here",
        )  # fmt: skip
        if name == "cost":
            runs.add_argument("--bounds", type=_numbers, default=(0, 1, 4, 8, 16))
            runs.add_argument("--corrections", type=_names, default=("tis", "none"))
        else:
            runs.add_argument("--bound", type=int, default=4)
            runs.add_argument("--policies", type=_names, help="only these")
    table = commands.add_parser("table")
    table.add_argument("--target", type=float, default=0.5, help="the reward to be reached")
    commands.add_parser("plot")
    for subparser in commands.choices.values():
        subparser.add_argument("--out", type=Path, default=Path("runs/staleness"))
    return found


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # either ends the run at hand, too
    sys.exit(main())
