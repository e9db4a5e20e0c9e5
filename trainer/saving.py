"""Saving beside training: the trainer pauses for a copy in memory, a thread writes it.

    save(step, meta) ──▶ wait for the save before ──▶ copy ──▶ return
                                                        └──▶ thread: write, fsync, rename, retire

There is one copy, so its memory is bounded; a save that is due while the one before still runs
waits for it. What a save fails of is raised by the next call. Of several ranks, each copies and
writes its own part; this is of rank 0, whose thread waits for the files of all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Final, Protocol

from connectors.kafka.client import Cluster, Reader
from connectors.kafka.parsed import parsed
from connectors.records import Begin, StepRecord
from trainer import written_by
from trainer.checkpoint import CheckpointStore
from trainer.state_copy import StateCopy

CLOSE_S: Final = 45.0
"""How long the end of a trainer that failed waits for a save under way."""


class Engine(Protocol):
    def capture(self, into: StateCopy | None = None) -> StateCopy: ...

    def environment(self) -> Mapping[str, str]: ...


class Saver:
    """`may_retire` is asked, on the thread, before old checkpoints go; `on_saved` is called there
    after them. Both may raise, like the save itself.

    pause_s  what the last save cost training: waiting for the one before, and copying
    write_s  how long the last finished save took in the background
    """

    def __init__(
        self,
        store: CheckpointStore,
        engine: Engine,
        *,
        may_retire: Callable[[], bool] = lambda: True,
        on_saved: Callable[[], object] = lambda: None,
    ) -> None:
        """Takes the memory for the copy at once, as large as the engine's state."""
        self.pause_s = self.write_s = 0.0
        self._store, self._engine = store, engine
        self._may_retire, self._on_saved = may_retire, on_saved
        self._copy = engine.capture()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, step: int, meta: bytes) -> None:
        """Saves the engine's state of this moment as the checkpoint of `step`; returns once it is
        copied. Raises as `check`."""
        started = time.perf_counter()
        self.wait()
        self._engine.capture(into=self._copy)
        written_by.note(self._copy, self._engine.environment())
        self._thread = threading.Thread(
            target=self._write, args=(step, meta), name="saver", daemon=True
        )
        self._thread.start()
        self.pause_s = time.perf_counter() - started

    def check(self) -> None:
        """Raises what a save failed of, CheckpointFailed above all."""
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Until no save runs. Raises as `check`."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def close(self) -> None:
        """Gives a save under way a while to end, which spares the next start some steps."""
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _write(self, step: int, meta: bytes) -> None:
        started = time.perf_counter()
        try:
            self._store.save(step, self._copy.write, meta, may_retire=self._may_retire)
            self.write_s = time.perf_counter() - started
            self._on_saved()
        except BaseException as error:  # the thread's edge: the owner gets it from check()
            self._failure = error


class Fence:
    """Whether trainer `epoch` is still the one that counts. For one thread."""

    def __init__(self, cluster: Cluster, epoch: int) -> None:
        self._cluster, self._epoch, self._next = cluster, epoch, epoch + 1

    def is_current(self) -> bool:
        """False once a newer trainer has begun: then what is kept is no more this one's to
        decide."""
        topic = self._cluster.topic("steps")
        with closing(Reader(self._cluster, topic, {0: self._next})) as reader:
            for offset, record in parsed(reader.read_to(reader.ends()), StepRecord):
                if isinstance(record, Begin):
                    return False
                self._next = offset + 1
        return True
