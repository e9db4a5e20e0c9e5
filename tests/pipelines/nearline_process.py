"""The near-line job as a process, for tests that kill it.

python -P -m tests.pipelines.nearline_process RUN_DIR
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from connectors.config import load
from connectors.records import Version
from connectors.run_dir import RunDir
from tests.pipelines.dataflow_process import ROOT, DataflowProcess, _environment


class NearlineProcess(DataflowProcess):
    """On the run's configuration (`RUN_DIR/config.toml`). Version 0.1 is kept, no other."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = RunDir(run_dir)
        self.log_file = run_dir / "nearline.log"
        command = [sys.executable, "-P", "-m", "tests.pipelines.nearline_process", str(run_dir)]
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, env=_environment()
            )


def recompute(
    version: Version, tokens: NDArray[np.int32], mask: NDArray[np.int8]
) -> NDArray[np.float32] | None:
    if version != Version(0, 1):
        return None
    return np.where(mask == 1, np.float32(-0.5), np.float32("nan"))


def main(run_dir: str) -> None:
    # A tokenizer needs no torch; transformers would spend seconds importing it at every start.
    sys.modules["torch"] = None  # type: ignore[assignment]
    from pipelines.nearline_job import run_nearline

    run_nearline(load(Path(run_dir) / "config.toml"), RunDir(run_dir), recompute)


if __name__ == "__main__":
    main(*sys.argv[1:])
