"""The `headwater` command as a process, the way a user calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import headwater

SCRIPT = str(Path(headwater.__file__).resolve())


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-P", SCRIPT, *map(str, arguments)]


def call(
    *arguments: object,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Runs it to its end, output captured."""
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def config_text(model: Path | str, **sections: str) -> str:
    """A small valid configuration; `sections` are appended, e.g. broker="port = 1"."""
    text = f"""
[run]
name = "small"
[model]
path = "{model}"
[tasks.sums]
reward = "exact_match"
group_size = 2
"""
    return text + "".join(f"[{name}]\n{body}\n" for name, body in sections.items())


def model_folder(folder: Path) -> Path:
    """What the command takes for a model folder; nothing loads it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    return folder
