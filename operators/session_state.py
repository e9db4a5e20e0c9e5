"""What is known of the sessions of one partition: state, what is to be written, what was.

State is offsets and small facts, never payloads. What is to be written is a `Job`, one at a time a
session; what was written is a `Fact`, and only facts make a session `done` (operators/sessions.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from connectors.traffic import Call
from operators.labels import Label, Rule, Signal, ordered, provisional
from operators.tracker import TrackerState, ValueTracker

Phase = Literal["open", "closed", "due", "done"]
NOTHING: Final = -1  # no offset


class Seen(msgspec.Struct, frozen=True, array_like=True):
    """A call as the fold knows it; `time`: its end."""

    offset: int
    id: str
    time: float


class Session(msgspec.Struct):
    """group   offset of its first call in the log, which is its group's id
    key     of its value: that of its earliest call, as task and user are
    calls   in the log's order; `late`: those that came after the close, not written yet; `alone`:
            those that were
    last    when its last call ended; `heard`: the watermark (of an imported one, the wall clock)
            when that came
    until   of a `done` one: its calls up to this offset are in the group
    judged  of a `done` one: offsets of the feedback that its label, or its group, knows of
    todo    offsets of feedback that may change the label; `corrected`: of what was written for some
    reason  why it ends, or ended, untrained
    """

    name: str
    task: str
    group: int
    user: str
    key: str
    imported: bool
    earliest: tuple[float, str]
    phase: Phase = "open"
    calls: list[Seen] = []
    late: list[Seen] = []
    alone: list[Seen] = []
    last: float = -math.inf
    heard: float = -math.inf
    signals: list[Signal] = []
    until: int = NOTHING
    judged: list[int] = []
    todo: list[int] = []
    corrected: list[int] = []
    label: Label | None = None
    reason: str = ""


class Fact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a record of `rollouts` says of the session whose group is `group`: it was written with
    its calls up to `until`; or its `late` call was; or a `correction` was, caused by that feedback.
    `judged`, `label`, `reason` as in Session."""

    group: int
    until: int = NOTHING
    judged: tuple[int, ...] = ()
    label: Label | None = None
    reason: str = ""
    late: int | None = None
    correction: int | None = None


class Early(msgspec.Struct, frozen=True, array_like=True):
    """Feedback before its call, until `deadline`."""

    signal: Signal
    deadline: float


class State(msgspec.Struct):
    """early    by `session NAME` or `call ID`
    lapsed   why feedback, by offset, counts for nothing; until that is written
    trained  by user, when the sessions that are trained ended
    tracked  values of each task
    facts    adopted, of sessions whose first call was not read again yet; `late`: of late calls
    """

    sessions: dict[str, Session] = {}
    early: dict[str, list[Early]] = {}
    lapsed: dict[int, str] = {}
    trained: dict[str, list[float]] = {}
    tracked: dict[str, TrackerState] = {}
    watermark: float | None = None
    feedback: int = NOTHING
    facts: dict[int, list[Fact]] = {}
    late: list[int] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be written next of a session: its group; or that of a `late` call; or what the
    feedback at `correction` makes of its label, which was trained as `label`. `signals`: those that
    count. `fallback`: the label where they give none; None: it is closed."""

    name: str
    task: str
    user: str
    key: str
    group: int
    calls: tuple[Seen, ...]
    alone: tuple[Seen, ...]
    until: int
    judged: tuple[int, ...]
    signals: tuple[Signal, ...]
    label: Label | None
    fallback: Label | None = None
    reason: str = ""
    late: Seen | None = None
    correction: int | None = None

    @classmethod
    def of(
        cls,
        session: Session,
        signals: Iterable[Signal] = (),
        *,
        fallback: Label | None = None,
        late: Seen | None = None,
        correction: int | None = None,
    ) -> Job:
        """Of a session that is `due` or `done`."""
        is_done, heard = session.phase == "done", ordered(signals)
        return cls(
            name=session.name,
            task=session.task,
            user=session.user,
            key=session.key,
            group=session.group,
            calls=tuple(session.calls),
            alone=tuple(session.alone),
            until=session.until if is_done else session.calls[-1].offset,
            judged=tuple(sorted({*session.judged, *(signal.offset for signal in heard)})),
            signals=tuple(heard),
            label=session.label,
            fallback=fallback,
            reason=session.reason,
            late=late,
            correction=correction,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """As `[nearline]` says. `rules`: of each task; `rewarded`: the tasks whose reward is feedback.
    `key_of`: of a call's value."""

    idle_s: float
    max_calls: int
    rules: Mapping[str, Rule]
    rewarded: frozenset[str]
    key_of: Callable[[Call], str]
    sessions_per_user: int | None = None
    cap_window_s: float = 86_400.0

    def tracker(self, task: str) -> ValueTracker:
        rule = self.rules[task]
        low, high = (provisional(bound).value for bound in (rule.low, rule.high))
        return ValueTracker(low=low, high=high)
