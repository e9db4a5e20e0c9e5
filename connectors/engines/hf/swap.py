"""Weights taken by a running decoder: received or read, and verified, beside the generation;
installed between two decode steps. Which version the engine holds, and whether it may decode at
all, is decided here.

An interrupted update leaves no whole version: decoding is then held between two steps (sequences
keep their tokens) until the next version is in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from connectors.engines.hf.decoder import Decoder
from connectors.engines.metrics import Durations
from connectors.records import Version
from connectors.weights import (
    Ack,
    FenceRequest,
    JoinRequest,
    LoadRequest,
    RelabelRequest,
    Staged,
    UpdateRequest,
    WeightsReceiver,
)


class WeightSwap:
    """Methods block and may run on any threads but the decode thread and the asyncio loop's.
    `on_version` is called from those threads after every change of `version`. Errors are
    WeightsErrors."""

    num_ranks = 1

    def __init__(self, decoder: Decoder, receiver: WeightsReceiver) -> None:
        self._decoder = decoder
        self._receiver = receiver
        self._lock = threading.Lock()
        self._hold = ExitStack()  # the pause kept while there is no whole version
        self._held = False
        self.on_version: Callable[[], None] = lambda: None
        self.update_durations = Durations()
        self.pause_durations = Durations()
        self.update_seconds: dict[str, float] = {}

    @property
    def version(self) -> Version | None:
        # The sampler's own: what is admitted at a version gets no token of an older one.
        whole = self._receiver.version is not None and not self._held
        return self._decoder.sampler.version if whole else None

    @property
    def digest(self) -> str:
        return self._receiver.digest

    @property
    def epoch(self) -> int:
        return self._receiver.epoch

    def join(self, request: JoinRequest) -> None:
        with self._held_when_interrupted():
            self._receiver.join(request)

    def fence(self, request: FenceRequest) -> None:
        with self._held_when_interrupted():
            self._receiver.fence(request)

    def update(self, request: UpdateRequest) -> Ack:
        """Receives one version and installs it."""
        started = time.monotonic()
        with self._held_when_interrupted():
            return self._install(self._receiver.receive(request), started)

    def load(self, request: LoadRequest) -> Ack:
        """Installs a version that lies in the trainer's memory."""
        started = time.monotonic()
        with self._held_when_interrupted(), self._receiver.loaded(request) as staged:
            return self._install(staged, started)

    def _install(self, staged: Staged, started: float) -> Ack:
        received = time.monotonic()
        with self._lock, self._decoder.paused():
            paused = time.monotonic()
            ack = self._receiver.apply(staged)
            self._decoder.sampler.version = ack.version
            self._decoder.restart()
            self._release()
            ended = time.monotonic()
            self.pause_durations.add(ended - paused)
            self.update_durations.add(ended - started)
            self.update_seconds = {
                "receive": received - started,
                "wait": paused - received,  # for a decode step to end
                "pause": ended - paused,
            }
        return ack

    def relabel(self, request: RelabelRequest) -> Ack:
        """The same weights under another version: nothing is copied or recomputed."""
        with self._held_when_interrupted(), self._lock:
            ack = self._receiver.relabel(request)
            self._decoder.sampler.version = ack.version
            self._release()
        return ack

    @contextmanager
    def _held_when_interrupted(self) -> Iterator[None]:
        """Whatever the trainer sends may break off an update that is under way in another
        thread."""
        try:
            yield
        finally:
            with self._lock:
                if self._receiver.version is None and not self._held and self._decoder.alive:
                    self._hold.enter_context(self._decoder.paused())
                    self._held = True
            self.on_version()

    def _release(self) -> None:
        self._held = False
        self._hold.close()

    def close(self) -> None:
        with self._lock:
            self._release()
        self._receiver.close()
