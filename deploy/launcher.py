"""Starting processes: what the supervisor needs of a machine. `local` runs children of this
process.

A launcher starts a `Member` and answers with a `Process`; it never restarts anything, that is the
supervisor's. Two implementations are meant: `local` here, placement on a Ray cluster later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import headwater
from connectors.config import Config
from connectors.run_dir import RunDir
from deploy.gpus import VARIABLE

# One thread a role: on a laptop the roles are the parallelism, and more threads fight for two
# cores. The trainer sets its own count (trainer.num_threads), on which its bits depend.
CHILD_ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


TAIL_BYTES: Final = 8192
"""Of a log, in which its last line is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process to start: `headwater ARGUMENTS...`, known as `name` in logs and in `status`.
    `gpus`: what CUDA_VISIBLE_DEVICES names to it; None leaves that as it is. `outlives`: it knows
    itself when to end."""

    name: str
    arguments: Sequence[str]
    gpus: str | None = None
    outlives: bool = False


class Process(Protocol):
    """A started member."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Its exit code, None while it runs; minus the signal's number when one ended it."""

    def terminate(self) -> None:
        """Asks it to end (SIGTERM)."""

    def kill(self) -> None:
        """Ends it and whatever it started (SIGKILL)."""


class Launcher(Protocol):
    def start(self, member: Member) -> Process:
        """Starts `member` and returns at once; OSError when the machine cannot."""


class ChildProcess:
    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen

    @property
    def pid(self) -> int:
        return self._popen.pid

    def poll(self) -> int | None:
        return self._popen.poll()

    def terminate(self) -> None:
        self._popen.terminate()

    def kill(self) -> None:
        # Its own session, so the group's number is its pid. What a dead role started (a reward's
        # pool of processes) is still of the group; with none left there is no such group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)


class LocalLauncher:
    """Children of this process, each in a session of its own (Ctrl-C reaches only the supervisor),
    its output appended to RUN/logs/NAME.log. They die with this process, even when it is killed
    with -9, unless they outlive it."""

    def __init__(self, run_dir: RunDir, environment: Mapping[str, str] | None = None) -> None:
        self._run_dir = run_dir
        self._environment = {**os.environ, **CHILD_ENVIRONMENT, **(environment or {})}

    def start(self, member: Member) -> Process:
        log = self._run_dir.log_file(member.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        gpus = {} if member.gpus is None else {VARIABLE: member.gpus}
        lifeline = () if member.outlives else ("--supervisor", os.getpid())
        command = headwater_command(*member.arguments, *lifeline)
        with log.open("ab") as file:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._environment | gpus,
                start_new_session=True,
            )
        return ChildProcess(popen)


def headwater_command(*arguments: object) -> list[str]:
    """The command line of `headwater ARGUMENTS...` in this interpreter, from these sources."""
    script = Path(headwater.__file__).resolve()
    return [sys.executable, "-P", str(script), *map(str, arguments)]


def launcher(config: Config, run_dir: RunDir) -> Launcher:
    """The launcher `run.launcher` names: the local one, until there is another."""
    return LocalLauncher(run_dir)


def last_line(log: Path) -> str:
    """The last line of a role's log that says something."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "no log was written"
    said = [line.strip() for line in lines if line.strip()]
    return said[-1].removeprefix("headwater: ") if said else "nothing was logged"
