"""Every estimator, loss, aggregation, correction, rejection, proximal policy and KL, once each.

    python -P -m benchmarks.algorithms RUN

The first steps of RUN's log, any run of examples/quickstart.toml, are trained again from the run's
initial model: by the default settings, then with one of them changed at a time. The names come from
connectors/algorithms.py; what RUN itself was trained by plays no part but for its learning rate and
what a step computes with. Exit 1 if anything was not finite.

A loss that measures from the proximal policy is shown with two optimizer steps a step, as are the
proximal policies that differ from `reuse` only there: with one, the ratio is 1 and clips nothing.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, get_args

import torch

from connectors.algorithms import (
    ESTIMATORS,
    KL,
    LOSSES,
    Aggregation,
    Correction,
    Level,
    Proximal,
    Rejection,
)
from connectors.config import Config, Trainer
from connectors.kafka.client import Reader
from connectors.kafka.locate import source
from connectors.records import Group
from connectors.run_dir import RunDir
from deploy.log import opened
from deploy.run_folder import load_run
from trainer.ages import Ages, recorded_ages
from trainer.engine import TrainingEngine
from trainer.execute import execute
from trainer.overdue import Weights, weights_of
from trainer.reexecute import read_groups
from trainer.step_log import chain, read_steps

NUM_STEPS: Final = 30
KL_COEFFICIENT: Final = 0.1
_TWICE: Final = {"num_minibatches": 2, "proximal": "recompute"}
_OF_THE_RUN: Final = (
    "groups_per_step", "learning_rate", "weight_decay", "max_grad_norm", "num_threads", "num_gpus",
    "max_tokens_per_microbatch",
)  # fmt: skip

COLUMNS: Final[Mapping[str, str]] = {
    "reward": "reward/mean",
    "clipped": "loss/clipped_share",
    "capped": "loss/capped_share",
    "masked": "loss/masked_share",
    "rejected": "loss/rejected_share",
    "effective": "loss/effective_share",
    "gradient": "grad_norm",
    "KL behaviour": "kl/behaviour",
}
"""Means over the steps, by heading."""

NOTE: Final = """
Every setting trains the same recorded answers: the reward is the same in each row and no measure of
a setting. The policy of the run that recorded them sampled them, so they are off-policy as soon as
weights differ from its: KL behaviour grows. Numbers between reward and time are means over the
steps, time is the processor's for the median step, over the default's {cpu_s:.2g} s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What a step of the run trained on."""

    groups: Sequence[Group]
    ages: Ages
    weights: Weights
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """metrics      of each step
    skipped      steps that changed nothing, by their reason
    is_finite    every loss, gradient norm and, at the end, every weight was
    has_changed  the weights are others than at the start
    cpu_s        processor time of the median step
    """

    metrics: Sequence[Mapping[str, float]]
    skipped: Sequence[str]
    is_finite: bool
    has_changed: bool
    cpu_s: float


def family(base: Trainer) -> dict[str, Trainer]:
    """The default settings first, then each with one thing changed. Equal settings stand once."""
    changes: dict[str, dict[str, Any]] = {"default": {}}
    for name in ESTIMATORS:
        changes[f"advantage {name}"] = {"advantage": name}
    for name, loss in LOSSES.items():
        more = _TWICE if loss.reads_proximal else {}
        if not loss.corrected:
            more = {**more, "correction": "none"}
        changes[f"loss {name}{_also(more)}"] = {"loss": name, **more}
    for name in get_args(Aggregation):
        changes[f"aggregation {name}"] = {"aggregation": name}
    for key, names in (("correction", Correction), ("rejection", Rejection)):
        for name, level in _at_levels(get_args(names)):
            changes[f"{key} {name} {level}".strip()] = {
                key: name, **({f"{key}_level": level} if level else {}),
            }  # fmt: skip
    for name in get_args(Proximal):
        more = {} if name == "reuse" else _TWICE
        changes[f"proximal {name}{_also(more)}"] = {**more, "proximal": name}
    for name in get_args(KL):
        changes[f"kl {name}"] = {"kl": name, "kl_coefficient": KL_COEFFICIENT}

    found: dict[str, Trainer] = {}
    for name, change in changes.items():
        trainer = Trainer(**{**base.model_dump(), **change})
        if trainer not in found.values():
            found[name] = trainer
    return found


def _also(more: Mapping[str, Any]) -> str:
    return f", {more['num_minibatches']} mini-batches" if "num_minibatches" in more else ""


def _at_levels(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        yield from ((name, level) for level in (get_args(Level) if name != "none" else ("",)))


def around(config: Config) -> Trainer:
    """Default mathematics, and what the run's steps were computed with."""
    kept = {key: getattr(config.trainer, key) for key in _OF_THE_RUN}
    return Trainer(**kept, aggregation_constant=float(config.sampling.max_tokens))


