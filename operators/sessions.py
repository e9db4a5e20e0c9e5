"""What becomes of each session of one partition: a fold over calls, ends, feedback and time.

    open ──End, idle, max_calls──▶ closed ──its window ends──▶ due ──written──▶ done ──▶ forgotten
      ▲ calls, feedback              ▲ feedback                                  ▲ late calls and
                                                                                   corrections

A process that starts again reads the facts its dead predecessor wrote after the last snapshot and
adopts them before anything else: then it writes no call a second time, however differently the two
topics interleave now.

Time is event time. The watermark is the greatest time of any call of live traffic; once nothing has
come for `idle_s` by the wall clock, it goes on with that. A session is idle when the watermark has
moved on by `idle_s` since its last call came, so one that came late still has its time. What an
importer writes is history: its times say nothing about what is still to come, so it moves no
watermark, and its sessions close, and get their labels, when nothing imported has come for
`idle_s` by the wall clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from connectors.traffic import Call, End, Feedback
from operators.labels import Label, Signal, provisional
from operators.session_state import NOTHING, Early, Fact, Job, Limits, Seen, Session, State
from operators.tracker import Observation, TrackerState

Deadlines = list[tuple[float, int, str]]
"""A heap: when, an offset, of whom."""


class Sessions:
    """`clock`: Unix seconds. After each call, `take_touched` names the sessions that may have a
    `job` now."""

    def __init__(self, limits: Limits, state: State, clock: Callable[[], float]) -> None:
        self.state, self._limits, self._clock = state, limits, clock
        self._heard = self._heard_import = clock()
        self._window_s = max(rule.window_s for rule in limits.rules.values())
        self._calls: dict[str, str] = {}  # id -> session
        self._groups: dict[int, str] = {}
        self._deadlines: Deadlines = []  # of live sessions, in event time
        self._import_ends: Deadlines = []  # of imported ones that are done, by the wall clock
        self._early_ends: Deadlines = []
        self._imports: set[str] = set()  # imported and not due yet
        self._touched: dict[str, None] = {}
        self._deferred: set[str] = set()  # corrections that wait for feedback to be read again
        for session in state.sessions.values():
            self._index(session)
        for key, early in state.early.items():
            for one in early:  # what it waits for may stand in the log, not read yet
                deadline = max(one.deadline, self.now() + self._window_s)
                heapq.heappush(self._early_ends, (deadline, one.signal.offset, key))

    # ------------------------------------------------------------------------------- what comes in
    def call(self, offset: int, call: Call) -> None:
        """ValueError for a task that the run has not."""
        if call.task not in self._limits.rules:
            known = ", ".join(self._limits.rules)
            raise ValueError(f"the configuration has no task {call.task!r}; it has {known}")
        ended = max(call.time, call.finished_at)
        self._heard = self._clock()
        if call.source == "import":
            self._heard_import = self._heard
        elif self.state.watermark is None or ended > self.state.watermark:
            self.state.watermark = ended
        self.tick()
        session = self.state.sessions.get(call.session)
        if session is None:
            session = self._opened(offset, call)
        elif self._calls.get(call.id) == call.session:
            return  # the same record again
        self._join(session, Seen(offset, call.id, ended), call)
        for key in (f"session {call.session}", f"call {call.id}"):
            for early in self.state.early.pop(key, ()):
                self._told(session, early.signal)

    def end(self, end: End) -> None:
        self._heard = self._clock()
        self.tick()
        session = self.state.sessions.get(end.session)
        if session is not None and session.phase == "open":
            self._close(session)

    def feedback(self, offset: int, said: Feedback) -> None:
        self._heard = self._clock()
        self.state.feedback = max(self.state.feedback, offset)
        self.tick()
        signal = Signal(offset, said.id, said.name, said.value, said.time, said.call)
        sessions = self.state.sessions
        session = sessions.get(said.session) or sessions.get(self._calls.get(said.call or "", ""))
        if session is not None:
            self._told(session, signal)
        else:
            self._wait(signal, f"session {said.session}" if said.session else f"call {said.call}")
        for name in list(self._deferred):
            self._deferred.discard(name)
            self._touched[name] = None

    def tick(self) -> None:
        """Does what the time that has passed demands."""
        now, wall = self.now(), self._clock()
        for session in self._expired(self._deadlines, now):
            if session.phase == "open":
                self._close(session)
            elif session.phase == "closed":
                self._due(session)
            else:
                self._forget(session)
        if self._imports and wall - self._heard_import >= self._limits.idle_s:
            for name in sorted(self._imports):
                session = self.state.sessions[name]
                if session.phase == "open":
                    self._close(session)
                if session.phase == "closed":
                    self._due(session)
        for session in self._expired(self._import_ends, wall):
            self._forget(session)
        while self._early_ends and self._early_ends[0][0] <= now:
            _, offset, key = heapq.heappop(self._early_ends)
            self._lapse_early(offset, key)

    def now(self) -> float:
        """Event time."""
        wall = self._clock()
        if self.state.watermark is None:
            return wall
        quiet = wall - self._heard
        return self.state.watermark + (quiet if quiet >= self._limits.idle_s else 0.0)

    # ------------------------------------------------------------------------------ what goes out
    def take_touched(self) -> list[str]:
        touched, self._touched = list(self._touched), {}
        return touched

    def job(self, name: str) -> Job | None:
        """What is to be written of the session next; None: nothing now."""
        session = self.state.sessions.get(name)
        if session is None:
            return None
        if session.phase == "due":
            return self._write(session)
        if session.phase != "done":
            return None
        if session.late:
            return Job.of(session, late=session.late[0])
        if not session.todo:
            return None
        if self.state.feedback < max(session.judged, default=NOTHING):
            self._deferred.add(name)  # what the last writer knew was not all read again yet
            return None
        rule = self._limits.rules[session.task]
        signals = [s for s in session.signals if rule.corrects(s, session.last)]
        return Job.of(session, signals, correction=session.todo[0])

    def adopt(self, facts: Iterable[Fact]) -> None:
        """What was written, by this process or a dead one; a fact known already changes nothing."""
        for fact in facts:
            name = self._groups.get(fact.group)
            if fact.late is not None:
                self._adopt_late(fact.late, name)
            elif name is not None:
                self._apply(self.state.sessions[name], fact)
            elif fact not in self.state.facts.get(fact.group, []):
                self.state.facts.setdefault(fact.group, []).append(fact)

    def unchanged(self, name: str, offset: int) -> None:
        """The feedback at `offset` leaves the session's label as it is."""
        session = self.state.sessions[name]
        session.todo = [o for o in session.todo if o != offset]
        self._touch(session)

    # ------------------------------------------------------------------------------------ sessions
    def _opened(self, offset: int, call: Call) -> Session:
        session = Session(
            name=call.session,
            task=call.task,
            group=offset,
            user=call.user,
            key=self._limits.key_of(call),
            imported=call.source == "import",
            earliest=(call.time, call.id),
        )
        self.state.sessions[call.session] = session
        self._index(session)
        for fact in self.state.facts.pop(offset, ()):
            self._apply(session, fact)
        return session

    def _join(self, session: Session, seen: Seen, call: Call) -> None:
        self._calls[seen.id] = session.name
        if seen.offset in self.state.late:
            self.state.late.remove(seen.offset)  # it is written
            session.alone.append(seen)
        elif session.phase == "open" or seen.offset <= session.until:
            session.calls.append(seen)
            session.last = max(session.last, seen.time)
            session.heard = self._clock() if session.imported else self.now()
            if (call.time, call.id) < session.earliest:
                session.earliest = (call.time, call.id)
                session.task, session.user = call.task, call.user
                session.key = self._limits.key_of(call)
            if session.phase == "open" and len(session.calls) >= self._limits.max_calls:
                self._close(session)
            else:
                self._schedule(session)
        else:
            session.late.append(seen)
            self._touch(session)

    def _close(self, session: Session) -> None:
        if not session.calls:  # all it had were written alone, by a dead process
            session.phase = "done"
            return
        most, user = self._limits.sessions_per_user, session.user
        if most is not None and user:
            since = session.last - self._limits.cap_window_s
            trained = [at for at in self.state.trained.get(user, []) if at > since]
            if len(trained) >= most:
                session.reason = "capped"
            else:
                trained.append(session.last)
            self.state.trained[user] = trained
        session.phase = "closed"
        if session.reason or session.task not in self._limits.rewarded:
            self._due(session)
        else:
            self._schedule(session)

    def _due(self, session: Session) -> None:
        session.phase = "due"
        self._imports.discard(session.name)
        self._touch(session)

    def _forget(self, session: Session) -> None:
        if session.late or session.todo:
            return  # until they are written
        del self.state.sessions[session.name], self._groups[session.group]
        for seen in (*session.calls, *session.alone):
            if self._calls.get(seen.id) == session.name:
                del self._calls[seen.id]

    # ------------------------------------------------------------------------------------ feedback
    def _told(self, session: Session, signal: Signal) -> None:
        if any(known.id == signal.id for known in session.signals):
            return  # the same fact again
        if session.phase != "done":
            session.signals.append(signal)
            if session.imported:
                self._heard_import = self._clock()
            if session.phase == "due" and session.task in self._limits.rewarded:
                session.todo.append(signal.offset)  # what is being written knows nothing of it
            return
        counted = signal.offset in session.judged
        if not counted and (problem := self._untimely(session, signal)):
            session.todo = [o for o in session.todo if o != signal.offset]
            self.state.lapsed[signal.offset] = problem
            return
        session.signals.append(signal)
        if not counted and signal.offset not in (*session.corrected, *session.todo):
            session.todo.append(signal.offset)
        self._touch(session)

    def _untimely(self, session: Session, signal: Signal) -> str:
        """Why a signal can do nothing for a session that was written."""
        if session.task not in self._limits.rewarded:
            return "its session was written, and is not labelled by feedback"
        if session.reason:
            return f"its session was closed as {session.reason}"
        if not self._limits.rules[session.task].corrects(signal, session.last):
            return "it is of a time after that in which it could correct the label"
        return ""

    def _wait(self, signal: Signal, key: str) -> None:
        early = Early(signal, max(self.now(), signal.time) + self._window_s)
        self.state.early.setdefault(key, []).append(early)
        heapq.heappush(self._early_ends, (early.deadline, signal.offset, key))

    def _lapse_early(self, offset: int, key: str) -> None:
        waiting = self.state.early.pop(key, [])
        left = [early for early in waiting if early.signal.offset != offset]
        if len(left) < len(waiting):
            self.state.lapsed[offset] = f"there is no {key} after {self._window_s:g} s"
        if left:
            self.state.early[key] = left

    # ---------------------------------------------------------------------------------------- jobs
    def _write(self, session: Session) -> Job:
        rule, rewarded = self._limits.rules[session.task], session.task in self._limits.rewarded
        fallback = None
        if rewarded and rule.fallback == "tracker":
            state = self.state.tracked.get(session.task, TrackerState())
            value = self._limits.tracker(session.task).value(state, session.key)
            fallback = provisional(value)
        elif rewarded and rule.fallback is not None:
            fallback = provisional(float(rule.fallback))
        signals = [s for s in session.signals if not rewarded or rule.counts(s, session.last)]
        return Job.of(session, signals, fallback=fallback)

    # --------------------------------------------------------------------------------------- facts
    def _apply(self, session: Session, fact: Fact) -> None:
        if fact.correction is not None:
            self._apply_correction(session, fact, fact.correction)
        elif session.phase != "done":
            self._apply_written(session, fact)
        self._touch(session)

    def _apply_written(self, session: Session, fact: Fact) -> None:
        if session.phase == "open" and session.user and not fact.reason:
            self.state.trained.setdefault(session.user, []).append(session.last)
        session.phase, session.until, session.judged = "done", fact.until, list(fact.judged)
        session.label, session.reason = fact.label, fact.reason
        self._imports.discard(session.name)
        seen = sorted([*session.calls, *session.late], key=lambda seen: seen.offset)
        session.calls = [one for one in seen if one.offset <= fact.until]
        session.late = [one for one in seen if one.offset > fact.until]
        signals, session.signals = session.signals, []
        for signal in signals:
            self._told(session, signal)
        self._learn(session, fact.label)

    def _apply_correction(self, session: Session, fact: Fact, offset: int) -> None:
        if offset in session.corrected:
            return
        if session.label is not None and session.label.kind == "provisional":
            self._learn(session, fact.label)
        session.corrected.append(offset)
        session.todo = [o for o in session.todo if o != offset]
        session.label, session.judged = fact.label, sorted({*session.judged, *fact.judged})

    def _adopt_late(self, offset: int, name: str | None) -> None:
        session = self.state.sessions.get(name or "")
        late = [] if session is None else [s for s in session.late if s.offset == offset]
        if session is not None and late:
            session.late = [seen for seen in session.late if seen.offset != offset]
            session.alone += late
            self._touch(session)
            return
        known = session is not None and any(seen.offset == offset for seen in session.alone)
        if not known and offset not in self.state.late:
            self.state.late.append(offset)

    def _learn(self, session: Session, label: Label | None) -> None:
        if label is None or label.kind != "final":
            return
        before = self.state.tracked.get(session.task, TrackerState())
        seen = Observation(key=session.key, reward=label.value)
        self.state.tracked[session.task] = self._limits.tracker(session.task).update(before, [seen])

    # --------------------------------------------------------------------------------------- index
    def _index(self, session: Session) -> None:
        self._groups[session.group] = session.name
        for seen in (*session.calls, *session.late, *session.alone):
            self._calls[seen.id] = session.name
        if session.imported and session.phase in ("open", "closed"):
            self._imports.add(session.name)
        self._touch(session)

    def _touch(self, session: Session) -> None:
        self._touched[session.name] = None
        self._schedule(session)

    def _schedule(self, session: Session) -> None:
        if session.phase == "due" or (session.imported and session.phase != "done"):
            return
        heap = self._import_ends if session.imported else self._deadlines
        heapq.heappush(heap, (self._deadline(session), session.group, session.name))

    def _deadline(self, session: Session) -> float:
        rule = self._limits.rules[session.task]
        if session.phase == "open":
            return session.heard + self._limits.idle_s
        if session.phase == "closed":
            return session.heard + rule.window_s
        return session.heard + rule.window_s + rule.correction_s + self._limits.idle_s

    def _expired(self, heap: Deadlines, now: float) -> Iterator[Session]:
        """Those whose deadline is past, in its order. An entry that is no session's deadline any
        more was overtaken by a later one."""
        while heap and heap[0][0] <= now:
            deadline, group, name = heapq.heappop(heap)
            session = self.state.sessions.get(name)
            if session is None or session.group != group or session.phase == "due":
                continue
            if self._deadline(session) == deadline:
                yield session
