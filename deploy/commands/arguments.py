"""What the commands' arguments share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from connectors.config import Config
    from connectors.run_dir import RunDir

Commands = Any  # argparse's own type for a set of sub-parsers is private


def command(
    commands: Commands,
    name: str,
    execute: Callable[[argparse.Namespace], int],
    summary: str,
    example: str,
) -> argparse.ArgumentParser:
    """A sub-command whose help ends with an example."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(execute=execute)
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on stdout and nothing else there"
    )


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="the run's TOML file")
    parser.add_argument(
        "--run-dir", metavar="D", help="the run's folder (default: what CONFIG says)"
    )
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides",
        help="override a key of CONFIG, e.g. --set trainer.learning_rate=1e-5; repeatable",
    )  # fmt: skip


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's folder, e.g. runs/quickstart")


def load_config(arguments: argparse.Namespace) -> tuple[Config, RunDir]:
    """The configuration CONFIG names, overrides applied, and the folder of its run."""
    from connectors.config import ConfigError, load
    from connectors.run_dir import RunDir
    from deploy.run_folder import with_source

    if Path(arguments.config).is_dir():
        raise ConfigError(
            f"{arguments.config}: is a folder; a run is resumed by the file in its own, "
            f"{Path(arguments.config, 'config.toml')}"
        )
    config = load(arguments.config, arguments.overrides)
    run_dir = RunDir(arguments.run_dir) if arguments.run_dir else RunDir.of(config)
    if Path(arguments.config).resolve() == run_dir.config_file:
        config = with_source(config, run_dir)
    return config, run_dir


def load_run(arguments: argparse.Namespace) -> tuple[Config, RunDir]:
    """The configuration kept in the folder RUN; ConfigError when it holds no run."""
    from connectors.config import ConfigError
    from connectors.run_dir import RunDir
    from deploy import run_folder

    run_dir = RunDir(arguments.run)
    if not run_dir.path.exists():
        raise ConfigError(f"{run_dir.path}: does not exist")
    return run_folder.load_run(run_dir), run_dir
