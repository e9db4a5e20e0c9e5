"""The command that takes a run's weights elsewhere: export."""

from __future__ import annotations

import argparse
from pathlib import Path

from deploy import errors, gpus
from deploy.commands.arguments import Commands, add_json, add_run, command, load_run
from deploy.output import answer, stdout_for_answer


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "export",
        execute,
        "writes a checkpoint's model and tokenizer as a Hugging Face folder",
        "headwater export runs/quickstart --to my-model",
    )
    add_run(parser)
    parser.add_argument(
        "--to", required=True, metavar="DIR", help="the folder, which is not there or empty"
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="of the checkpoint after step N (default: the newest)"
    )
    add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    config, run_dir = load_run(arguments)
    gpus.claim("trainer.num_gpus", 0)  # weights are copied, not trained
    from deploy.log import opened
    from trainer.export import NothingToExport, WeightsDiffer, export

    to = Path(arguments.to).resolve()
    with stdout_for_answer(arguments.json), opened(config, run_dir) as cluster:
        try:
            done = export(cluster, run_dir, config, to, arguments.step)
        except NothingToExport as error:
            raise errors.RunFailed(str(error), errors.FAILED) from error
        except WeightsDiffer as error:
            raise errors.RunFailed(str(error), errors.NOT_VERIFIED) from error
    version = {"incarnation": done.version.incarnation, "number": done.version.number}
    found = {"step": done.step, "version": version, "path": str(to)}
    answer(arguments.json, found, [f"the weights after step {done.step} are in {to}"])
    return errors.OK
