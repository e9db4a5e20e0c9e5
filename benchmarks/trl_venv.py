"""TRL in an interpreter of its own: its packages are none of ours."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Final

from benchmarks.trl_workload import Order, Run

TRL: Final = "1.16.0"
"""Exact: `trl_run` overrides two of its trainer's own methods to time them."""
ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = Path(tempfile.gettempdir()) / "headwater-trl"


class Failed(RuntimeError):
    """TRL came to nothing; one line says why."""


def requirements() -> list[str]:
    """torch and transformers as they are here: exactly, because a looser torch would pull in
    gigabytes of CUDA."""
    ours = [f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "transformers")]
    return [*ours, f"trl=={TRL}"]


def installed(folder: Path) -> Path:
    """The interpreter of the virtual environment in `folder`, which is made where there is none.
    subprocess.CalledProcessError when that fails."""
    python = folder / "bin" / "python"
    has_all = [str(python), "-c", "import trl, datasets"]
    if python.is_file() and subprocess.run(has_all, capture_output=True).returncode == 0:
        return python
    print(f"installing {', '.join(requirements())} into {folder}", flush=True)
    venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, *requirements()], check=True)
    return python


def run(python: Path, order: Order, folder: Path, *, limit_s: float) -> Run:
    """Failed, also when it isn't done within `limit_s`. Its seconds count from here."""
    folder.mkdir(parents=True, exist_ok=True)
    asked, answer, said = folder / "order.json", folder / "run.json", folder / "run.log"
    order.write(asked)
    answer.unlink(missing_ok=True)
    command = [str(python), "-m", "benchmarks.trl_run", str(asked), str(answer)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(order.num_threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    began = time.time()
    with said.open("wb") as log:
        try:
            subprocess.run(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"not done within {limit_s:g} s ({said})") from None
    if not answer.is_file():
        raise Failed(f"see {said}")
    found = Run.read(answer.read_text())
    return replace(found, ends_s=[at - began for at in found.ends_s])


if __name__ == "__main__":
    print(installed(Path(sys.argv[1]) if sys.argv[1:] else FOLDER))
