"""Reaching a run's log, also when the run does not: the embedded broker is started for the time of
a command and ended after it."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from connectors.broker.server import serve
from connectors.config import Config
from connectors.kafka.client import Cluster
from connectors.kafka.locate import cluster
from connectors.run_dir import Role, RunDir
from deploy.errors import EnvironmentFailure
from deploy.launcher import LocalLauncher, Member, Process, last_line

AWAY_S: Final = 8.0
"""How long a command waits for a broker that does not answer."""
START_S: Final = 60.0
"""For a broker to open its log and listen; it reads what a crash left unfinished first."""


def serve_broker(config: Config, run_dir: RunDir, port: int | None) -> None:
    """The broker role: serves the run's log and registers its address, until SIGTERM."""
    data_dir = config.broker.data_dir
    serve(
        config.resolve(data_dir) if data_dir is not None else run_dir.broker_data,
        port=config.broker.port if port is None else port,
        fsync=config.broker.fsync,
        on_listening=lambda host, at: run_dir.register("broker", url=f"{host}:{at}"),
    )


@contextmanager
def opened(config: Config, run_dir: RunDir) -> Iterator[Cluster]:
    """The run's log with a broker behind it: the running one, else one started for the time of the
    block. EnvironmentFailure when it does not start."""
    if config.kafka.bootstrap_servers is not None:
        yield cluster(config, run_dir, unavailable_s=AWAY_S)
        return
    running = running_broker(run_dir)
    if running is not None:
        yield _at(config, run_dir, running)
        return
    arguments = ["broker", str(run_dir.config_file), "--run-dir", str(run_dir.path), "--port", "0"]
    process = LocalLauncher(run_dir).start(Member(name="broker", arguments=arguments))
    try:
        yield _at(config, run_dir, _await_broker(run_dir, process))
    finally:
        process.terminate()
        deadline = time.monotonic() + 10.0
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()


def running_broker(run_dir: RunDir) -> Role | None:
    """The run's broker if it is alive and takes connections."""
    role = next((r for r in run_dir.roles() if r.name == "broker" and r.url), None)
    return role if role is not None and is_alive(role.pid) and accepts(role.url) else None


def is_alive(pid: int) -> bool:
    """Whether there is a process `pid`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def accepts(address: str) -> bool:
    """Whether host:port takes a connection."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2.0):
            return True
    except OSError:
        return False


def _await_broker(run_dir: RunDir, process: Process) -> Role:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        running = running_broker(run_dir)  # ours, or that of a command that was faster
        if running is not None:
            return running
        if process.poll() is not None:
            break
        time.sleep(0.05)
    line = last_line(run_dir.log_file("broker"))
    raise EnvironmentFailure(f"the broker of {run_dir.path} does not start: {line}")


def _at(config: Config, run_dir: RunDir, broker: Role) -> Cluster:
    """By its registered address: one that serves for a command has a port of its own."""
    found = cluster(config, run_dir, unavailable_s=AWAY_S)
    return dataclasses.replace(found, bootstrap_servers=broker.url)
