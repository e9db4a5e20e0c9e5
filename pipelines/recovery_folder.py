"""The folder of a dataflow's snapshots: one process at a time, and only for the work it is of.

    FOLDER/lock           held while the dataflow runs
    FOLDER/steps.json     what the snapshots belong to (`Belongs`)
    FOLDER/part-*.sqlite3 bytewax's
    FOLDER/restart        put there by hand: begin anew. What was written before stays, and counts

bytewax silently drops the state of a renamed step, dies on a lost file without saying which, and
goes on at the offsets of whatever log it is pointed at. All of that is refused here, by name. What
it keeps of an epoch that a killed process did not finish is deleted (`forget_unfinished`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec
from bytewax.recovery import RecoveryConfig, init_db_dir

from connectors.files import FileLock, Locked, replace_file

_BELONGS: Final = "steps.json"
_RESTART: Final = "restart"


class RecoveryLocked(RuntimeError):
    """Another process works on this recovery folder."""


class RecoveryLost(RuntimeError):
    """The recovery folder is gone, damaged, or not of this dataflow on this log."""


class Belongs(msgspec.Struct, frozen=True, kw_only=True):
    """What snapshots are of.

    steps       names of the dataflow's steps
    log         cluster id of the brokers
    namespace   of the topics
    partitions  of the run's topics
    work        what else the dataflow does that its steps do not tell
    anew        it began anew over what an earlier one had written
    """

    steps: tuple[str, ...]
    log: str
    namespace: str
    partitions: int
    work: dict[str, Any] = {}
    anew: bool = False


def forget_unfinished(databases: Sequence[Path]) -> None:
    """Deletes the snapshots of epochs that are to be executed again.

    bytewax goes on from the epoch that its last execution had not finished, and leaves the
    snapshots which that one had already made of it. The epoch's new execution overwrites those of
    the steps that make one again, of other items: what is left of the old ones is not of the same
    moment. A second kill would so resume two steps at different offsets."""
    executions: list[tuple[int, int, int]] = []  # number, workers, epoch it began at
    reached: list[tuple[int, int, int]] = []  # number, worker, epoch
    for file in databases:
        with closing(sqlite3.connect(file)) as database:
            executions += database.execute("SELECT ex_num, worker_count, resume_epoch FROM exs")
            reached += database.execute("SELECT ex_num, worker_index, worker_frontier FROM fronts")
    if not executions:
        return
    last, num_workers, began = max(executions)
    epochs = dict.fromkeys(range(num_workers), began)
    for number, worker, epoch in reached:
        if number == last:
            epochs[worker] = max(epochs[worker], epoch)
    for file in databases:
        with closing(sqlite3.connect(file)) as database, database:
            database.execute("DELETE FROM snaps WHERE snap_epoch >= ?", (min(epochs.values()),))


class RecoveryFolder:
    """Holds the folder until `close`; RecoveryLocked while another process does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = FileLock(path / "lock")
        except Locked as error:
            raise RecoveryLocked(
                f"{path} is locked: process {error.pid} runs this dataflow"
            ) from error

    @property
    def anew(self) -> bool:
        """Whether the dataflow begins, or began, anew."""
        known = self.known()
        return (self.path / _RESTART).exists() or (known is not None and known.anew)

    def known(self) -> Belongs | None:
        """What the snapshots in it are of, None in a new folder. RecoveryLost when it cannot be
        read."""
        file = self.path / _BELONGS
        if not file.exists():
            return None
        try:
            return msgspec.json.decode(file.read_bytes(), type=Belongs)
        except msgspec.DecodeError as error:
            raise RecoveryLost(f"{file} cannot be read ({error}); {self.remedy}") from error

    def prepare(self, belongs: Belongs, written: Callable[[], str | None]) -> RecoveryConfig:
        """The snapshots to go on from: those that are there, if they are whole and `belongs` is
        theirs, or none yet. `written`: a topic that holds what such a dataflow wrote. RecoveryLost
        when going on would lose or repeat something."""
        restart = self.path / _RESTART
        databases = sorted(self.path.glob("part-*.sqlite3"))
        if not restart.exists() and (known := self.known()) is not None:
            if not databases:
                raise RecoveryLost(f"{self.path} has lost its database; {self.remedy}")
            self._check_databases(databases)
            self._check_belongs(known, belongs)
            forget_unfinished(databases)
            return RecoveryConfig(self.path)
        if not restart.exists() and (topic := written()):
            lost = f"has lost its {_BELONGS}" if databases else "is empty"
            raise RecoveryLost(
                f"{self.path} {lost}, but {topic} holds this dataflow's records; {self.remedy}"
            )
        (self.path / _BELONGS).unlink(missing_ok=True)
        for file in self.path.glob("part-*"):  # of a start that was killed before it had begun
            file.unlink()
        init_db_dir(self.path, 1)
        begun = msgspec.structs.replace(belongs, anew=restart.exists())
        replace_file(self.path / _BELONGS, msgspec.json.encode(begun))
        restart.unlink(missing_ok=True)
        return RecoveryConfig(self.path)

    def close(self) -> None:
        self._lock.close()

    @property
    def remedy(self) -> str:
        return (
            f"restore the folder from a copy, or create the file {self.path / _RESTART} to work "
            "through everything again that the log still holds (what was written stays and is not "
            "written twice)"
        )

    def _check_databases(self, databases: list[Path]) -> None:
        for file in databases:
            try:
                with closing(sqlite3.connect(file)) as database:
                    found = database.execute("PRAGMA quick_check").fetchone()[0]
            except sqlite3.DatabaseError as error:
                found = str(error)
            if found != "ok":
                raise RecoveryLost(f"{file} is damaged ({found}); {self.remedy}")

    def _check_belongs(self, known: Belongs, now: Belongs) -> None:
        if (known.log, known.namespace) != (now.log, now.namespace):
            raise RecoveryLost(
                f"{self.path} is of another run: of the namespace {known.namespace} on the cluster "
                f"{known.log}, this is {now.namespace} on {now.log}, and its offsets mean nothing "
                f"here; bring back the log or the run's own folder: {self.remedy}"
            )
        if known.partitions != now.partitions:
            raise RecoveryLost(
                f"{self.path} is of {known.partitions} partitions, the run has {now.partitions} "
                "now: a run keeps the number it began with; set kafka.partitions and the topics "
                "back, or use another run.namespace"
            )
        if known.steps != now.steps:
            changed = sorted(set(known.steps) ^ set(now.steps))
            raise RecoveryLost(
                f"{self.path} is of a dataflow with other steps ({', '.join(changed)}): their "
                f"state would be lost; run the version that wrote it, or {self.remedy}"
            )
        if known.work != now.work:
            differ = sorted(
                k for k in known.work | now.work if known.work.get(k) != now.work.get(k)
            )
            was = ", ".join(f"{k} {known.work.get(k)}, not {now.work.get(k)}" for k in differ)
            raise RecoveryLost(f"{self.path} is of other work: {was}; {self.remedy}")
