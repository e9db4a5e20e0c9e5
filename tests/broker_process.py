"""The embedded broker as a process of its own, for tests that kill and restart it."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

START_S = 60.0
STOP_S = 30.0


class BrokerProcess:
    """A running broker on the loopback; `restart` keeps data and port, so clients find it again."""

    def __init__(
        self, data_dir: Path, *, fsync: str = "never", arguments: Sequence[str] = ()
    ) -> None:
        self.data_dir = data_dir
        self.fsync = fsync
        self._arguments = arguments
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.log_file = data_dir.with_name(data_dir.name + ".log")
        self.start()

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns when clients may connect."""
        assert not self.alive
        command = [sys.executable, "-P", "-m", "connectors.broker"]
        command += ["--data-dir", str(self.data_dir), "--port", str(self.port)]
        command += ["--fsync", self.fsync, *self._arguments]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        self.port = json.loads(_first_line(self._process, self.log_file))["port"]

    def kill9(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_S)

    def restart(self) -> None:
        """Starts again after `kill9` or `stop`; kills it first if it runs."""
        if self.alive:
            self.kill9()
        self.start()

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        assert self._process is not None
        return self._process.wait(STOP_S)

    def stop(self) -> int:
        """Ends it with SIGTERM; its exit status. Does nothing to one that has ended."""
        assert self._process is not None
        if self.alive:
            self.resume()
            self._process.terminate()
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise


def _first_line(process: subprocess.Popen[bytes], log_file: Path) -> bytes:
    assert process.stdout is not None
    deadline = time.monotonic() + START_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if selector.select(timeout=1.0):
                line = process.stdout.readline()
                if line:
                    return line
                break
    process.kill()
    process.wait()
    raise AssertionError(f"the broker did not start: {log_file.read_text()[-2000:]}")
