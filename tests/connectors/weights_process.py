"""Engines of `weights_engine.py` as processes, to be killed, stopped and restarted."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import torch

from connectors.engines.host import this_host
from connectors.engines.types import EngineState
from connectors.weights import Peer
from connectors.weights.calls import ask

PROGRAM = Path(__file__).with_name("weights_engine.py")
WAIT_S = 30.0


def wait_until(done: Callable[[], bool], what: str, wait_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + wait_s
    while not done():
        assert time.monotonic() < deadline, f"not within {wait_s} s: {what}"
        time.sleep(0.005)


class EngineProcess:
    def __init__(self, width: int = 64, layers: int = 2, seed: int = 1) -> None:
        self._arguments = [str(width), str(layers), str(seed)]
        self._start(port=0)

    def _start(self, port: int) -> None:
        command = [sys.executable, "-P", str(PROGRAM), *self._arguments, str(port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        assert self.url, "the engine process did not start"

    @property
    def peer(self) -> Peer:
        """As its state tells."""
        return Peer(self.url, this_host())

    @property
    def exited(self) -> bool:
        return self._process.poll() is not None

    def state(self) -> EngineState:
        return ask(self.url, "GET", "/state", None, EngineState, WAIT_S)

    def fail_next(self, how: str) -> None:
        """See weights_engine.py."""
        ask(self.url, "POST", "/break", {"next": how}, dict, WAIT_S)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def wait_stopped(self) -> None:
        process = psutil.Process(self._process.pid)
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the engine stops itself")

    def kill9(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def restart(self) -> None:
        """At the same address, with its first weights and no version."""
        port = urlsplit(self.url).port
        self.kill9()
        assert port is not None
        self._start(port)


@contextmanager
def two_engines(width: int, layers: int) -> Iterator[list[EngineProcess]]:
    """For the tests of a module, with weights that differ."""
    torch.set_num_threads(1)
    engines = [EngineProcess(width, layers, seed=1), EngineProcess(width, layers, seed=2)]
    try:
        yield engines
    finally:
        for engine in engines:
            engine.kill9()


def answering(engines: list[EngineProcess]) -> list[EngineProcess]:
    """The same, killed ones restarted and stopped ones going on; what they hold is the test
    before's."""
    for engine in engines:
        if engine.exited:
            engine.restart()
        engine.go_on()
    return engines
