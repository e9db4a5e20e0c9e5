"""A whole run, small: real broker, engine, dataflow and trainer on a two-layer random model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import headwater
from connectors.config import Config, load
from connectors.kafka.client import Cluster, KafkaFailure
from connectors.kafka.locate import cluster as locate
from connectors.records import Manifest
from connectors.run_dir import RunDir
from trainer.step_log import chain, read_steps

T = TypeVar("T")

REWARD = '''
def score(sample, prompt):
    """Share of even token ids: something every group differs in."""
    ids = sample.trajectory.tokens[sample.trajectory.loss_mask == 1]
    return float((ids % 2 == 0).mean())
'''


def headwater_command(*arguments: object) -> list[str]:
    script = str(Path(headwater.__file__).resolve())
    return [sys.executable, "-P", script, *map(str, arguments)]


def until(condition: Callable[[], T], what: str, timeout_s: float = 120.0) -> T:
    """The first true value of `condition`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.1)
    return value


class SmallRun:
    """`folder` gets the configuration, the reward and the prompts; the run lies in `folder/run`.
    Without `fed` the test produces the prompts itself."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        reward: str = REWARD,
        prompts: list[str] | None = None,
        fed: bool = True,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.run_dir = RunDir(folder / "run")
        self.file = folder / "config.toml"
        (folder / "reward.py").write_text(reward)
        lines = prompts or [json.dumps({"prompt": f"say {i}"}) for i in range(40)]
        (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
        feeding = 'prompts = "prompts.jsonl"\nrepeat = true' if fed else ""
        self.file.write_text(
            f"""
[kafka]
partitions = 2
[model]
path = "{model}"
context_tokens = 64
[sampling]
max_tokens = 6
[tasks.even]
reward = "reward.py:score"
group_size = 4
{feeding}
[staleness]
policy = "one-step-off"
[trainer]
groups_per_step = 4
learning_rate = 1e-3
num_steps = 10
[checkpoint]
every_steps = 4
"""
        )
        self._settings = [f"{key}={json.dumps(value)}" for key, value in (settings or {}).items()]

    @property
    def config(self) -> Config:
        return load(self.run_dir.config_file)

    @property
    def cluster(self) -> Cluster:
        return locate(self.config, self.run_dir, unavailable_s=20)

    def arguments(self, *more: object) -> list[str]:
        settings = [argument for setting in self._settings for argument in ("--set", setting)]
        return headwater_command("run", self.file, "--run-dir", self.run_dir.path, *settings, *more)

    @contextmanager
    def running(self, *more: object) -> Iterator[subprocess.Popen[bytes]]:
        """`headwater run` in the background; ended when the block is left, if it still runs."""
        process = subprocess.Popen(self.arguments(*more))
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(60)

    def run_to_end(self, *more: object, timeout_s: float = 240.0) -> None:
        done = subprocess.run(
            self.arguments(*more), capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{self.logs()}"

    def ask(self, command: str, *arguments: object) -> dict[str, Any]:
        """The object a command answers with --json."""
        done = subprocess.run(
            headwater_command(command, self.run_dir.path, *arguments, "--json"),
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode in (0, 4), f"{done.stderr}\n{self.logs()}"
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def manifests(self) -> list[Manifest]:
        """The steps trained so far; none while there is no broker yet."""
        try:
            return chain(read_steps(self.cluster))
        except (KafkaFailure, OSError, ValueError):
            return []

    def wait_for_step(
        self, process: subprocess.Popen[bytes], step: int, timeout_s: float = 120.0
    ) -> None:
        def reached() -> bool:
            assert process.poll() is None, f"headwater run ended early\n{self.logs()}"
            found = self.manifests()
            return bool(found) and found[-1].step >= step

        until(reached, f"step {step}\n{self.logs()}", timeout_s)

    def pid(self, role: str) -> int:
        return next(r.pid for r in self.run_dir.roles() if r.name == role)

    def kill(self, role: str) -> None:
        os.kill(self.pid(role), signal.SIGKILL)

    def logs(self) -> str:
        """The last lines of every role's log."""
        parts = []
        for file in sorted((self.run_dir.path / "logs").glob("*.log")):
            tail = "\n".join(file.read_text(errors="replace").splitlines()[-15:])
            parts.append(f"--- {file.name}\n{tail}")
        return "\n".join(parts)
