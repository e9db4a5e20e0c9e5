"""A rank other than rank 0: it does what it is told, until Close, and never outlives rank 0.
Three threads:

    reader   the pipe ──▶ Calls to the main thread, Writes to the writer; ends the process at once
             when rank 0 is gone, wherever the other threads are
    main     Call after Call on this rank's engine: collectives with the other ranks
    writer   the last Capture ──▶ this rank's files of a checkpoint, while the main thread goes on
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Protocol

from connectors.arrow import decode_group
from connectors.config import Trainer
from connectors.kafka.client import Reader
from connectors.kafka.locate import source
from connectors.records import Coordinate, Group
from connectors.weights.group import join_store
from trainer import rank_line, shares
from trainer.rank_line import Failed, Ready, Said, Start, Write, Written
from trainer.shares import Call, Share
from trainer.state_copy import StateCopy

log = logging.getLogger(__name__)

MEET_S: Final = 600.0
"""How long ranks wait for each other to be started."""


class Engine(Protocol):
    """This rank's part of `trainer.engine.TrainingEngine`."""

    def train(
        self, share: Share, seed: int, settings: Trainer, *, measure_drift: bool = False
    ) -> object: ...

    def take_part(self) -> None: ...

    def capture(self, into: StateCopy | None = None) -> StateCopy: ...

    def load(self, folder: Path) -> None: ...

    def save_pretrained(self, folder: Path) -> None: ...

    def close(self) -> None: ...


Read = Callable[[Sequence[Coordinate]], Sequence[Group]]
Open = Callable[[Start], tuple[Engine, Read]]
"""This rank's engine, among the others, and how it reads the groups of its share."""


class Line:
    """This rank's end of the pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._says = threading.Lock()
        self._calls: queue.SimpleQueue[tuple[Call, Future[StateCopy]]] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[tuple[str, Future[StateCopy]]] = queue.SimpleQueue()
        start = rank_line.decode_told(connection.recv_bytes())
        assert isinstance(start, Start)
        self.start = start
        for work in (self._listen, self._write):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()

    def say(self, said: Said) -> None:
        with self._says:
            self._connection.send_bytes(rank_line.encode(said))

    def calls(self) -> Iterator[tuple[Call, Future[StateCopy]]]:
        """In order; of a Capture, what it gave is to be set."""
        while True:
            yield self._calls.get()

    def _listen(self) -> None:
        try:
            self._sort()
        except (EOFError, OSError):
            log.info("rank 0 is gone")
        except Exception:  # the thread's edge: without it, nothing would end this process
            log.exception("what rank 0 said")
        os._exit(1)

    def _sort(self) -> None:
        captured: Future[StateCopy] = Future()
        while True:
            told = rank_line.decode_told(self._connection.recv_bytes())
            if isinstance(told, Write):
                self._writes.put((told.folder, captured))
                continue
            assert not isinstance(told, Start)
            if isinstance(told, shares.Capture):
                captured = Future()
            self._calls.put((told, captured))

    def _write(self) -> None:
        while True:
            folder, captured = self._writes.get()
            error = None
            try:
                captured.result().write(Path(folder))
            except Exception as failure:  # the thread's edge: rank 0 gets it
                log.exception("writing to %s failed", folder)
                error = _text(failure)
            self.say(Written(folder, error))


def run(connection: Connection, open_rank: Open | None = None) -> int:
    """0 after a Close; an error is said to rank 0 before it ends the process."""
    line = Line(connection)
    try:
        line.say(Ready())
        serve(line, *(open_rank or _open)(line.start))
    except Exception as error:  # the process's edge: rank 0 and the log get it
        log.exception("rank %d ends", line.start.rank)
        line.say(Failed(_text(error)))
        logging.shutdown()
        os._exit(1)  # at a regular exit, libraries may wait for the other ranks
    return 0


def serve(line: Line, engine: Engine, read: Read) -> None:
    """Does what it is told, until Close. Raises what the engine and the reading raise."""
    copy: StateCopy | None = None
    for call, captured in line.calls():
        match call:
            case shares.Train():
                settings = Trainer.model_validate_json(call.trainer)
                share = call.order.share(read)
                engine.train(share, call.seed, settings, measure_drift=call.measure_drift)
            case shares.Take() | shares.Digest():
                engine.take_part()
            case shares.Capture():
                copy = engine.capture(into=copy)
                captured.set_result(copy)
            case shares.Load(folder):
                engine.load(Path(folder))
            case shares.Pretrained(folder):
                engine.save_pretrained(Path(folder))
            case shares.Close():
                engine.close()
                return


def _open(start: Start) -> tuple[Engine, Read]:
    from trainer.engine import TrainingEngine
    from trainer.process_group import World

    config = start.parsed
    store = join_store(*start.store, MEET_S)
    world = World(rank=start.rank, num_ranks=start.num_ranks, store=store)
    engine = TrainingEngine.of(config, world)
    reader = Reader(start.cluster, source(config, start.cluster).topic("trajectories"), {})

    def read(records: Sequence[Coordinate]) -> list[Group]:
        # What matters of them is compared with what rank 0 read, share by share.
        return [decode_group(reader.read_at(one.partition, one.offset).value) for one in records]

    return engine, read


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
