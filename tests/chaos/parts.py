"""The processes of one chaos run: `headwater run` and its roles, and what stands behind a proxy.

A broker or an engine that clients reach through a proxy is started here, not by the run, which is
then configured with the proxy's address; like every other role it is started again when it ends.
Nothing here blocks for long: `tick` is called a few times a second.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from connectors.kafka.client import Cluster, KafkaFailure, Reader
from connectors.records import Begin, StepRecord, decode_as
from deploy.health import Supervised
from tests.chaos.proxy import Proxy
from tests.chaos.schedule import Schedule
from tests.small_run import SmallRun, headwater_command
from trainer.step_log import Chain

AGAIN_S: Final = 0.5
STOP_S: Final = 120.0

SETTINGS: Final = {
    "trainer.num_steps": 100_000,
    "checkpoint.every_steps": 3,
    "engine.max_running": 8,
}
EVALUATED: Final = {
    "tasks.even.eval_prompts": "prompts.jsonl",
    "eval.every_versions": 5,
    "eval.max_prompts": 2,
}


class Outside:
    """A role that is not the run's child; on the port it has from the first start to the last."""

    def __init__(self, role: str, file: Path, folder: Path) -> None:
        self.port = free_port()
        self._command = headwater_command(role.partition("-")[0], file, "--run-dir", folder)
        self._command += ["--port", str(self.port)]
        self._command += ["--name", role] if role.startswith("engine") else []
        self._log = folder / "logs" / f"{role}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._start_at: float | None = None
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.popen = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)

    def tick(self, now: float) -> None:
        if self.popen.poll() is None:
            self._start_at = None
        elif self._start_at is None:
            self._start_at = now + AGAIN_S
        elif now >= self._start_at:
            self.start()


