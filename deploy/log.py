"""Reaching a run's log, also when the run does not: the embedded broker is started for the time of
a command and ended after it, or after the last of those that came to read beside it.

Each command holds RUN/readers.lock with the others while it reads. A broker that was started for
them ends once it can hold that lock alone; whoever comes then waits for its end, and starts one.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Final

from connectors.broker.security import Security, secured
from connectors.broker.server import serve
from connectors.config import Config
from connectors.files import FileLock, Locked, SharedLock
from connectors.kafka.client import Cluster
from connectors.kafka.locate import cluster
from connectors.run_dir import Role, RunDir
from deploy.errors import EnvironmentFailure
from deploy.launcher import LocalLauncher, Member, Process, last_line

READERS: Final = "readers.lock"
UNREAD_S: Final = 0.5
"""How often a broker looks whether anybody reads."""
AWAY_S: Final = 8.0
"""How long a command waits for a broker that does not answer."""
START_S: Final = 60.0
"""For a broker to open its log and listen; it reads what a crash left unfinished first."""


def serve_broker(
    config: Config, run_dir: RunDir, port: int | None, *, while_read: bool = False
) -> None:
    """The broker role: serves the run's log and registers its address, until SIGTERM; with
    `while_read`, until no command reads the log any more, too."""
    if while_read:
        threading.Thread(target=_end_unread, args=(run_dir,), daemon=True, name="readers").start()
    data_dir = config.broker.data_dir
    serve(
        config.resolve(data_dir) if data_dir is not None else run_dir.broker_data,
        port=config.broker.port if port is None else port,
        fsync=config.broker.fsync,
        on_listening=lambda host, at: run_dir.register("broker", url=f"{host}:{at}"),
        security=broker_security(config),
    )


def broker_security(config: Config) -> Security:
    """What the embedded broker serves with. BrokerError when a file of it is unusable."""
    files = (config.broker.tls_cert, config.broker.tls_key, config.broker.users)
    return secured(*(None if file is None else config.resolve(file) for file in files))


@contextmanager
def opened(config: Config, run_dir: RunDir) -> Iterator[Cluster]:
    """The run's log with a broker behind it: the running one, else one started for the time of the
    block. EnvironmentFailure when it does not start."""
    run_dir = home(config, run_dir)
    if config.kafka.bootstrap_servers is not None:
        yield cluster(config, run_dir, unavailable_s=AWAY_S)
        return
    with _reading(run_dir) as readers:
        running = running_broker(run_dir)
        if running is not None:
            yield _at(config, run_dir, running)
        else:
            yield from _started(config, run_dir, readers)


def _started(config: Config, run_dir: RunDir, readers: SharedLock) -> Iterator[Cluster]:
    arguments = ["broker", str(run_dir.config_file), "--run-dir", str(run_dir.path), "--port", "0"]
    started = Member(name="broker", arguments=[*arguments, "--while-read"], outlives=True)
    process = LocalLauncher(run_dir).start(started)
    try:
        yield _at(config, run_dir, _await_broker(run_dir, process))
    finally:
        if readers.is_last():
            process.terminate()
            deadline = time.monotonic() + 10.0
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            process.kill()


@contextmanager
def _reading(run_dir: RunDir) -> Iterator[SharedLock]:
    try:
        readers = SharedLock(run_dir.path / READERS)
    except OSError as error:
        raise EnvironmentFailure(f"{run_dir.path} cannot be written: {error.strerror}") from error
    with closing(readers):
        yield readers


def _end_unread(run_dir: RunDir) -> None:
    """Ends this process, holding the lock, once nobody else does."""
    while True:
        time.sleep(UNREAD_S)
        with suppress(Locked):
            lock = FileLock(run_dir.path / READERS)  # noqa: F841 - held to the end
            os.kill(os.getpid(), signal.SIGTERM)
            return


def home(config: Config, run_dir: RunDir) -> RunDir:
    """The run that the log is of: a shadow writes into the log of the one it trains on."""
    source = config.trainer.source
    return run_dir if source is None else RunDir(source.run)


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
