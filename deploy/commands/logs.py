"""`headwater logs import`: what other systems logged of conversations becomes live traffic."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deploy import errors
from deploy.commands.arguments import Commands, add_json, command
from deploy.output import answer, stdout_for_answer

FORMATS = ("auto", "openai", "otel", "langfuse", "messages", "sharegpt")


def add(commands: Commands) -> None:
    top = commands.add_parser("logs", help="brings other systems' logs into a run")
    actions = top.add_subparsers(dest="action", metavar="ACTION", required=True)
    parser = command(
        actions,
        "import",
        import_,
        "reads logs of conversations and their scores into the log of a run",
        "headwater logs import traffic.jsonl runs/support --task support --dry-run",
    )
    parser.add_argument("path", metavar="FILE|DIR", help="JSONL, JSON, CSV (or .gz), Parquet")
    parser.add_argument(
        "run", metavar="CONFIG|RUN", nargs="?", help="the run's folder, or its TOML file"
    )
    parser.add_argument("--format", choices=FORMATS, default="auto", help="default: row by row")
    parser.add_argument("--task", metavar="NAME", help="the task of calls that name none")
    parser.add_argument("--dry-run", action="store_true", help="what would be read, and what not")
    add_json(parser)


def import_(arguments: argparse.Namespace) -> int:
    from deploy.import_log import import_log
    from deploy.imported import summary
    from deploy.prompts import run_named

    path = Path(arguments.path)
    with stdout_for_answer(arguments.json), _progress(path) as told:
        done = import_log(
            path,
            None if arguments.run is None else run_named(arguments.run),
            form=arguments.format,
            task=arguments.task,
            dry_run=arguments.dry_run,
            told=told,
        )
    answer(arguments.json, done.as_json(), summary(done, dry_run=arguments.dry_run))
    num_known = done.skipped["already_imported"]
    return errors.OK if done.calls or done.feedback or num_known else errors.FAILED


@contextmanager
def _progress(path: Path) -> Iterator[Callable[[Any], None]]:
    """A bar over the files' bytes, on stderr, where somebody may be looking."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from connectors.imports.rows import files

    console = Console(file=sys.stderr)
    if not console.is_terminal or not path.exists():
        yield lambda found: None
        return
    sizes = {file: file.stat().st_size for file in files(path)}
    before, total = {}, 0
    for file, size in sizes.items():
        before[file], total = total, total + size
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        shown = bar.add_task(path.name, total=total)
        yield lambda found: bar.update(shown, completed=before[found.file] + found.at)
