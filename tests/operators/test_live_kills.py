"""A process is killed at any moment and goes on from its last snapshot: the topics interleave
otherwise, the wall clock has moved on, and still no call is written twice, none is lost, and every
session ends with the label that all that was said gives."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from connectors.traffic import Call, End, Feedback
from operators.labels import Label, Rule
from operators.session_state import Fact, Job, Limits, State
from operators.sessions import Sessions
from tests.operators.live_calls import call, said

LIMITS = Limits(
    idle_s=10.0,
    max_calls=5,
    rules={"t": Rule(window_s=50.0, correction_s=1e9)},
    rewarded=frozenset({"t"}),
    key_of=lambda call: "*",
)


class Killed(RuleBasedStateMachine):
    """`log`: what was written, in order, by any process. A job's record and its fact are one."""

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.wall = 1e9
        self.traffic: list[Call | End] = []
        self.feedback: list[Feedback] = []
        self.log: list[tuple[str, Fact, tuple[str, ...]]] = []
        self.saved = (msgspec.msgpack.encode(State()), 0, 0, 0)
        for n in range(data.draw(st.integers(1, 12))):
            name = data.draw(st.sampled_from(["p", "q"]))
            time = float(data.draw(st.integers(0, 40)))
            self.traffic.append(call(f"{name}/{n}", [10], [7], session=name, time=time))
            if data.draw(st.integers(0, 5)) == 0:
                self.traffic.append(End(session=name, time=time))
        for n in range(data.draw(st.integers(0, 6))):
            about = data.draw(st.sampled_from([c for c in self.traffic if isinstance(c, Call)]))
            where = {"call": about.id} if data.draw(st.booleans()) else {"session": about.session}
            value = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
            self.feedback.append(said(f"f{n}", value, time=0.0, **where))
        self.restore()

    def restore(self) -> None:
        encoded, self.read_traffic, self.read_feedback, written = self.saved
        state = msgspec.msgpack.decode(encoded, type=State)
        self.sessions = Sessions(LIMITS, state, lambda: self.wall)
        self.sessions.adopt([fact for _, fact, _ in self.log[written:]])
        self.waiting: dict[str, Job] = {}
        self.send()

    def send(self) -> None:
        """What is due is sent out, one job a session."""
        for name in self.sessions.take_touched():
            if name not in self.waiting and (job := self.sessions.job(name)) is not None:
                self.waiting[name] = job

    @precondition(lambda self: self.read_traffic < len(self.traffic))
    @rule()
    def traffic_comes(self) -> None:
        record = self.traffic[self.read_traffic]
        if isinstance(record, Call):
            self.sessions.call(self.read_traffic, record)
        else:
            self.sessions.end(record)
        self.read_traffic += 1
        self.send()

    @precondition(lambda self: self.read_feedback < len(self.feedback))
    @rule()
    def feedback_comes(self) -> None:
        self.sessions.feedback(self.read_feedback, self.feedback[self.read_feedback])
        self.read_feedback += 1
        self.send()

    @precondition(lambda self: not self.sessions.state.early)  # else it might lapse
    @rule(seconds=st.sampled_from([1.0, 10.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.wall += seconds
        self.sessions.tick()
        self.send()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def job_is_written(self, data: st.DataObject) -> None:
        job = self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting))))
        fact, calls = self.written(job)
        if fact is None:
            assert job.correction is not None
            self.sessions.unchanged(job.name, job.correction)
        else:
            self.log.append((job.name, fact, calls))
            self.sessions.adopt([fact])
        self.send()

    def written(self, job: Job) -> tuple[Fact | None, tuple[str, ...]]:
        label = Label(fmean(s.value for s in job.signals), "final") if job.signals else None
        if job.late is not None:
            return Fact(group=job.group, late=job.late.offset), (job.late.id,)
        if job.correction is not None:
            if label == job.label:
                return None, ()
            fact = Fact(group=job.group, correction=job.correction, judged=job.judged, label=label)
            return fact, ()
        label = label or Label(0.5, "provisional")
        fact = Fact(group=job.group, until=job.until, judged=job.judged, label=label)
        return fact, tuple(seen.id for seen in job.calls)

    @rule()
    def snapshot(self) -> None:
        encoded = msgspec.msgpack.encode(self.sessions.state)
        self.saved = (encoded, self.read_traffic, self.read_feedback, len(self.log))

    @rule()
    def kill(self) -> None:
        self.restore()

    @invariant()
    def no_call_is_written_twice(self) -> None:
        calls = Counter(i for _, _, calls in self.log for i in calls)
        assert not calls or max(calls.values()) == 1
        groups = Counter(f.group for _, f, _ in self.log if f.late is None and f.correction is None)
        assert not groups or max(groups.values()) == 1
        corrections = Counter(f.correction for _, f, _ in self.log if f.correction is not None)
        assert not corrections or max(corrections.values()) == 1

    def teardown(self) -> None:
        if not hasattr(self, "sessions"):
            return
        self.finish()
        calls = [i for _, _, written in self.log for i in written]
        assert sorted(calls) == sorted(c.id for c in self.traffic if isinstance(c, Call))
        self.check_labels()

    def finish(self) -> None:
        while self.read_traffic < len(self.traffic):
            self.traffic_comes()
        while self.read_feedback < len(self.feedback):
            self.feedback_comes()
        for _ in range(4):
            self.time_passes(60.0)
            while self.waiting:
                job = self.waiting.pop(min(self.waiting))
                fact, calls = self.written(job)
                if fact is None:
                    self.sessions.unchanged(job.name, job.correction or 0)
                else:
                    self.log.append((job.name, fact, calls))
                    self.sessions.adopt([fact])
                self.send()
        assert self.sessions.state.lapsed == {}

    def check_labels(self) -> None:
        last: dict[str, Label | None] = {}
        for name, fact, _ in self.log:
            if fact.late is None:
                last[name] = fact.label
        session_of = {c.id: c.session for c in self.traffic if isinstance(c, Call)}
        values: dict[str, list[float]] = {}
        for about in self.feedback:
            name = about.session or session_of[about.call or ""]
            values.setdefault(name, []).append(about.value)
        for name, label in last.items():
            expected = fmean(values[name]) if name in values else 0.5
            assert label is not None
            assert label.value == expected, name


TestKilled = Killed.TestCase
TestKilled.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
