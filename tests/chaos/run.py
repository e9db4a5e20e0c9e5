"""One chaos run: a small run trains while its schedule is played; then the log is asked what
became of every group, and every step is executed again."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from deploy.log import opened
from tests.chaos.faults import damage_checkpoint, limit_files, newest_segment, tear_tail
from tests.chaos.parts import Parts
from tests.chaos.schedule import NETWORK, Event, Schedule
from tests.small_run import headwater_command
from trainer.replay import NothingToReplay, replay

TICK_S: Final = 0.05
STUCK_S: Final = 150.0
"""Without a step, or without a role that is to come back."""


class Result(msgspec.Struct, kw_only=True):
    """A line of the results. `kills` counts processes, `restarts` those asked to end and those of
    `headwater run`; `failure` is "" for a run that kept every promise."""

    seed: int
    steps: int = 0
    kills: int = 0
    stops: int = 0
    drops: int = 0
    disk_full: int = 0
    corruptions: int = 0
    restarts: int = 0
    seconds: float = 0.0
    granted: int = 0
    trained: int = 0
    closed: int = 0
    open: int = 0
    lost: int = 0
    trained_twice: int = 0
    bound_violations: int = 0
    balance: int = 0
    chain_ok: bool = False
    replay_equal: bool = False
    failure: str = ""


def chaos_run(plan: Schedule, folder: Path, model: Path) -> Result:
    """Plays `plan` in `folder`, which then holds the run. Nothing it started is left."""
    started = time.monotonic()
    result = Result(seed=plan.seed)
    try:
        parts = Parts(plan, folder, model)
        try:
            player = Player(plan, parts)
            try:
                player.play()
            finally:
                player.count(result)
            parts.stop()
            _judge(plan, parts, result)
        finally:
            parts.clear()
    except (
        AssertionError, NothingToReplay, OSError, psutil.Error, subprocess.SubprocessError,
    ) as error:  # fmt: skip
        result.failure = f"{type(error).__name__}: {error}".partition("\n")[0]
    result.seconds = round(time.monotonic() - started, 1)
    return result


def _judge(plan: Schedule, parts: Parts, result: Result) -> None:
    """AssertionError unless every promise was kept."""
    left = parts.left_over()
    assert not left, f"left behind: {left}"
    run = parts.run
    audit = run.ask("audit")
    with opened(run.config, run.run_dir) as cluster:
        again = replay(cluster, run.run_dir, run.config)
    groups = audit["groups"]
    result.granted, result.trained = groups["granted"], groups["trained"]
    result.closed, result.open = groups["closed"] + groups["dropped"], groups["open"]
    result.lost, result.trained_twice = len(audit["lost"]), len(audit["trained_twice"])
    result.bound_violations = len(audit["bound_violations"])
    result.balance, result.chain_ok = audit["credit_balance"], audit["digest_chain_ok"]
    result.replay_equal = again.equal
    wrong = {key: found for key, found in audit.items() if found and isinstance(found, list)}
    assert audit["ok"], f"the audit failed: {wrong}, balance {audit['credit_balance']}"
    assert result.balance == 0, f"credit balance {result.balance}"
    assert again.equal, f"executed again it differs: {again.first_difference}"
    assert again.last >= result.steps, f"{again.last} of {result.steps} steps executed again"
    assert plan.trims or again.first == 1, f"steps from {again.first} on executed again"
    result.steps = again.last


class Player:
    """Plays a schedule's events on a run's parts, one after the other."""

    def __init__(self, plan: Schedule, parts: Parts) -> None:
        self._plan = plan
        self._parts = parts
        self._rng = random.Random(plan.seed)
        self._undo: list[tuple[float, Callable[[], object]]] = []
        self._counts: Counter[str] = Counter()
        self._limits: dict[str, int] = {}
        self._damaged: list[tuple[float, int]] = []  # when, the checkpoint's step
        self._log_file = parts.folder / "events.log"
        self._started = time.monotonic()

    def play(self) -> None:
        """Until every event is over and the schedule's steps, and two more, are trained.
        AssertionError when the run stands still or gives up."""
        plan = self._plan
        self._say(f"seed {plan.seed}, proxied {sorted(plan.proxied)}, trims {plan.trims}")
        try:
            self._wait_for_steps(2)
            for event in plan.events:
                self._wait_for_steps(event.after_steps)
                self._wait(event.delay_s)
                self._say(str(event))
                getattr(self, f"_{'network' if event.kind in NETWORK else event.kind}")(event)
            self._until(lambda: not self._undo, "the end of every fault")
            self._wait_for_steps(max(2, plan.steps - self._parts.progress.step))
            for at, step in self._damaged:
                starts = [b.resumed_step for b in self._parts.progress.begins if b.started_at > at]
                assert starts, "no trainer began after a checkpoint was damaged"
                assert step not in starts, f"a trainer began from step {step}, which is damaged"
            self._say("all done")
        finally:
            for _, undo in self._undo:
                undo()

    def count(self, result: Result) -> None:
        result.steps = self._parts.progress.step
        result.restarts = self._parts.restarts + self._counts["restarts"]
        for name in ("kills", "stops", "drops", "disk_full", "corruptions"):
            setattr(result, name, self._counts[name])

    # ------------------------------------------------------------------------------------- events
    def _kill(self, event: Event) -> None:
        self._send(signal.SIGKILL, *(self._running(role) for role in event.victims))

    def _stop(self, event: Event) -> None:
        process = self._running(event.victims[0])
        self._send(signal.SIGSTOP, process)
        self._later(event.seconds, lambda: self._send(signal.SIGCONT, process))

    def _restart(self, event: Event) -> None:
        self._send(signal.SIGTERM, self._running(event.victims[0]))

    def _zombie(self, event: Event) -> None:
        """The first wakes in a log that another trainer goes on with."""
        progress, run = self._parts.progress, self._parts.run
        self._until(lambda: progress.since_begin > 0 and self._is_trainer(progress.begun_by),
                    "a trainer at work")  # fmt: skip
        first = self._running("trainer")
        self._send(signal.SIGSTOP, first)
        command = headwater_command(
            "trainer", run.run_dir.config_file, "--run-dir", run.run_dir.path
        )
        with (self._parts.folder / "second-trainer.log").open("ab") as log:
            second = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            self._until(lambda: progress.begun_by == second.pid and progress.since_begin > 1,
                        "the second trainer's steps")  # fmt: skip
            self._send(signal.SIGCONT, first)
            self._say("the first trainer wakes")
            self._until(lambda: not is_alive(first), "the end of the fenced trainer")
            self._say("the first trainer is fenced")
            # It is started again: a newer epoch, which fences the second.
            self._until(lambda: second.poll() is not None, "the end of the second trainer")
            assert second.returncode in (1, 3), f"the second trainer: {second.returncode}"
        finally:
            self._send(signal.SIGCONT, first)
            second.kill()
            second.wait()

    def _is_trainer(self, pid: int) -> bool:
        process = self._parts.process("trainer")
        return process is not None and process.pid == pid

    def _network(self, event: Event) -> None:
        for proxy in self._parts.proxies:
            match event.kind:
                case "drop":
                    proxy.drop()
                case "delay":
                    proxy.delay(0.02)
                case "stall":
                    proxy.stall(event.how)  # type: ignore[arg-type]
                case "refuse":
                    proxy.refuse()
                    proxy.drop()  # else nobody would connect
            if event.seconds:
                self._later(event.seconds, proxy.restore)
        self._counts["drops"] += 1

    def _disk_full(self, event: Event) -> None:
        """Also for what is started meanwhile."""
        role = event.victims[0]
        segment = newest_segment(self._parts.broker_data, f"headwater.{event.topic}")
        room = self._rng.randrange(1, 200)  # what still fits: a write is cut short there
        self._limits[role] = room + (segment.stat().st_size if segment and role == "broker" else 0)
        self._running(role)
        self._later(event.seconds, lambda: self._give_room(role))
        self._counts["disk_full"] += 1

    def _give_room(self, role: str) -> None:
        del self._limits[role]
        for name in self._plan.roles:  # those it started inherited it
            if name not in self._limits:
                self._limit(name, -1)

    def _limit(self, role: str, num_bytes: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            if (process := self._parts.process(role)) is not None:
                limit_files(process, num_bytes)

    def _torn_tail(self, event: Event) -> None:
        with self._down("broker"):
            segment = newest_segment(self._parts.broker_data, f"headwater.{event.topic}")
            if segment is not None:
                tear_tail(segment, event.how, self._rng)
                self._counts["corruptions"] += 1

    def _damaged_checkpoint(self, event: Event) -> None:
        checkpoints = self._parts.run.run_dir.checkpoints
        self._until(lambda: any(checkpoints.glob("step-*")), "a checkpoint")
        with self._down("trainer"):
            self._damaged.append((time.time(), damage_checkpoint(checkpoints, event.how)))
            self._counts["corruptions"] += 1

    @contextlib.contextmanager
    def _down(self, role: str) -> Any:
        """`role` killed, and nobody there to start it again."""
        process, supervisor = self._running(role), self._running("run")
        self._send(signal.SIGSTOP, supervisor)
        try:
            self._send(signal.SIGKILL, process)
            deadline = time.monotonic() + 10.0
            while is_alive(process):
                assert time.monotonic() < deadline, f"{role} survives SIGKILL"
                time.sleep(0.01)
            yield
        finally:
            self._send(signal.SIGCONT, supervisor)

    # ------------------------------------------------------------------------------------ waiting
    def _send(self, number: signal.Signals, *processes: psutil.Process) -> None:
        """At once to all of them; psutil never signals another process that got the pid."""
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
                self._counts["kills"] += number is signal.SIGKILL
                self._counts["stops"] += number is signal.SIGSTOP
                self._counts["restarts"] += number is signal.SIGTERM

    def _running(self, role: str) -> psutil.Process:
        found = self._until(lambda: self._parts.process(role), f"{role} to run")
        assert isinstance(found, psutil.Process)
        return found

    def _later(self, seconds: float, undo: Callable[[], object]) -> None:
        self._undo.append((time.monotonic() + seconds, undo))

    def _wait_for_steps(self, count: int) -> None:
        target = self._parts.progress.step + count
        self._until(lambda: self._parts.progress.step >= target, f"step {target}")

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._until(lambda: time.monotonic() >= until, "time to pass")

    def _until(self, condition: Callable[[], object], what: str) -> object:
        """The first true value of `condition`; meanwhile faults end when they are due."""
        step, moved_at = self._parts.progress.step, time.monotonic()
        while not (value := condition()):
            self._tick()
            now = time.monotonic()
            if self._parts.progress.step != step:
                step, moved_at = self._parts.progress.step, now
            assert now - moved_at < STUCK_S, f"waiting for {what}: no step for {STUCK_S:g} s"
            time.sleep(TICK_S)
        return value

    def _tick(self) -> None:
        now = time.monotonic()
        due = [undo for at, undo in self._undo if at <= now]
        self._undo = [(at, undo) for at, undo in self._undo if at > now]
        for undo in due:
            undo()
        self._parts.tick()
        for role, num_bytes in self._limits.items():
            self._limit(role, num_bytes)

    def _say(self, what: str) -> None:
        at = time.monotonic() - self._started
        with self._log_file.open("a") as file:
            file.write(f"{at:6.1f} s, step {self._parts.progress.step}: {what}\n")


def is_alive(process: psutil.Process) -> bool:
    """Also not when it only waits for its parent to look."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
