"""A run's status, read beside the supervisor's loop: a broker that is away delays the picture,
never the supervision."""

from __future__ import annotations

import threading
from typing import Any, Final

from connectors.config import Config
from connectors.kafka.client import KafkaFailure, OffsetGone
from connectors.kafka.locate import cluster
from connectors.run_dir import RunDir
from deploy.held_out import curve
from deploy.status import RunStatus

EVERY_S: Final = 0.5
AWAY_S: Final = 5.0
"""After this long without a broker a reading is given up; the next one connects anew."""


class Watch:
    """Reads the status every half second on a thread of its own. `latest` is the newest, None
    before the first. Any error but an outage surfaces in `check`."""

    def __init__(self, config: Config, run_dir: RunDir) -> None:
        self._config, self._run_dir = config, run_dir
        self._closed = threading.Event()
        self._reading = threading.Lock()  # Kafka clients belong to one thread at a time
        self._status: RunStatus | None = None
        self._error: Exception | None = None
        self._is_shut = False
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.latest: dict[str, Any] | None = None

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Raises what ended the thread."""
        if self._error is not None:
            raise self._error

    def read_again(self) -> dict[str, Any]:
        """A status that holds everything written before the call, else what `latest` was (nothing
        read yet: step -1)."""
        return self._read() or self.latest or {"step": -1}

    def last_reading(self) -> dict[str, Any] | None:
        """The final status, None if the log was never readable. Ends the watch: its clients must
        not look for a broker that is about to stop."""
        status = self._read() or self.latest
        self.close()
        return status

    def evaluated_version(self) -> int:
        """The number of the newest evaluated version, -1 before the first."""
        status = self._status
        if status is None:
            return -1
        return max((e.version.number for e in status.fold.line_evaluations()), default=-1)

    def curves(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """(step, reward) of training and of held-out prompts."""
        status = self._status
        return (status.fold.rewards(), curve(status.fold.held_out())) if status else ([], [])

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(2 * AWAY_S)
        with self._reading:
            if self._status is not None and not self._is_shut:
                self._status.close()
                self._is_shut = True

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._read()
                self._closed.wait(EVERY_S)
        except Exception as error:  # the thread's edge: surfaces in `check`
            self._error = error

    def _read(self) -> dict[str, Any] | None:
        with self._reading:
            try:
                if self._status is None:
                    log = cluster(self._config, self._run_dir, unavailable_s=AWAY_S)
                    self._status = RunStatus(self._config, self._run_dir, log)
                self.latest = self._status.read()
            except OffsetGone:  # trimmed while it was read: begin again from where it starts now
                if self._status is not None:
                    self._status.close()
                    self._status = None
                return None
            except KafkaFailure:
                return None  # what was folded stays; the client finds the broker again
            return self.latest
