"""The commands that read a run: status, audit, replay, trace.

What a command needs is imported once RUN is known to be one: replay's libraries take seconds."""

from __future__ import annotations

import argparse

from deploy import errors, gpus
from deploy.commands.arguments import Commands, add_json, add_run, command, load_run
from deploy.output import answer, stdout_for_answer


def add(commands: Commands) -> None:
    for name, execute, summary, example in (
        ("status", status, "shows where a run stands, from its log and its roles",
         "headwater status runs/quickstart --json"),
        ("audit", audit, "proves from the log alone that nothing was lost or trained twice",
         "headwater audit runs/quickstart"),
        ("replay", replay, "executes recorded steps again and compares the weights' digests",
         "headwater replay runs/quickstart --last 5"),
        ("trace", trace, "shows where a trajectory came from and went",
         "headwater trace runs/quickstart headwater.prompts/0/17/3"),
    ):  # fmt: skip
        parser = command(commands, name, execute, summary, example)
        add_run(parser)
        if name == "replay":
            parser.add_argument("--last", type=int, metavar="K", help="the last K steps")
            parser.add_argument(
                "--from", type=int, metavar="N", dest="first", help="the first step"
            )
            parser.add_argument("--to", type=int, metavar="M", dest="until", help="the last step")
        if name == "trace":
            parser.add_argument(
                "id",
                metavar="ID",
                help="a trajectory's or a group's id, or a prompt's own; "
                "`headwater log RUN trajectories --last 1` shows some",
            )
        add_json(parser)


def status(arguments: argparse.Namespace) -> int:
    config, run_dir = load_run(arguments)
    from deploy.log import opened
    from deploy.shadow_status import shadow_lines, shadow_status
    from deploy.status import RunStatus
    from deploy.view import status_lines

    source = config.trainer.source
    with stdout_for_answer(arguments.json), opened(config, run_dir) as cluster:
        if source is None:
            found, lines = RunStatus(config, run_dir, cluster).read(), status_lines
        else:
            found, lines = shadow_status(config, run_dir, cluster, source), shadow_lines
    answer(arguments.json, found, lines(found))
    return errors.OK


def audit(arguments: argparse.Namespace) -> int:
    from connectors.config import ConfigError

    config, run_dir = load_run(arguments)
    if (source := config.trainer.source) is not None:
        raise ConfigError(
            f"{run_dir.path}: is a shadow's folder, which grants nothing that could be lost: audit "
            f"its run, {source.run}, and replay the shadow"
        )
    from deploy.audit_log import audit_run
    from deploy.audit_text import as_json, audit_lines, unprovable
    from deploy.base import Unprovable
    from deploy.log import opened

    with stdout_for_answer(arguments.json), opened(config, run_dir) as cluster:
        try:
            found = as_json(audit_run(config, run_dir, cluster))
        except Unprovable as error:
            found = unprovable(str(error))
    answer(arguments.json, found, audit_lines(found))
    return errors.OK if found["ok"] else errors.NOT_VERIFIED


def replay(arguments: argparse.Namespace) -> int:
    from connectors.config import ConfigError

    config, run_dir = load_run(arguments)
    if arguments.last is not None and (arguments.first is not None or arguments.until is not None):
        raise ConfigError("replay: --last goes without --from and --to")
    gpus.claim("trainer.num_gpus", config.trainer.num_gpus)
    from deploy.log import opened
    from trainer.replay import NothingToReplay, difference_lines
    from trainer.replay import replay as execute_again

    with stdout_for_answer(arguments.json), opened(config, run_dir) as cluster:
        try:
            done = execute_again(
                cluster,
                run_dir,
                config,
                last=arguments.last,
                first=arguments.first,
                until=arguments.until,
            )
        except NothingToReplay as error:
            raise errors.RunFailed(str(error), errors.FAILED) from error
    found = {"steps": done.steps, "equal": done.equal, "first_difference": done.first_difference}
    verdict = "digests equal" if done.differs is None else "digests DIFFER"
    lines = [f"steps {done.first} to {done.last} executed again: {verdict}"]
    lines += difference_lines(done)
    answer(arguments.json, found, lines)
    return errors.OK if done.equal else errors.NOT_VERIFIED


def trace(arguments: argparse.Namespace) -> int:
    config, run_dir = load_run(arguments)
    from deploy.log import opened
    from deploy.trace import trace_lines, trace_run

    with stdout_for_answer(arguments.json), opened(config, run_dir) as cluster:
        found = trace_run(config, run_dir, cluster, arguments.id)
    answer(arguments.json, found, trace_lines(found))
    return errors.OK