def measure(config: Config, steps: Sequence[Recorded], trainer: Trainer) -> Outcome:
    """Trains `steps` from the initial model, in an engine of its own."""
    metrics, skipped, seconds = [], [], []
    is_finite = True
    with closing(TrainingEngine.of(config.model_copy(update={"trainer": trainer}))) as engine:
        before = engine.digest()
        for step in steps:
            started = time.process_time()
            done = execute(
                engine, step.groups, trainer, step.seed, ages=step.ages, weights=step.weights
            )
            seconds.append(time.process_time() - started)
            metrics.append(done.metrics)
            if done.skipped is not None:
                skipped.append(done.skipped)
            # A metric that is not finite is left out of a step's; a skipped step has none of these.
            is_whole = done.skipped is not None or {"loss", "grad_norm"} <= done.metrics.keys()
            is_finite &= is_whole and done.skipped != "nan_gradient"
            is_finite &= not done.metrics.get("minibatches/skipped")
        weights = [weight for _, weight in engine.named_parameters()]
        return Outcome(
            metrics=metrics,
            skipped=skipped,
            is_finite=is_finite and all(bool(torch.isfinite(w).all()) for w in weights),
            has_changed=engine.digest() != before,
            cpu_s=statistics.median(seconds),
        )


def read(run_dir: RunDir, config: Config, most: int = NUM_STEPS) -> list[Recorded]:
    """The run's first steps."""
    with opened(config, run_dir) as cluster:
        topic = source(config, cluster).topic("trajectories")
        with closing(Reader(cluster, topic, {})) as reader:
            return [
                Recorded(
                    groups=read_groups(reader, manifest),
                    ages=recorded_ages(manifest.settings),
                    weights=weights_of(manifest.settings),
                    seed=manifest.seed,
                )
                for manifest in chain(read_steps(cluster))[:most]
            ]


def line(name: str, outcome: Outcome, default: Outcome) -> str:
    """One row of the table."""
    losses = [step["loss"] for step in outcome.metrics if "loss" in step]
    cells = [
        name,
        str(len(outcome.metrics) - len(outcome.skipped)),
        "no" if outcome.is_finite else "YES",
        f"{losses[0]:.3g}" if losses else "–",
        f"{losses[-1]:.3g}" if losses else "–",
        *(_mean(step.get(metric) for step in outcome.metrics) for metric in COLUMNS.values()),
        f"{outcome.cpu_s / default.cpu_s:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _mean(values: Iterable[float | None]) -> str:
    found = [value for value in values if value is not None and math.isfinite(value)]
    return f"{statistics.fmean(found):.3g}" if found else "–"


def main(folder: str) -> int:
    run_dir = RunDir(folder)
    config = load_run(run_dir)
    steps = read(run_dir, config)
    if not steps:
        print(f"{folder}: no step is trained yet", file=sys.stderr)
        return 1
    base = around(config)
    rows = [trajectory for step in steps for g in step.groups for trajectory in g.trajectories]
    print(
        f"{len(steps)} recorded steps of {len(steps[0].groups)} groups, {len(rows)} trajectories, "
        f"learning rate {base.learning_rate:g}, KL coefficient {KL_COEFFICIENT} where there is one."
        "\n"
    )
    heads = ["changed", "steps", "NaN", "first loss", "last loss", *COLUMNS, "time"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    outcomes: dict[str, Outcome] = {}
    for name, trainer in family(base).items():
        outcomes[name] = measure(config, steps, trainer)
        print(line(name, outcomes[name], outcomes["default"]), flush=True)
    print(NOTE.format(cpu_s=outcomes["default"].cpu_s))
    return 0 if all(outcome.is_finite for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -P -m benchmarks.algorithms",
        description="Every algorithm on the steps of a recorded run.",
        epilog="example: python -P -m benchmarks.algorithms runs/quickstart",
    )
    parser.add_argument("run", help="folder of a run of examples/quickstart.toml")
    sys.exit(main(parser.parse_args().run))
