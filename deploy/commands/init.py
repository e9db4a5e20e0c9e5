"""The commands for a new user: `headwater init` and `headwater doctor`."""

from __future__ import annotations

import argparse

from deploy import errors
from deploy.commands.arguments import Commands, add_json, add_overrides, command
from deploy.output import answer, stdout_for_answer


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "init",
        init,
        "writes a commented configuration, an example reward and prompts",
        "headwater init my_task && headwater run my_task/headwater.toml",
    )
    parser.add_argument("dir", metavar="DIR", help="the folder to write into")
    parser.add_argument("--for", choices=("online",), default="online", dest="purpose")
    add_json(parser)
    parser = command(
        commands, "doctor", doctor, "checks whether this machine can run Headwater",
        "headwater doctor examples/quickstart.toml",
    )  # fmt: skip
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", help="also check what this file needs"
    )
    add_overrides(parser)
    add_json(parser)


def init(arguments: argparse.Namespace) -> int:
    from deploy.init import write_example

    files = write_example(arguments.dir)
    lines = [f"wrote {file}" for file in files]
    answer(arguments.json, {"files": files}, [*lines, f"next: headwater run {files[0]}"])
    return errors.OK


def doctor(arguments: argparse.Namespace) -> int:
    from deploy.doctor import examine

    with stdout_for_answer(arguments.json):
        checks = examine(arguments.config, arguments.overrides)
    lines = [
        f"{'ok  ' if check.ok else 'FAIL'} {check.name}" + (f": {check.fix}" if check.fix else "")
        for check in checks
    ]
    answer(
        arguments.json,
        {"checks": [{"name": c.name, "ok": c.ok, "fix": c.fix} for c in checks]},
        lines,
    )
    return errors.OK if all(check.ok for check in checks) else errors.ENVIRONMENT
