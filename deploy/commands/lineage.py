"""The commands that take a run back: rollback and fork."""

from __future__ import annotations

import argparse

from deploy import errors
from deploy.commands.arguments import (
    Commands,
    add_json,
    add_overrides,
    add_run,
    command,
    load_run,
)
from deploy.output import answer, stdout_for_answer


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "rollback",
        execute,
        "takes a run back to step N: the steps after it are given up, their groups open again "
        "(those too old for the staleness bound are dropped as stale)",
        "headwater rollback runs/quickstart --to 40",
    )
    add_run(parser)
    parser.add_argument("--to", type=int, required=True, metavar="N", dest="step", help="the step")
    parser.set_defaults(exclude=[], overrides=[])
    add_json(parser)
    parser = command(
        commands,
        "fork",
        execute,
        "goes on from step N without some of the groups, or with other settings",
        "headwater fork runs/quickstart --at 40 --exclude steps:41-46 "
        "--set trainer.learning_rate=1e-5",
    )
    add_run(parser)
    parser.add_argument("--at", type=int, required=True, metavar="N", dest="step", help="the step")
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="SPEC",
        help="groups never to be trained again: steps:A-B (all that those steps trained; of "
        "steps made twice the newest), "
        "PARTITION/FROM-TO (offsets of trajectories, both included), or a group's id; repeatable",
    )  # fmt: skip
    add_overrides(parser)
    add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    config, run_dir = load_run(arguments)
    from connectors.config import load
    from deploy.lineage import fork_run
    from deploy.log import opened
    from deploy.run_folder import with_source
    from deploy.shadow import is_at_work

    changed = None
    if arguments.overrides:
        changed = with_source(load(run_dir.config_file, arguments.overrides), run_dir)
    with stdout_for_answer(arguments.json), opened(config, run_dir) as cluster:
        done = fork_run(
            config,
            run_dir,
            cluster,
            arguments.step,
            exclude=arguments.exclude,
            changed=changed,
        )
    version = {"incarnation": done.version.incarnation, "number": done.version.number}
    lines = [
        f"the run goes on from step {arguments.step} as version {done.version}",
        f"{len(done.given_up)} steps given up, {len(done.excluded)} groups excluded",
        *(f"  changed: {change}" for change in done.changes),
    ]
    if done.is_nothing:
        lines = [f"nothing to do: the run is at step {arguments.step} (version {done.version})"]
    if done.kept:
        lines.append(
            f"{len(done.kept)} groups were trained at or before step {arguments.step}: its weights "
            "hold them, they stay"
        )
    if not is_at_work(run_dir):
        lines.append(f"next: headwater run {run_dir.config_file}")
    found = {"version": version, "excluded": list(done.excluded), "given_up": list(done.given_up)}
    answer(arguments.json, {**found, "kept": list(done.kept)}, lines)
    return errors.OK
