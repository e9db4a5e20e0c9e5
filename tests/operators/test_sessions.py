"""What is open, when it closes, and what becomes of what comes too late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from connectors.traffic import Call, End, Feedback
from operators.labels import Label, Rule
from operators.session_state import Fact, Job, Limits, State
from operators.sessions import Sessions
from tests.operators.live_calls import call, said

FINAL = Label(1.0, "final")


class World:
    """One partition's fold. What it wants written is written at once, labelled 1, in `written`;
    with `away` it is not. `wall` is the clock."""

    def __init__(self, *, state: State | None = None, away: bool = False, **limits: Any) -> None:
        rule = limits.pop("rule", {})
        fields: dict[str, Any] = {
            "idle_s": 10.0,
            "max_calls": 100,
            "rules": {"t": Rule(**({"window_s": 60.0, "correction_s": 100.0} | rule))},
            "rewarded": frozenset({"t"}),
            "key_of": lambda call: call.key or "*",
        }
        self.wall, self.away = 1e9, away
        self.limits = Limits(**(fields | limits))
        self.sessions = Sessions(self.limits, state or State(), lambda: self.wall)
        self.written: list[Job] = []
        self.facts: list[Fact] = []
        self.traffic = self.feedback = -1

    @property
    def state(self) -> State:
        return self.sessions.state

    def take(self, *records: Call | End | Feedback) -> World:
        for record in records:
            if isinstance(record, Feedback):
                self.feedback += 1
                self.sessions.feedback(self.feedback, record)
            else:
                self.traffic += 1
                if isinstance(record, Call):
                    self.sessions.call(self.traffic, record)
                else:
                    self.sessions.end(record)
            self.work()
        return self

    def wait(self, seconds: float) -> World:
        self.wall += seconds
        self.sessions.tick()
        self.work()
        return self

    def work(self) -> None:
        if self.away:
            return
        while touched := self.sessions.take_touched():
            for job in filter(None, map(self.sessions.job, touched)):
                self.written.append(job)
                self.facts.append(self.fact(job))
                self.sessions.adopt(self.facts[-1:])

    @staticmethod
    def fact(job: Job) -> Fact:
        if job.late is not None:
            return Fact(group=job.group, late=job.late.offset)
        if job.correction is not None:
            label = Label(job.signals[-1].value, "final")
            return Fact(group=job.group, correction=job.correction, judged=job.judged, label=label)
        label = FINAL if job.signals else job.fallback
        reason = job.reason or ("" if label else "no_label")
        return Fact(group=job.group, until=job.until, judged=job.judged, label=label, reason=reason)

    def again(self) -> World:
        """A process that goes on from the snapshot of this one."""
        saved = msgspec.msgpack.encode(self.state)
        world = World(state=msgspec.msgpack.decode(saved, type=State))
        world.limits, world.wall = self.limits, self.wall
        world.sessions = Sessions(self.limits, world.state, lambda: world.wall)
        world.traffic, world.feedback = self.traffic, self.feedback
        return world


def ids(job: Job) -> list[str]:
    return [seen.id for seen in job.calls]


def turn(id: str, time: float, **changes: Any) -> Call:
    return call(id, [10], [7], time=time, **changes)


def other(time: float) -> Call:
    """Of another session: it moves the watermark."""
    return turn(f"other at {time}", time, session="other")


def of_s(world: World) -> list[Job]:
    return [job for job in world.written if job.name == "s"]


# ------------------------------------------------------------------------------------------- close
def test_an_end_closes_a_session_and_its_window_writes_it() -> None:
    world = World().take(turn("a", 0), End(session="s", time=1), other(59))
    assert of_s(world) == []
    (job,) = of_s(world.take(other(60)))
    assert ids(job) == ["a"]
    assert job.group == 0


def test_a_session_whose_task_is_not_labelled_by_feedback_is_written_when_it_closes() -> None:
    world = World(rewarded=frozenset()).take(turn("a", 0), said("f", 1.0))
    assert of_s(world) == []
    (job,) = of_s(world.take(End(session="s", time=1)))
    assert [signal.id for signal in job.signals] == ["f"]


def test_idle_event_time_closes_a_session() -> None:
    world = World(rewarded=frozenset()).take(turn("a", 0), turn("b", 9), other(18.9))
    assert of_s(world) == []
    (job,) = of_s(world.take(other(19)))
    assert ids(job) == ["a", "b"]


def test_a_session_of_so_many_calls_closes() -> None:
    world = World(rewarded=frozenset(), max_calls=2).take(turn("a", 0), turn("b", 1))
    assert [ids(job) for job in of_s(world)] == [["a", "b"]]


def test_a_partition_in_which_nothing_comes_goes_on_with_the_wall_clock() -> None:
    world = World().take(turn("a", 0)).wait(9.9)
    assert world.state.sessions["s"].phase == "open"
    world.wait(0.1)
    assert world.state.sessions["s"].phase == "closed"
    assert of_s(world.wait(49.9)) == []
    assert len(of_s(world.wait(0.1))) == 1


def test_calls_out_of_order_are_in_and_so_is_one_of_a_clock_that_ran_backwards() -> None:
    world = World(rewarded=frozenset()).take(turn("b", 5), turn("a", 1), turn("c", 3))
    (job,) = of_s(world.take(End(session="s", time=6)))
    assert ids(job) == ["b", "a", "c"]
    assert job.group == 0


def test_a_call_that_comes_late_still_has_its_time_before_it_is_idle() -> None:
    world = World(rewarded=frozenset()).take(other(1000), turn("a", 0), turn("b", 5))
    assert of_s(world) == []
    (job,) = of_s(world.take(other(1010)))
    assert ids(job) == ["a", "b"]


def test_a_duplicate_of_a_call_is_ignored_also_after_the_close() -> None:
    world = World(rewarded=frozenset()).take(turn("a", 0), turn("a", 0), End(session="s", time=1))
    world.take(turn("a", 0))
    assert [ids(job) for job in of_s(world)] == [["a"]]


def test_a_late_call_is_a_group_of_its_own_with_its_sessions_label() -> None:
    world = World().take(turn("a", 0), said("f", 1.0), End(session="s", time=1), turn("late", 2))
    assert of_s(world) == []
    first, late = of_s(world.take(other(60)))
    assert (ids(first), first.late) == (["a"], None)
    assert late.late is not None
    assert late.late.id == "late"
    assert late.label == FINAL
    (again,) = of_s(world.take(turn("later", 61)))[2:]
    assert again.late is not None
    assert (again.late.id, again.label) == ("later", FINAL)


def test_a_task_that_the_run_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="no task 'u'; it has t"):
        World().take(turn("a", 0, task="u"))


# --------------------------------------------------------------------------------------- imported
def imported(id: str, time: float, **changes: Any) -> Call:
    return turn(id, time, source="import", **changes)


def test_imported_sessions_close_when_nothing_imported_comes_any_more() -> None:
    world = World().take(other(1e6), imported("a", 0), other(2e6), imported("b", 5))
    world.wait(5).take(imported("x", 900, session="x"), said("f", 1.0, time=6)).wait(9.9)
    assert of_s(world) == []
    world.wait(0.1)
    (job,) = of_s(world)
    assert ids(job) == ["a", "b"]
    assert [signal.id for signal in job.signals] == ["f"]
    assert world.state.watermark == 2e6


# --------------------------------------------------------------------------------------- feedback
def test_feedback_before_its_session_and_before_its_call_finds_it() -> None:
    world = World().take(said("s", 1.0), said("c", 0.5, call="a"), turn("a", 1))
    (job,) = of_s(world.take(other(61)))
    assert {signal.id for signal in job.signals} == {"s", "c"}


def test_feedback_that_names_only_a_call_is_its_sessions() -> None:
    world = World().take(turn("a", 0), said("c", 0.5, call="a", time=1), other(60))
    (job,) = of_s(world)
    assert [(signal.id, signal.call) for signal in job.signals] == [("c", "a")]


def test_feedback_counts_until_its_window_ends_by_its_own_time() -> None:
    world = World().take(turn("a", 0), said("in", 1.0, time=60), said("late", 0.0, time=60.1))
    job, correction = of_s(world.take(other(60)))
    assert [signal.id for signal in job.signals] == ["in"]
    assert correction.correction == 1
    assert [signal.id for signal in correction.signals] == ["in", "late"]
    assert correction.label == FINAL


def test_feedback_after_the_time_for_corrections_lapses() -> None:
    world = World().take(turn("a", 0), said("f", 1.0), other(60), said("late", 0.0, time=160.1))
    assert list(world.state.lapsed) == [1]
    assert len(of_s(world)) == 1


def test_the_same_feedback_again_is_ignored() -> None:
    world = World().take(turn("a", 0), said("f", 1.0), said("f", 1.0), other(60))
    (job,) = of_s(world)
    assert [signal.id for signal in job.signals] == ["f"]
    world.take(said("f", 0.0, time=61))
    assert len(of_s(world)) == 1


def test_feedback_for_a_session_that_never_comes_lapses_after_the_window() -> None:
    world = World().take(other(0), said("f", 1.0, time=0), other(59.9))
    assert world.state.lapsed == {}
    world.take(other(60))
    assert world.state.lapsed == {0: "there is no session s after 60 s"}


def test_feedback_for_what_was_written_otherwise_lapses() -> None:
    world = World(rewarded=frozenset()).take(turn("a", 0), End(session="s", time=0), said("f", 1.0))
    assert "not labelled by feedback" in world.state.lapsed[0]
    silent = World().take(turn("a", 0), other(60), said("f", 1.0, time=61))
    assert "closed as no_label" in silent.state.lapsed[0]


def test_an_unlabelled_session_waits_for_the_window_and_takes_what_the_rule_says() -> None:
    def fallback(rule: dict[str, Any]) -> Label | None:
        world = World(rule=rule).take(turn("a", 0), said("f", 1.0), other(60))
        (job,) = of_s(world.take(turn("b", 70, session="n"), other(130)))
        (quiet,) = [job for job in world.written if job.name == "n"]
        assert job.signals
        return quiet.fallback

    assert fallback({}) is None
    assert fallback({"fallback": 0.25}) == Label(0.25, "provisional")
    tracked = fallback({"fallback": "tracker"})
    assert tracked is not None
    assert 0.5 < tracked.value < 1.0  # one success above the prior


def test_a_label_that_comes_after_a_provisional_one_corrects_it() -> None:
    world = World(rule={"fallback": 0.25}).take(turn("a", 0), other(60))
    _, correction = of_s(world.take(said("f", 1.0, time=61)))
    assert correction.label == Label(0.25, "provisional")
    assert world.state.sessions["s"].label == FINAL


# -------------------------------------------------------------------------------------------- caps
def test_a_user_has_so_many_sessions_trained_in_the_caps_window() -> None:
    world = World(rewarded=frozenset(), sessions_per_user=2, cap_window_s=100.0)
    for n, at in enumerate((0, 1, 2, 150)):
        world.take(turn(f"c{n}", at, session=f"s{n}", user="u"), End(session=f"s{n}", time=at))
    assert [job.reason for job in world.written] == ["", "", "capped", ""]


# ------------------------------------------------------------------------------------- after a kill
def killed(*records: Call | End | Feedback) -> tuple[World, list[Fact]]:
    """A process at its snapshot before the last two records, and the facts its run wrote after
    it."""
    ran = World().take(*records[:-2])
    saved, before = ran.again(), len(ran.facts)
    ran.take(*records[-2:])
    return saved, ran.facts[before:]


def test_what_a_dead_process_wrote_is_not_written_again() -> None:
    records = (turn("a", 0), said("f", 1.0), other(59), other(60))
    world, facts = killed(*records)
    assert len(facts) == 1
    world.sessions.adopt(facts)
    world.work()
    world.take(*records[-2:], other(61))
    assert of_s(world) == []
    assert world.state.sessions["s"].label == FINAL


def test_a_late_call_that_was_written_alone_joins_no_session() -> None:
    """The first process closed the session by the wall clock; the second reads on at once."""
    ran = World(rewarded=frozenset()).take(other(0))
    world = ran.again()
    ran.take(turn("a", 0)).wait(10).take(turn("late", 1), End(session="s", time=2))
    first, late = ran.facts[-2:]
    world.sessions.adopt([late])  # the session's own group did not get there
    world.take(turn("a", 0), turn("late", 1), turn("b", 2), End(session="s", time=2))
    (job,) = of_s(world)
    assert ids(job) == ["a", "b"]
    assert (first.until, late.late) == (1, 2)


def test_feedback_that_a_dead_process_corrected_by_is_in_the_label() -> None:
    records = (
        turn("a", 0), said("f", 1.0), other(60), said("g", 0.0, time=61), said("h", 0.5, time=62),
    )  # fmt: skip
    world, facts = killed(*records)
    assert [fact.correction for fact in facts] == [1, 2]
    world.sessions.adopt(facts)
    world.work()
    world.take(*records[-2:])
    assert of_s(world) == []
    label = world.state.sessions["s"].label
    assert label is not None
    assert label.value == 0.5


def test_facts_wait_for_their_sessions_first_call() -> None:
    ran = World()
    world = ran.again()
    records: Sequence[Call | Feedback] = (turn("a", 0), said("f", 1.0), turn("b", 1), other(61))
    ran.take(*records)
    world.sessions.adopt(ran.facts)
    world = world.again()  # killed again, before the first call was read again
    world.take(*records, said("g", 0.0, time=62))
    assert [job.correction for job in of_s(world)] == [1]
    assert ids(of_s(world)[0]) == ["a", "b"]


def test_a_session_is_forgotten_once_nothing_can_come_of_it() -> None:
    world = World().take(turn("a", 0), said("f", 1.0), other(60), other(169.9))
    assert "s" in world.state.sessions
    world.take(other(170))
    assert "s" not in world.state.sessions