class Parts:
    """A schedule's run in `folder`, started. `stop` ends it in order, `clear` anyhow."""

    def __init__(self, plan: Schedule, folder: Path, model: Path) -> None:
        settings: dict[str, Any] = {
            **SETTINGS, "engine.count": len(plan.engines), "run.seed": plan.seed,
        }  # fmt: skip
        settings["checkpoint.trim_log"] = plan.trims
        if "evaluate" in plan.roles:
            settings |= EVALUATED
        self.folder = folder
        self.outside: dict[str, Outside] = {}
        self.proxies: list[Proxy] = []
        self.restarts = 0
        self._run_again_at: float | None = None
        # The folders of what stands outside are read by no role of the run.
        SmallRun(folder, model, settings=settings)  # writes the files that `Outside` starts from
        if "broker" in plan.proxied:
            port = self._put_outside("broker", folder / "outside", kafka=True)
            settings["kafka.bootstrap_servers"] = f"127.0.0.1:{port}"
        if "engines" in plan.proxied:
            ports = [self._put_outside(name, folder / "outside") for name in plan.engines]
            settings["engine.urls"] = [f"http://127.0.0.1:{port}" for port in ports]
        if "broker" not in self.outside:
            settings["broker.port"] = free_port()
        broker_port = (
            self.outside["broker"].port if "broker" in self.outside else settings["broker.port"]
        )
        self.run = SmallRun(folder, model, settings=settings)
        data = folder / "outside" if "broker" in self.outside else self.run.run_dir.path
        self.broker_data = data / "broker"
        self.progress = Progress(
            Cluster(bootstrap_servers=f"127.0.0.1:{broker_port}", unavailable_s=3.0)
        )
        self.start()

    def _put_outside(self, role: str, folder: Path, *, kafka: bool = False) -> int:
        """Starts `role`; the port of the proxy in front of it."""
        self.outside[role] = Outside(role, self.folder / "config.toml", folder)
        self.proxies.append(Proxy(self.outside[role].port, kafka=kafka))
        return self.proxies[-1].port

    def start(self) -> None:
        with (self.folder / "run.log").open("ab") as log:
            self.popen = subprocess.Popen(
                self.run.arguments(), stdout=log, stderr=subprocess.STDOUT
            )

    def tick(self) -> None:
        """Starts again what has ended. AssertionError when `headwater run` gave up."""
        now = time.monotonic()
        for part in self.outside.values():
            part.tick(now)
        code = self.popen.poll()
        if code is None:
            self._run_again_at = None
        elif code not in (0, -signal.SIGKILL):
            raise AssertionError(f"headwater run ended with {code}: {self._said()}")
        elif self._run_again_at is None:
            self._run_again_at = now + AGAIN_S
        elif now >= self._run_again_at:
            self.start()
            self.restarts += 1

    def process(self, role: str) -> psutil.Process | None:
        """Of a role that runs now, whether or not it got as far as doing its work."""
        pid: int | None
        if role == "run":
            pid = self.popen.pid
        elif role in self.outside:
            pid = self.outside[role].popen.pid
        else:
            pid = self._supervised(role)
        with contextlib.suppress(psutil.NoSuchProcess):
            found = None if pid is None else psutil.Process(pid)
            # The kernel gives a pid again: it must be a process of this run.
            if found is not None and any(str(self.folder) in a for a in found.cmdline()):
                return found
        return None

    def _supervised(self, role: str) -> int | None:
        try:
            content = (self.run.run_dir.path / "supervisor.json").read_bytes()
        except FileNotFoundError:
            return None
        left = msgspec.json.decode(content, type=Supervised)
        return next((r.pid for r in left.roles if r.name == role), None)

    def stop(self) -> None:
        """Ctrl-C of the run; AssertionError unless it ends with 0. The broker goes on."""
        self.popen.send_signal(signal.SIGINT)
        assert self.popen.wait(STOP_S) == 0, f"ended with {self.popen.returncode}: {self._said()}"

    def left_over(self) -> list[str]:
        """The command lines of processes that a stopped run left behind."""
        known = {self.popen.pid, *(part.popen.pid for part in self.outside.values())}
        return [" ".join(p.cmdline()) for p in self._processes() if p.pid not in known]

    def clear(self) -> None:
        """Kills whatever is left of the run, its supervisor first."""
        self.progress.close()
        for popen in (self.popen, *(part.popen for part in self.outside.values())):
            popen.kill()
            popen.wait(10.0)
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for proxy in self.proxies:
            proxy.close()

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(str(self.folder) in a for a in process.cmdline()):
                    found.append(process)
        return [p for p in found if p.pid != os.getpid()]

    def _said(self) -> str:
        lines = (self.folder / "run.log").read_text(errors="replace").splitlines()
        return lines[-1] if lines else "it said nothing"


class Progress:
    """What `steps` says, read beside the chaos and not through a proxy. `step`: the last that
    counts; `begins`: of every trainer; `begun_by`: the pid of the last; `since_begin`: its
    steps."""

    def __init__(self, cluster: Cluster) -> None:
        self.step = 0
        self.begins: list[Begin] = []
        self.begun_by = 0
        self.since_begin = 0
        self._cluster = cluster
        self._chain = Chain()
        self._next = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(30.0)

    def _follow(self) -> None:
        while not self._closed.wait(0.2):
            try:
                self._read()
            except KafkaFailure:
                continue  # no broker, or no topic yet

    def _read(self) -> None:
        with closing(Reader(self._cluster, self._cluster.topic("steps"), {0: self._next})) as steps:
            steps.seek(0, max(self._next, steps.starts()[0]))
            while not self._closed.is_set():
                for record in steps.poll(0.2):
                    self._observe(record.offset, decode_as(record.value, StepRecord))

    def _observe(self, offset: int, record: Any) -> None:
        self._next = offset + 1
        self._chain.observe(offset, record)
        if isinstance(record, Begin):
            self.begins.append(record)
            self.begun_by, self.since_begin = int(record.writer.split(":")[1]), 0
        elif self._chain.step > self.step:
            self.since_begin += 1
        self.step = self._chain.step


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
