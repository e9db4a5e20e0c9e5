"""Ranks with an engine that trains nothing: the folder of a call says what it does.

python -m tests.trainer.stub_rank FD              is a rank of a gang
python -m tests.trainer.stub_rank HOW FOLDER      is a rank 0 with two other ranks, of which the
                                                  first is busy; see `lead`
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from connectors.config import Config, parse
from connectors.kafka.client import Cluster
from connectors.records import Coordinate, Group
from connectors.signals import stop_on_signals
from trainer.checkpoint import CheckpointStore
from trainer.rank_line import Start
from trainer.state_copy import StateCopy
from trainer.worker import main

PROGRAM = "tests.trainer.stub_rank"
NO_LOG = Cluster(bootstrap_servers="127.0.0.1:1", security={"security_protocol": "PLAINTEXT"})


def config(num_ranks: int, **trainer: Any) -> Config:
    table = {
        "model": {"path": "m"},
        "tasks": {"a": {"reward": "exact_match", "group_size": 2}},
        "trainer": {"num_ranks": num_ranks, **trainer},
    }
    return parse(table, base_dir="/somewhere")


class StubEngine:
    """Does to itself what the name of a loaded folder says. Saved as a model, it lists what it was
    told and sees."""

    def __init__(self, start: Start) -> None:
        self.rank, self.seen = start.rank, list[str]()
        self.config = start.parsed

    def train(self, *arguments: Any, **named: Any) -> None: ...

    def take_part(self) -> None:
        self.seen.append("part")

    def capture(self, into: StateCopy | None = None) -> StateCopy:
        captured = into or _Slow()
        captured.clear()
        captured.add(f"rank_{self.rank}.pt", {"told": torch.tensor(len(self.seen))})
        self.seen.append("capture")
        return captured

    def load(self, folder: Path) -> None:
        what, _, ranks = folder.name.partition(" ")
        self.seen.append(folder.name)
        if ranks and str(self.rank) not in ranks:
            return
        if what == "fail":
            print("before the failure", flush=True)
            raise ValueError(f"of rank {self.rank}")
        if what == "exit":
            print("before the exit", flush=True)
            os._exit(7)
        if what == "busy":
            while not (folder.parent / "free").exists():
                time.sleep(0.01)

    def save_pretrained(self, folder: Path) -> None:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
        lines = [*self.seen, f"gpus={gpus}", str(self.config.resolve("model"))]
        part = folder / f".{self.rank}"
        part.write_text("\n".join(lines))
        part.rename(folder / f"{self.rank}")

    def close(self) -> None:
        print("closed", flush=True)


class _Slow(StateCopy):
    """Where there is a file `slow`, it is not written before that goes."""

    def write(self, folder: Path) -> None:
        while any((above / "slow").exists() for above in (folder, *folder.parents)):
            time.sleep(0.01)
        super().write(folder)


def _open(start: Start) -> tuple[StubEngine, Any]:
    def read(records: Sequence[Coordinate]) -> list[Group]:
        raise NotImplementedError

    return StubEngine(start), read


def lead(how: str, folder: Path) -> None:
    """`until SIGTERM`, then the gang is closed; or it never hears of the others again: `busy`, the
    first of which does not end by itself, or `deaf`."""
    from trainer import gang, shares

    stop = stop_on_signals(threading.Event())
    logging.basicConfig(level=logging.INFO)
    gang.SURFACE_S = 0.2  # type: ignore[misc]
    ranks = gang.Gang(config(3), NO_LOG, lambda rank: folder / f"{rank}.log", program=PROGRAM)
    ranks.wait_ready()
    ranks.tell(shares.Load(f"{folder}/busy 1" if how == "busy" else "nothing"))
    print(*(rank.process.pid for rank in ranks._ranks.values()), flush=True)
    if how in ("deaf", "busy"):
        time.sleep(3600)
    stop.wait()
    ranks.close()
    print(*(rank.process.returncode for rank in ranks._ranks.values()), flush=True)


def save(stage: str, victim: int, folder: Path) -> None:
    """Checkpoints 1 and 2 of three ranks. When the second one is at `stage`, or while the others
    are `writing`, the rank `victim` is killed with -9."""
    from trainer import gang, shares

    ranks = gang.Gang(config(3), NO_LOG, lambda rank: folder / f"{rank}.log", program=PROGRAM)
    ranks.wait_ready()

    def kill() -> None:
        os.kill(ranks._ranks[victim].process.pid if victim else os.getpid(), signal.SIGKILL)

    def at(reached: str) -> None:
        if step == 2 and stage == "writing" and reached == "staged":
            (folder / "slow").touch()
            threading.Timer(0.2, kill).start()
        elif step == 2 and reached == stage:
            kill()

    store = CheckpointStore(folder / "store", at=at)
    store.clean()
    state = StateCopy(ranks.write)
    with closing(ranks), ranks.watched():
        for step in (1, 2):
            ranks.tell(shares.Capture())
            state.clear()
            state.add("rank_0.pt", {"told": torch.tensor(step - 1)})
            store.save(step, state.write, b"")


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        sys.exit(main(int(sys.argv[1]), _open))
    if sys.argv[1] == "save":
        save(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    else:
        lead(sys.argv[1], Path(sys.argv[2]))
