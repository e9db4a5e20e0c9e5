"""Starts and ends a real engine process of either kind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from connectors.run_dir import RunDir

PROGRAM = Path(__file__).with_name("engine_program.py")
START_S = 240.0


class EngineProcess:
    """Serving when the constructor returns. Its folder (and so its registered url) outlives it."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        kind: str = "hf",
        name: str = "engine-0",
        context_tokens: int = 1024,
        **engine: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.run_dir = RunDir(folder)
        config = folder / "config.toml"
        settings = "\n".join(f"{key} = {value}" for key, value in engine.items())
        config.write_text(
            f'[model]\npath = "{model}"\ncontext_tokens = {context_tokens}\n'
            f'[engine]\nkind = "{kind}"\n{settings}\n[tasks.t]\nreward = "exact_match"\n'
        )
        arguments = [str(config), str(folder), name]
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM), *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.url = self._wait(name)

    def _wait(self, name: str) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the engine ended:\n{self.log.read_text()}")
            for role in self.run_dir.roles():
                if role.name == name and role.pid == self.process.pid:
                    return role.url
            time.sleep(0.05)
        self.kill()
        raise TimeoutError(f"the engine did not start:\n{self.log.read_text()}")

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        if not self.ended:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            return self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
