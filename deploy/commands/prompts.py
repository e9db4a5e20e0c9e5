"""`headwater prompts load`: writes prompts into a run's topic."""

from __future__ import annotations

import argparse
import sys

from deploy import errors
from deploy.commands.arguments import Commands, add_json, command
from deploy.output import answer, stdout_for_answer


def add(commands: Commands) -> None:
    top = commands.add_parser("prompts", help="writes prompts into a run's topic")
    actions = top.add_subparsers(dest="action", metavar="ACTION", required=True)
    parser = command(
        actions,
        "load",
        load,
        "checks prompts and writes them to the topic of a run",
        "headwater prompts load examples/quickstart/eval.jsonl --run runs/quickstart --task sort",
    )
    parser.add_argument("file", metavar="FILE", nargs="?", help="a JSONL file, one prompt a line")
    parser.add_argument("--reasoning-gym", metavar="NAME", help="a generator instead of FILE")
    parser.add_argument("--count", type=int, default=100, metavar="N", help="how many to generate")
    parser.add_argument("--seed", type=int, default=0, help="of the generator")
    parser.add_argument(
        "--run", required=True, metavar="RUN", help="the run's folder, or its TOML file"
    )
    parser.add_argument("--task", metavar="T", help="the task of prompts that name none")
    add_json(parser)


def load(arguments: argparse.Namespace) -> int:
    from deploy.prompts import load_prompts

    with stdout_for_answer(arguments.json):
        loaded = load_prompts(
            arguments.run,
            file=arguments.file,
            generator=arguments.reasoning_gym,
            count=arguments.count,
            seed=arguments.seed,
            task=arguments.task,
        )
    for problem in loaded.problems:
        print(f"headwater: {problem}", file=sys.stderr)
    answer(
        arguments.json,
        {"written": loaded.written, "rejected": loaded.rejected},
        [f"{loaded.written} prompts written, {loaded.rejected} rejected"],
    )
    return errors.OK if loaded.written or not loaded.rejected else errors.FAILED
