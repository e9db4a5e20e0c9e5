"""Records on their way into the log, each once, whatever is killed.

    write, any thread -> journal -> thread: front -> delivery -> log
                            ▲                           │
                            └──── drop what is there ───┘

A record is in the journal when `write` returns, so it outlives the process; the thread takes the
journal's front, waits until the log has it, and forgets it. While the log is away the journal
grows. Within a partition records keep the order in which they were written, but where a send was
given up after a part of it had reached the log: what it lacks follows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from connectors.config import ConfigError
from connectors.files import FileLock
from connectors.gateway.delivery import Delivery, Outbound
from connectors.gateway.journal import Journal
from connectors.kafka.client import Cluster, KafkaFailure

__all__ = ["Outbound", "Recorder"]

log = logging.getLogger(__name__)

RETRY_S: Final = 0.2
"""Between tries that fail at once; a broker that is away is waited for by the client itself."""
CLOSE_S: Final = 5.0
"""For a batch under way at the end."""


class Recorder:
    """`locate` may raise BrokerUnavailable: it is asked again. `folder` is this recorder's own."""

    def __init__(self, locate: Callable[[], Cluster], folder: Path, *, writer: str) -> None:
        """Goes on with what an earlier one left. Locked when another process has the folder,
        OSError when it cannot be used."""
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / "lock")
        self._stop = threading.Event()
        try:
            self._journal = Journal(folder)
            has_records = len(self._journal) > 0
            self._delivery = Delivery(locate, folder, writer, self._stop, has_records=has_records)
        except BaseException:
            self._lock.close()
            raise
        self._changed = threading.Condition()
        self._fault: BaseException | None = None
        self._away_for = ""  # why the last try failed
        self._encoder = msgspec.msgpack.Encoder()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """In the journal, and not known to be in the log."""
        return len(self._journal)

    def write(self, record: Outbound) -> None:
        """OSError when the journal cannot take it: then it is not recorded. RuntimeError when
        nothing sends any more."""
        self._surface()
        if self._stop.is_set():
            raise OSError("the recorder is closed")
        self._journal.append(msgspec.msgpack.encode(record))
        with self._changed:
            self._changed.notify_all()

    def wait_empty(self, timeout_s: float) -> bool:
        """Whether all that was written is in the log, at the latest after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while len(self._journal) and (left_s := deadline - time.monotonic()) > 0:
                self._surface()
                self._changed.wait(left_s)
        return not len(self._journal)

    def close(self) -> None:
        """What is not in the log stays in the journal for the next start. A batch that the broker
        keeps waiting ends later, and holds the folder until then."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    def _surface(self) -> None:
        if self._fault is not None:
            raise RuntimeError("the recorder's thread has ended") from self._fault

    # ------------------------------------------------------------------------------- the thread
    def _run(self) -> None:
        try:
            while self._await_records():
                try:
                    self._move()
                except (KafkaFailure, ConfigError, OSError) as error:
                    self._say(str(error))
                    self._stop.wait(RETRY_S)
        except BaseException as fault:
            log.exception("the recorder ends; what was written stays in its journal")
            self._fault = fault
        finally:
            self._delivery.close()
            self._journal.close()
            self._lock.close()
            with self._changed:
                self._changed.notify_all()

    def _await_records(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stop.is_set() or len(self._journal) > 0)
        return not self._stop.is_set()

    def _move(self) -> None:
        bodies = self._journal.front()
        records = [msgspec.msgpack.decode(body, type=Outbound) for body in bodies]
        num_delivered = self._delivery.deliver(records)
        if not num_delivered:
            return
        self._say("")
        has_shrunk = self._journal.drop(bodies[:num_delivered])
        with self._changed:
            self._changed.notify_all()
        if has_shrunk:
            self._delivery.dropped()

    def _say(self, reason: str) -> None:
        """Once an outage, and its end."""
        if bool(reason) != bool(self._away_for):
            if reason:
                log.warning("records wait in the journal: %s", reason)
            else:
                log.warning("the log takes records again; %d wait", len(self._journal))
        self._away_for = reason
