"""`headwater build-model`: what `run` calls when model.path names a function instead of a
folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from deploy.commands.arguments import Commands, command


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "build-model",
        execute,
        "builds a model folder by calling the function that model.path names",
        "headwater build-model examples/quickstart/model.py:build /tmp/model",
    )
    parser.add_argument("function", metavar="FUNCTION", help="module:function or file.py:function")
    parser.add_argument("dir", metavar="DIR", help="the folder it writes the model into")
    parser.add_argument("--base-dir", default=".", metavar="D", help="where FUNCTION is looked up")


def execute(arguments: argparse.Namespace) -> int:
    from connectors.config import ConfigError
    from connectors.plugins import load

    build = load(arguments.function, arguments.base_dir)
    folder = Path(arguments.dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    build(folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{arguments.function} wrote no config.json into the folder it was given")
    return 0
