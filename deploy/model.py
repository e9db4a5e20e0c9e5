"""The model a run starts from, when its configuration names a function instead of a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from connectors.run_dir import RunDir
from deploy.errors import RunFailed
from deploy.launcher import CHILD_ENVIRONMENT, headwater_command, last_line


def build(function: str, base_dir: str, run_dir: RunDir) -> None:
    """Calls `function` on a staging folder, in a process of its own (torch stays out of this one),
    and renames it to RUN/model: a killed build leaves no half model. RunFailed with the last line
    of its log and its exit code."""
    log = run_dir.log_file("model")
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".model-", dir=run_dir.path) as staging:
        built = Path(staging, "model")
        command = headwater_command("build-model", function, built, "--base-dir", base_dir)
        with log.open("ab") as file:
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **CHILD_ENVIRONMENT},
                check=False,
            ).returncode
        if code != 0:
            raise RunFailed(f"model.path: {last_line(log)} (log in {log})", max(code, 1))
        target = run_dir.path / "model"
        if target.exists():  # of a start that was killed before it wrote config.toml
            shutil.rmtree(target)
        built.replace(target)
