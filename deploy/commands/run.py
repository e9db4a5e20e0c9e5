"""`headwater run CONFIG`: starts every role the file names and watches over them."""

from __future__ import annotations

import argparse

from deploy.commands.arguments import Commands, add_config, add_json, command, load_config


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "run",
        execute,
        "starts a run, or resumes the one in its folder, until N steps or Ctrl-C",
        "headwater run examples/quickstart.toml --stop-after-steps 50 --set run.seed=1",
    )
    add_config(parser)
    parser.add_argument(
        "--stop-after-steps",
        type=steps,
        metavar="N",
        help="end once the run has N steps in all (default, and at most: trainer.num_steps)",
    )
    add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    from deploy.run import run

    config, run_dir = load_config(arguments)
    return run(config, run_dir, stop_after_steps=arguments.stop_after_steps, as_json=arguments.json)


def steps(text: str) -> int:
    """A number of steps; argparse says the rest."""
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{number} is below 0")
    return number
