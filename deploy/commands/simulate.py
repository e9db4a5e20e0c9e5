"""`headwater simulate`: staleness policies against a workload, in virtual time."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deploy import errors
from deploy.commands.arguments import Commands, add_json, add_overrides, command, load_run
from deploy.output import answer, stdout_for_answer

if TYPE_CHECKING:
    from deploy.simulate.sources import Source

NUM_STEPS: Final = 60
MOST_STEPS: Final = 100_000
MOST_SEEDS: Final = 1000
MOST_BOUND: Final = 10_000
MOST_SEED: Final = 2**63 - 1


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "simulate",
        execute,
        "compares staleness policies in virtual time; 1 if one of them stalls",
        "headwater simulate --workload standard --policy 'one-step-off,deadline' --bound 4 "
        "--lookahead 2 --plot policies.svg",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "config", metavar="CONFIG", nargs="?",
        help="a run's TOML file: its sizes, with lengths and times assumed",
    )  # fmt: skip
    what.add_argument("--workload", metavar="NAME", help="one that is known by name, e.g. standard")
    what.add_argument(
        "--from-run", metavar="RUN", help="a run's folder: lengths and times as its log has them"
    )
    parser.add_argument(
        "--policy", metavar="A,B",
        help="the policies, e.g. 'areal,deadline(bound=8,lookahead=2)' (default: the configured "
        "one; for a workload a few to compare)",
    )  # fmt: skip
    parser.add_argument(
        "--bound", type=_number(0, MOST_BOUND), metavar="N",
        help="the staleness bound, as the parameter that each policy has for it",
    )  # fmt: skip
    parser.add_argument(
        "--lookahead",
        type=_number(0, MOST_BOUND),
        metavar="L",
        help="how many steps ahead prompts are granted",
    )
    parser.add_argument(
        "--steps", type=_number(1, MOST_STEPS), default=NUM_STEPS, metavar="N",
        help=f"steps to train (default: {NUM_STEPS})",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=_number(0, MOST_SEED), default=0, metavar="S", help="default: 0"
    )
    parser.add_argument(
        "--seeds", type=_number(1, MOST_SEEDS), default=1, metavar="N",
        help="means over N seeds, from --seed on (default: 1)",
    )  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture, FILE.svg")
    add_overrides(parser)
    add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    from dataclasses import replace

    from rich.console import Console

    from deploy.simulate import plot
    from deploy.simulate.subjects import subjects
    from deploy.simulate.summary import of_seeds, workload_json
    from deploy.simulate.table import table_lines
    from deploy.simulate.world import simulate

    if arguments.plot is not None:
        plot.check(arguments.plot)
    with stdout_for_answer(arguments.json):
        source = _source(arguments)
    chosen = subjects(
        arguments.policy,
        source.workload.shape,
        bound=arguments.bound,
        lookahead=arguments.lookahead,
        configured=source.configured,
    )
    firsts, found = [], []
    with Console(stderr=True).status("") as shown:
        for subject in chosen:
            shown.update(f"simulating {subject.label}")
            outcomes = [
                replace(
                    simulate(source.workload, subject.policy, num_steps=arguments.steps, seed=seed),
                    parameters=subject.parameters,
                )
                for seed in range(arguments.seed, arguments.seed + arguments.seeds)
            ]
            firsts.append(outcomes[0])
            found.append(of_seeds([outcome.as_json() for outcome in outcomes]))
    labels = [subject.label for subject in chosen]
    if arguments.plot is not None:
        plot.draw(arguments.plot, source.workload, labels, found, [o.timeline for o in firsts])
    value = {
        "workload": workload_json(source.workload),
        "policies": found,
        "notes": list(source.notes),
        "measured": source.measured,
    }
    lines = [
        f"workload {source.workload.name}: {arguments.steps} steps of "
        f"{source.workload.batch_size} groups of {source.workload.group_size}",
        *source.notes,
        "",
        *table_lines(labels, found, source.measured, colour=Console().is_terminal),
    ]
    answer(arguments.json, value, lines)
    return errors.FAILED if any(one["stalled"] is not None for one in found) else errors.OK


def _source(arguments: argparse.Namespace) -> Source:
    """ConfigError for what is no configuration, no workload or no run that can be measured."""
    from connectors.config import ConfigError, load
    from deploy.simulate import sources

    if arguments.overrides and arguments.config is None:
        raise ConfigError("simulate: --set goes with CONFIG")
    if arguments.workload is not None:
        return sources.named(arguments.workload)
    if arguments.config is not None:
        return sources.from_config(load(arguments.config, arguments.overrides))
    return _from_run(arguments.from_run)


def _from_run(folder: str) -> Source:
    from connectors.config import ConfigError
    from deploy.log import opened
    from deploy.simulate import sources

    config, run_dir = load_run(argparse.Namespace(run=folder))
    if config.trainer.source is not None:
        raise ConfigError(
            f"--from-run {folder}: is a shadow's folder, which generates nothing: name its run, "
            f"{config.trainer.source.run}"
        )
    with opened(config, run_dir) as cluster:
        return sources.from_run(config, folder, cluster)


def _number(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not least <= (value := int(text)) <= most:
            raise argparse.ArgumentTypeError(f"must be from {least} to {most}, got {value}")
        return value

    return number
