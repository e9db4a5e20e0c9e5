"""A dataflow job as a process, for tests that kill it.

python -P -m tests.pipelines.dataflow_process RUN_DIR fake|hanging|real
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from connectors.config import load
from connectors.engines.types import Completion, GenerateRequest
from connectors.run_dir import RunDir
from tests.operators.engine_fake import END, FIRST, FakeEngine

ROOT = Path(__file__).resolve().parents[2]


class SlowEngine(FakeEngine):
    """Takes a random while, so that groups end out of order and kills find some in flight."""

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        await asyncio.sleep(random.uniform(0.01, 1.5))
        return await super().generate(request)


class HangingEngine(FakeEngine):
    """Answers no request that may start below version 0.1; the others at the version they ask
    for."""

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        self.version = request.min_version or FIRST
        if self.version == FIRST:
            await asyncio.Event().wait()
        return await super().generate(request)


def answer(request: GenerateRequest) -> Sequence[int]:
    return [*request.token_ids[:3], END]


ENGINES = {"fake": SlowEngine, "hanging": HangingEngine}


class DataflowProcess:
    """Both stages on the run's configuration (`RUN_DIR/config.toml`)."""

    def __init__(self, run_dir: Path, engine: str = "fake") -> None:
        self._run_dir = RunDir(run_dir)
        self.log_file = run_dir / "dataflow.log"
        command = [sys.executable, "-P", "-m", "tests.pipelines.dataflow_process"]
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, str(run_dir), engine], cwd=ROOT, stdout=log, stderr=log,
                env=_environment(),
            )  # fmt: skip

    def kill9(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> int:
        """SIGTERM once it is up, for before that nothing takes it; the exit status."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None and not self._is_up() and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill9()
            raise

    def _is_up(self) -> bool:
        return any(role.pid == self.process.pid for role in self._run_dir.roles())

    def log(self) -> str:
        return self.log_file.read_text()[-3000:]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def main(run_dir: str, engine: str) -> None:
    # A tokenizer needs no torch; transformers would spend seconds importing it at every start.
    sys.modules["torch"] = None  # type: ignore[assignment]
    from pipelines.job import run_dataflow

    config = load(Path(run_dir) / "config.toml")
    run_dataflow(
        config,
        RunDir(run_dir),
        {"rollout", "reward"},
        engine=ENGINES[engine](answer) if engine in ENGINES else None,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
