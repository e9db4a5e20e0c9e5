"""`headwater COMMAND ...`: parses the arguments, runs one command, turns its end into an exit code.

    0 ok · 1 failed · 2 configuration · 3 environment · 4 a verification failed

A command is a module of `deploy.commands` with `add(commands)`, which declares its arguments and a
function `execute(arguments) -> exit code`. Nothing heavy is imported before that function runs.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from deploy import errors
from deploy.commands import (
    export,
    init,
    inspect,
    lineage,
    logs,
    model,
    other,
    prompts,
    read_log,
    roles,
    run,
    sft,
    simulate,
)

_GROUPS = (
    run, sft, inspect, read_log, lineage, export, other, simulate, prompts, logs, init, roles,
    model,
)  # fmt: skip
_DESCRIPTION = "Train LLM agents online, as a streaming job on a Kafka log."
_EPILOG = """examples:
  headwater run examples/quickstart.toml
  headwater status runs/quickstart
  headwater init my_task

Exit codes: 0 ok, 1 failed, 2 configuration, 3 environment, 4 a verification failed."""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="headwater",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for group in _GROUPS:
        group.add(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; prints one line on stderr when it fails."""
    arguments = parser().parse_args(argv)
    _set_up_logging(is_role=hasattr(arguments, "supervisor"))
    try:
        return int(arguments.execute(arguments))
    except KeyboardInterrupt:
        print("headwater: interrupted", file=sys.stderr)
        return errors.INTERRUPTED
    except BrokenPipeError:  # `headwater status RUN | head`: nobody reads on, which is no failure
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return errors.OK
    except Exception as error:  # the process's edge: the only broad except of the command
        return _report(error, arguments)


def _set_up_logging(*, is_role: bool) -> None:
    """A role logs to stderr, which is its log file under a supervisor; other commands say what went
    wrong in one line of their own, so libraries' warnings stay out of it."""
    logging.basicConfig(
        level=logging.INFO if is_role else logging.ERROR,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


def _report(error: Exception, arguments: argparse.Namespace) -> int:
    answer = errors.explain(error)
    if answer is not None:
        code, line = answer
        print(f"headwater: {line}", file=sys.stderr)
        return code
    summary = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if getattr(arguments, "supervisor", None) is not None:  # stderr is this role's log file
        traceback.print_exception(error)
        print(f"headwater: {summary}", file=sys.stderr)
    else:
        where = _keep_traceback(error, arguments.command)
        print(f"headwater: {summary} (traceback in {where})", file=sys.stderr)
    return errors.FAILED


def _keep_traceback(error: Exception, command: str) -> Path:
    handle, name = tempfile.mkstemp(prefix=f"headwater-{command}-", suffix=".log")
    with os.fdopen(handle, "w") as file:
        traceback.print_exception(error, file=file)
    return Path(name)
