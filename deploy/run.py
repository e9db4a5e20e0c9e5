"""`headwater run`: from a configuration to a run that goes on until its steps are done.

    lock ▶ prepare the folder ▶ broker ▶ topics
         ▶ engines, gateway, dataflow, nearline, feeder, evaluate, trainer
         ▶ watch until N steps, Ctrl-C or a role that cannot start ▶ stop in order

Whatever ends it, also kill -9, the next `run` in the same folder resumes from the log.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec
from rich.console import Console

from connectors.config import Config
from connectors.kafka.locate import cluster, topics
from connectors.kafka.topics import ensure_topics
from connectors.run_dir import RunDir
from deploy import curve, errors, gpus, health, run_folder, vllm_checks
from deploy.disk import DiskWatch, room_or_later
from deploy.errors import EnvironmentFailure
from deploy.health import roles_of
from deploy.launcher import Member, last_line, launcher
from deploy.log import START_S, running_broker
from deploy.output import answer, stdout_for_answer
from deploy.supervisor import Gang, RoleHealth, Supervisor
from deploy.view import RunView, status_lines
from deploy.watch import Watch
from trainer.staleness import configured_policy

TICK_S: Final = 0.1
SHOW_S: Final = 0.5
EVALUATION_S: Final = 60.0
"""How long the end of a run waits for the evaluation of its last version."""
_STOP_ORDER: Final = (
    ("trainer",), ("evaluate", "feeder", "gateway", "nearline", "dataflow"), ("engine",),
)  # fmt: skip


def run(
    config: Config, run_dir: RunDir, *, stop_after_steps: int | None = None, as_json: bool = False
) -> int:
    """Runs until the steps are done or Ctrl-C; the exit code. ConfigError, EnvironmentFailure and
    RunFailed when it cannot go on."""
    configured_policy(config)  # says what is wrong with it before anything starts
    if (reason := vllm_checks.missing(config)) is not None:
        raise EnvironmentFailure(reason)
    target = config.trainer.num_steps
    if stop_after_steps is not None:
        target = min(target, stop_after_steps)
    gangs = plan(config, run_dir, target)
    starter = launcher(config, run_dir)
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    with stdout_for_answer(as_json), run_folder.locked(run_dir):
        prepared = run_folder.prepare(config, run_dir, console.print)
        supervisor = Supervisor(
            gangs,
            starter,
            lambda name: last_line(run_dir.log_file(name)),
            lambda name, pid: any((r.name, r.pid) == (name, pid) for r in run_dir.roles()),
        )
        introduce(console, prepared, run_dir, target, stop_after_steps)
        with RunView(console, target) as view:
            job = Job(prepared.config, run_dir, supervisor, [g.name for g in gangs], view, target)
            status = job.run()
        if not as_json:
            _draw(console, job, status)
    answer(
        as_json, status, [*status_lines(status), f"next: headwater audit {_short(run_dir.path)}"]
    )
    return errors.OK


def plan(config: Config, run_dir: RunDir, target: int) -> list[Gang]:
    """What to start, in the order it starts; each gang is one role. EnvironmentFailure when the
    machine has too few GPUs for them."""
    placed = gpus.placed(config)

    def member(role: str, *more: str, name: str | None = None) -> Member:
        arguments = [role, str(run_dir.config_file), "--run-dir", str(run_dir.path), *more]
        return Member(name=name or role, arguments=arguments, gpus=placed.get(name or role))

    gangs = []
    if config.kafka.bootstrap_servers is None:
        gangs.append(Gang(name="broker", members=[member("broker")]))
    for name in (name for name in placed if name.startswith("engine")):
        gangs.append(Gang(name=name, members=[member("engine", "--name", name, name=name)]))
    if config.gateway is not None:
        gangs.append(Gang(name="gateway", members=[member("gateway")], stop_s=20.0))
    gangs.append(Gang(name="dataflow", members=[member("dataflow")], stop_s=20.0))
    if config.nearline is not None:
        gangs.append(Gang(name="nearline", members=[member("nearline")], stop_s=20.0))
    if any(task.prompts for task in config.tasks.values()):
        gangs.append(Gang(name="feeder", members=[member("feeder")], may_finish=True))
    if config.eval.every_versions and any(task.eval_prompts for task in config.tasks.values()):
        gangs.append(Gang(name="evaluate", members=[member("evaluate")]))
    trainer = member("trainer", "--stop-after-steps", str(target))
    # It ends after the step at hand, which it checkpoints.
    gangs.append(Gang(name="trainer", members=[trainer], may_finish=True, stop_s=60.0))
    return gangs


class Job:
    """A prepared run: starts its gangs, watches them, stops them in order."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        supervisor: Supervisor,
        names: Sequence[str],
        view: RunView,
        target: int,
    ) -> None:
        self._config, self._run_dir, self._supervisor = config, run_dir, supervisor
        self._names, self._view, self._target = names, view, target
        self._interrupts = 0
        self._shown_at = float("-inf")
        self._written: list[RoleHealth] = []
        self._disk = DiskWatch(run_dir.path)
        self.watch = Watch(config, run_dir)

    def run(self) -> dict[str, Any]:
        """The final status."""
        previous = {n: signal.signal(n, self._interrupt) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._start_log()
            self.watch.start()
            self._until(self._is_done)
            self._until(self._is_evaluated, limit_s=EVALUATION_S)
            return self._stop()
        finally:
            self.watch.close()
            for name in self._names:
                self._supervisor.kill(name)
            self._note_roles()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """First: stop in order. Second: at once; kill -9 loses nothing."""
        self._interrupts += 1
        if self._interrupts > 1:
            for name in self._names:
                self._supervisor.kill(name)

    def _start_log(self) -> None:
        """The broker, then the topics; only then is there anything for the other roles to do."""
        rest = [name for name in self._names if name != "broker"]
        for name in rest:
            self._supervisor.hold(name)
        if "broker" in self._names:
            started = self._until(self._broker_listens, limit_s=START_S)
            if not started and not self._interrupts:
                raise EnvironmentFailure(f"the broker does not listen after {START_S:.0f} s")
        if self._interrupts:
            return
        ensure_topics(
            cluster(self._config, self._run_dir, unavailable_s=30.0),
            topics(self._config.kafka.partitions),
        )
        for name in rest:
            self._supervisor.release(name)

    def _broker_listens(self) -> bool:
        """The broker started here, not one that a command opened on the same log for a moment."""
        listening = running_broker(self._run_dir)
        own = next(role.pid for role in self._supervisor.roles() if role.name == "broker")
        return listening is not None and listening.pid == own

    def _until(self, is_true: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Supervises until `is_true`, an interrupt or `limit_s`; whether it became true."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while not self._interrupts:
            now = time.monotonic()
            if (disk := self._disk.look(now)) is not None:
                self._view.say(disk)
            self._supervisor.tick(now, patient=self._disk.is_full)
            self._note_roles()
            self._show(now)
            if is_true():
                return True
            if deadline is not None and now > deadline:
                break
            time.sleep(TICK_S)
        return False

    def _is_done(self) -> bool:
        if self._supervisor.state("trainer") != "finished":
            return False
        if self.watch.read_again()["step"] >= self._target:
            return True
        self._supervisor.start_again("trainer")  # somebody else asked it to end
        return False

    def _is_evaluated(self) -> bool:
        every = self._config.eval.every_versions
        if "evaluate" not in self._names:
            return True
        return self.watch.evaluated_version() >= self._target // every * every

    def _stop(self) -> dict[str, Any]:
        """Ends the roles in order, consumers before what they consume from; the status is read
        while the broker is the last one alive."""
        if self._interrupts:
            self._view.say("stopping in order: the trainer ends its step and saves a checkpoint")
        for kinds in _STOP_ORDER:
            self._end([name for name in self._names if name.startswith(kinds)])
        status = self.watch.last_reading() if self._interrupts < 2 else None
        self._end([name for name in self._names if name == "broker"])
        self._note_roles()
        if status is None:
            raise KeyboardInterrupt
        return {**status, "roles": roles_of(self._config, self._run_dir)}

    def _end(self, names: Sequence[str]) -> None:
        """Asks them to end, together, and kills those that take too long."""
        asked_at = time.monotonic()
        for name in names:
            self._supervisor.ask_to_stop(name)
        while late := [name for name in names if not self._supervisor.has_ended(name)]:
            now = time.monotonic()
            for name in late:
                if now - asked_at > self._supervisor.stop_s(name) or self._interrupts > 1:
                    self._supervisor.kill(name)
            self._show(now)
            time.sleep(0.02)
        self._note_roles()

    def _note_roles(self) -> None:
        roles = self._supervisor.roles()
        if roles != self._written:
            with room_or_later():
                health.write(self._run_dir, roles)
                self._written = roles

    def _show(self, now: float) -> None:
        for line in self._supervisor.news():
            self._view.say(line)
        if now - self._shown_at >= SHOW_S:
            self.watch.check()
            roles = [msgspec.structs.asdict(role) for role in self._supervisor.roles()]
            self._view.show(self.watch.latest, roles, now)
            self._shown_at = now


def introduce(
    console: Console,
    prepared: run_folder.Prepared,
    run_dir: RunDir,
    target: int,
    stop_after_steps: int | None,
) -> None:
    """Says what begins, and what of the call or of an earlier one differs from it."""
    verb = "resuming" if prepared.resumed else "starting"
    console.print(
        f"{verb} {prepared.config.run.name} in {_short(run_dir.path)}, until step {target}"
    )
    if stop_after_steps is not None and stop_after_steps > target:
        console.print(
            f"  trainer.num_steps = {target} ends it before --stop-after-steps {stop_after_steps} "
            f"(--set trainer.num_steps={stop_after_steps} would go on)"
        )
    for change in prepared.changes:
        console.print(f"  changed: {change}")


def _draw(console: Console, job: Job, status: dict[str, Any]) -> None:
    plot = curve.draw(*job.watch.curves(), title=f"{status['run']}: reward")
    if plot:
        console.print(plot, markup=False)


def _short(path: Path) -> str:
    """The path as a user in the working directory would type it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
