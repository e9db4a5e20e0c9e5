"""Keeps a run's roles alive: one loop above any launcher.

A **gang** is restarted whole: the trainer's ranks are one gang, every other role is a gang of its
own.

    waiting ──(back-off over)──▶ running ──(exit 0, may finish)──▶ finished
       ▲                            │
       └──(a member exited: the rest is killed, back-off 0.5 s doubling to 30 s)

`tick(now)` never blocks and is called a few times a second by the run's loop. Sixty healthy
seconds, counted from when the gang was up (an engine may load its model for minutes), forget the
back-off. A gang that exits with 2 (a wrong configuration), or three times in a row with 3 or 4 (see
deploy.errors) without having been healthy, will not get better by itself: `RunFailed` with its
log's last line and its code.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from deploy.errors import CONFIGURATION, ENVIRONMENT, NOT_VERIFIED, RunFailed
from deploy.launcher import Launcher, Member, Process

FIRST_BACK_OFF_S: Final = 0.5
LONGEST_BACK_OFF_S: Final = 30.0
HEALTHY_S: Final = 60.0
MAX_REFUSALS: Final = 3

State = Literal["held", "waiting", "running", "finished", "stopped"]


class RoleHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One member as `status` shows it; `pid` None while it does not run."""

    name: str
    pid: int | None
    state: State
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """Members that live and die together. `may_finish`: exit 0 means its work is done, not that it
    should be started again. `stop_s`: how long it may take to end when asked."""

    name: str
    members: Sequence[Member]
    may_finish: bool = False
    stop_s: float = 10.0


@dataclass(slots=True)
class _Running:
    gang: Gang
    state: State = "waiting"
    processes: list[Process] = field(default_factory=list)
    up_at: float | None = None
    start_at: float = 0.0
    back_off_s: float = FIRST_BACK_OFF_S
    restarts: int = 0
    refusals: int = 0


class Supervisor:
    """`gangs` in the order they start; `last_line(name)` is the last line of a member's log,
    `is_up(name, pid)` whether a member got as far as doing its work."""

    def __init__(
        self,
        gangs: Sequence[Gang],
        launcher: Launcher,
        last_line: Callable[[str], str] = lambda name: "",
        is_up: Callable[[str, int], bool] = lambda name, pid: True,
    ) -> None:
        self._all = {gang.name: _Running(gang) for gang in gangs}
        self._launcher = launcher
        self._last_line = last_line
        self._is_up = is_up
        self._news: list[str] = []
        self._patient = False

    def tick(self, now: float, *, patient: bool = False) -> None:
        """Notices exits, starts what is due. RunFailed when a gang refuses to start for good; with
        `patient`, only a wrong configuration is such a refusal."""
        self._patient = patient
        for name, running in self._all.items():
            if running.state == "running":
                self._look_at(running, now)
            if running.state == "waiting" and now >= running.start_at and self.has_ended(name):
                self._start(running, now)

    def news(self) -> list[str]:
        """What happened since the last call, a line an event."""
        news, self._news = self._news, []
        return news

    def state(self, gang: str) -> State:
        return self._all[gang].state

    def roles(self) -> list[RoleHealth]:
        return [
            RoleHealth(
                name=member.name,
                pid=running.processes[i].pid if running.state == "running" else None,
                state=running.state,
                restarts=running.restarts,
            )
            for running in self._all.values()
            for i, member in enumerate(running.gang.members)
        ]

    def hold(self, gang: str) -> None:
        """Not to be started before `release`."""
        self._all[gang].state = "held"

    def release(self, gang: str) -> None:
        self._all[gang].state = "waiting"

    def start_again(self, gang: str) -> None:
        """One that finished, though its work was not done."""
        self._all[gang].state = "waiting"
        self._all[gang].restarts += 1

    def stop_s(self, gang: str) -> float:
        return self._all[gang].gang.stop_s

    def ask_to_stop(self, gang: str) -> None:
        """SIGTERM to its members; from now on it is not started again."""
        running = self._all[gang]
        if running.state == "running":
            for process in running.processes:
                if process.poll() is None:
                    process.terminate()
        if running.state != "finished":
            running.state = "stopped"

    def has_ended(self, gang: str) -> bool:
        """Whether none of its processes is left."""
        return all(process.poll() is not None for process in self._all[gang].processes)

    def kill(self, gang: str) -> None:
        """SIGKILL to its members, which also are not started again."""
        running = self._all[gang]
        for process in running.processes:
            process.kill()
        if running.state != "finished":
            running.state = "stopped"

    def _start(self, running: _Running, now: float) -> None:
        running.processes = [self._launcher.start(member) for member in running.gang.members]
        running.state, running.up_at = "running", None
        self._note_up(running, now)

    def _note_up(self, running: _Running, now: float) -> None:
        members = zip(running.gang.members, running.processes, strict=True)
        if running.up_at is None and all(self._is_up(m.name, p.pid) for m, p in members):
            running.up_at = now

    def _look_at(self, running: _Running, now: float) -> None:
        self._note_up(running, now)
        if running.up_at is not None and now - running.up_at >= HEALTHY_S:
            running.back_off_s, running.refusals = FIRST_BACK_OFF_S, 0
        codes = [process.poll() for process in running.processes]
        if all(code == 0 for code in codes) and running.gang.may_finish:
            running.state = "finished"
            return
        exited = [
            (member.name, code)
            for member, code in zip(running.gang.members, codes, strict=True)
            # A rank that is done early waits for the others; only a failure takes the gang down.
            if code is not None and not (code == 0 and running.gang.may_finish)
        ]
        if exited:
            self._bring_down(running, exited[0], now)

    def _bring_down(self, running: _Running, first: tuple[str, int], now: float) -> None:
        for process in running.processes:
            process.kill()
        name, code = first
        self._news.append(f"{name} {self._ending(name, code)}; again in {running.back_off_s:g} s")
        refused = code == CONFIGURATION or (
            code in (ENVIRONMENT, NOT_VERIFIED) and not self._patient
        )
        running.refusals = running.refusals + 1 if refused else 0
        if code == CONFIGURATION or running.refusals >= MAX_REFUSALS:
            raise RunFailed(f"{name} does not start: {self._last_line(name)}", code)
        running.state = "waiting"  # until the killed ones are gone and the back-off is over
        running.restarts += 1
        running.start_at = now + running.back_off_s
        running.back_off_s = min(2 * running.back_off_s, LONGEST_BACK_OFF_S)

    def _ending(self, name: str, code: int) -> str:
        if code < 0:  # it had no time to say why
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with {code} ({self._last_line(name)})"
