"""The supervisor over a launcher of fakes and a clock that is handed in."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.errors import RunFailed
from deploy.launcher import Member
from deploy.supervisor import (
    FIRST_BACK_OFF_S,
    HEALTHY_S,
    LONGEST_BACK_OFF_S,
    Gang,
    Supervisor,
)


@dataclass
class FakeProcess:
    pid: int
    code: int | None = None
    was_asked: bool = False
    lingers: bool = False  # does not die at once when killed

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.was_asked = True

    def kill(self) -> None:
        if self.code is None and not self.lingers:
            self.code = -9


@dataclass
class FakeLauncher:
    started: list[tuple[str, FakeProcess]] = field(default_factory=list)

    def start(self, member: Member) -> FakeProcess:
        process = FakeProcess(pid=1000 + len(self.started))
        self.started.append((member.name, process))
        return process

    def last(self, name: str) -> FakeProcess:
        return next(p for n, p in reversed(self.started) if n == name)

    def count(self, name: str) -> int:
        return sum(n == name for n, _ in self.started)


def gang(name: str, *members: str, may_finish: bool = False) -> Gang:
    return Gang(
        name=name,
        members=[Member(name=m, arguments=[m]) for m in members or (name,)],
        may_finish=may_finish,
    )


def make(*gangs: Gang) -> tuple[Supervisor, FakeLauncher]:
    launcher = FakeLauncher()
    return Supervisor(gangs, launcher, lambda name: f"{name} says why"), launcher


def test_a_killed_role_is_started_again_after_the_back_off() -> None:
    supervisor, launcher = make(gang("engine"))
    supervisor.tick(0.0)
    launcher.last("engine").code = -9
    supervisor.tick(10.0)
    assert supervisor.roles()[0].state == "waiting"
    assert supervisor.roles()[0].pid is None
    supervisor.tick(10.0 + FIRST_BACK_OFF_S - 0.01)
    assert launcher.count("engine") == 1
    supervisor.tick(10.0 + FIRST_BACK_OFF_S)
    assert launcher.count("engine") == 2
    assert supervisor.roles()[0].restarts == 1
    assert supervisor.roles()[0].pid == launcher.last("engine").pid
    assert supervisor.news() == ["engine was ended by SIGKILL; again in 0.5 s"]
    assert supervisor.news() == []


def test_the_back_off_doubles_to_its_limit_and_is_forgotten_after_a_healthy_minute() -> None:
    supervisor, launcher = make(gang("dataflow"))
    now, waits = 0.0, []
    supervisor.tick(now)
    for _ in range(9):
        launcher.last("dataflow").code = 1
        supervisor.tick(now)
        before, count = now, launcher.count("dataflow")
        while launcher.count("dataflow") == count:
            now += 0.5
            supervisor.tick(now)
        waits.append(now - before)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert max(waits) == LONGEST_BACK_OFF_S
    supervisor.tick(now + HEALTHY_S)
    launcher.last("dataflow").code = 1
    supervisor.tick(now + HEALTHY_S)
    assert supervisor.news()[-1].endswith("again in 0.5 s")


def test_a_gang_is_restarted_whole() -> None:
    supervisor, launcher = make(gang("trainer", "rank-0", "rank-1", "rank-2"), gang("feeder"))
    supervisor.tick(0.0)
    survivors = [launcher.last("rank-0"), launcher.last("rank-2")]
    launcher.last("rank-1").code = -11
    supervisor.tick(1.0)
    assert [p.code for p in survivors] == [-9, -9]
    supervisor.tick(2.0)
    assert [launcher.count(f"rank-{i}") for i in range(3)] == [2, 2, 2]
    assert launcher.count("feeder") == 1


def test_a_gang_waits_for_its_killed_members_before_it_starts_again() -> None:
    supervisor, launcher = make(gang("trainer", "rank-0", "rank-1"))
    supervisor.tick(0.0)
    slow = launcher.last("rank-0")
    slow.lingers = True
    launcher.last("rank-1").code = 1
    supervisor.tick(1.0)
    supervisor.tick(100.0)
    assert launcher.count("rank-1") == 1
    slow.code = -9
    supervisor.tick(100.1)
    assert launcher.count("rank-1") == 2


def test_a_role_that_finds_its_configuration_wrong_ends_the_run_at_once() -> None:
    supervisor, launcher = make(gang("engine"))
    supervisor.tick(0.0)
    launcher.last("engine").code = 2
    with pytest.raises(RunFailed, match="engine does not start: engine says why") as caught:
        supervisor.tick(1.0)
    assert caught.value.code == 2


@pytest.mark.parametrize("code", [3, 4])
def test_a_role_that_refuses_to_start_three_times_ends_the_run_with_its_reason(code: int) -> None:
    supervisor, launcher = make(gang("broker"))
    now = 0.0
    supervisor.tick(now)
    for _ in range(2):
        launcher.last("broker").code = code
        supervisor.tick(now)
        now += 40.0
        supervisor.tick(now)
    launcher.last("broker").code = code
    with pytest.raises(RunFailed, match="broker does not start: broker says why") as caught:
        supervisor.tick(now)
    assert caught.value.code == code


def test_while_the_run_is_patient_no_number_of_refusals_ends_it() -> None:
    supervisor, launcher = make(gang("broker"))
    now = 0.0
    supervisor.tick(now)
    for _ in range(5):
        launcher.last("broker").code = 3
        supervisor.tick(now, patient=True)
        now += 40.0
        supervisor.tick(now, patient=True)
    launcher.last("broker").code = 3
    supervisor.tick(now)  # the first that counts
    now += 40.0
    supervisor.tick(now)
    launcher.last("broker").code = 2
    with pytest.raises(RunFailed, match="broker does not start"):
        supervisor.tick(now, patient=True)


def test_refusals_between_which_the_role_was_healthy_do_not_end_the_run() -> None:
    supervisor, launcher = make(gang("dataflow"))
    now = 0.0
    supervisor.tick(now)
    for _ in range(10):
        now += HEALTHY_S
        launcher.last("dataflow").code = 3
        supervisor.tick(now)
        now += 1.0
        supervisor.tick(now)
    assert launcher.count("dataflow") == 11


def test_a_start_that_fails_after_minutes_is_a_refusal_all_the_same() -> None:
    launcher = FakeLauncher()
    supervisor = Supervisor([gang("engine")], launcher, is_up=lambda name, pid: False)
    now = 0.0
    supervisor.tick(now)

    def fail_after_minutes() -> None:
        nonlocal now
        now += 3 * HEALTHY_S
        supervisor.tick(now)
        launcher.last("engine").code = 3
        supervisor.tick(now)

    for _ in range(2):
        fail_after_minutes()
        now += LONGEST_BACK_OFF_S
        supervisor.tick(now)
    with pytest.raises(RunFailed, match="engine does not start"):
        fail_after_minutes()
    assert launcher.count("engine") == 3


def test_exit_0_ends_only_a_role_whose_work_can_be_done() -> None:
    supervisor, launcher = make(gang("feeder", may_finish=True), gang("engine"))
    supervisor.tick(0.0)
    launcher.last("feeder").code = 0
    launcher.last("engine").code = 0
    for now in (1.0, 5.0):
        supervisor.tick(now)
    assert supervisor.state("feeder") == "finished"
    assert launcher.count("feeder") == 1
    assert launcher.count("engine") == 2


def test_a_rank_that_is_done_early_does_not_take_its_gang_down() -> None:
    supervisor, launcher = make(gang("trainer", "rank-0", "rank-1", may_finish=True))
    supervisor.tick(0.0)
    launcher.last("rank-0").code = 0
    supervisor.tick(1.0)
    assert supervisor.state("trainer") == "running"
    launcher.last("rank-1").code = 0
    supervisor.tick(2.0)
    assert supervisor.state("trainer") == "finished"


def test_a_role_that_was_asked_to_stop_stays_stopped() -> None:
    supervisor, launcher = make(gang("engine"))
    supervisor.tick(0.0)
    supervisor.ask_to_stop("engine")
    assert launcher.last("engine").was_asked
    assert not supervisor.has_ended("engine")
    launcher.last("engine").code = 0
    supervisor.tick(100.0)
    assert supervisor.has_ended("engine")
    assert launcher.count("engine") == 1
    assert supervisor.roles()[0].state == "stopped"


def test_a_held_role_starts_only_when_released() -> None:
    supervisor, launcher = make(gang("broker"), gang("engine"))
    supervisor.hold("engine")
    supervisor.tick(0.0)
    assert launcher.count("engine") == 0
    supervisor.release("engine")
    supervisor.tick(0.1)
    assert launcher.count("engine") == 1


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.sampled_from([None, 0, 1, -9, 3])), max_size=40
    )
)
def test_no_role_ever_has_two_processes(events: list[tuple[str, int | None]]) -> None:
    supervisor, launcher = make(gang("a", "a-0", "a-1"), gang("b", may_finish=True))
    now = 0.0
    with suppress(RunFailed):  # a role that refuses three times ends it, rightly
        for name, code in events:
            supervisor.tick(now)
            members = ["a-0", "a-1"] if name == "a" else ["b"]
            if code is not None and launcher.count(members[0]):
                launcher.last(members[0]).code = code
            now += 0.4
            supervisor.tick(now)
            for member in ("a-0", "a-1", "b"):
                alive = [p for n, p in launcher.started if n == member and p.code is None]
                assert len(alive) <= 1
