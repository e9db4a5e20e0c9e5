"""Labels of live sessions: signals in, one number out, and what it means that one comes late.

    Feedback ─▶ Signal ─▶ in time? ─▶ combined, within [low, high] ─▶ Label
                             └─▶ late, but in time to correct ─▶ a Label that replaces it

Event time decides: a signal counts for its session until `window_s` after the session's last call,
and corrects what that gave until `correction_s` later. A value about one call counts for its
session. All of it is a pure function of the set of signals, each of which is known by its id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Final, Literal

import msgspec
import numpy as np

from operators.user_code import TookTooLong, UserCode, said

Kind = Literal["final", "provisional"]
Values = dict[str, list[float]]
"""What was said, by name, in order of time."""
Combine = Callable[[Values], Any]


class Signal(msgspec.Struct, frozen=True, array_like=True):
    """One feedback about a session. `offset`: of its record."""

    offset: int
    id: str
    name: str
    value: float
    time: float
    call: str | None = None


class Label(msgspec.Struct, frozen=True, array_like=True):
    """`cut`: what was combined, where that lay outside the bounds."""

    value: float
    kind: Kind
    cut: float | None = None


class NoLabel(Exception):
    """The user's function gave none; `reason` is one of records.REASONS."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


COMBINE: Final[Mapping[str, Callable[[Sequence[float]], float]]] = {
    "mean": lambda values: sum(values) / len(values),
    "last": lambda values: values[-1],
    "min": min,
    "max": max,
    "sum": sum,
}
"""What `tasks.NAME.feedback.combine` may say beside a function of the user's: over all values, in
order of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Of one task, as its configuration says. `combine`: one of COMBINE, or the user's function,
    which has `timeout_s`. `fallback`: what a session without a label is trained with, the tracked
    value for "tracker"; None: with nothing."""

    window_s: float
    correction_s: float = 0.0
    fallback: float | Literal["tracker"] | None = None
    combine: str | Combine = "mean"
    names: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 1.0
    timeout_s: float = 30.0

    def wants(self, signal: Signal) -> bool:
        return not self.names or signal.name in self.names

    def counts(self, signal: Signal, last: float) -> bool:
        """Whether it is part of the label of a session whose last call was at `last`."""
        return signal.time <= last + self.window_s

    def corrects(self, signal: Signal, last: float) -> bool:
        """Whether it may still change the label."""
        return signal.time <= last + self.window_s + self.correction_s


def ordered(signals: Iterable[Signal]) -> list[Signal]:
    """By time; each id once, the first in the log."""
    first: dict[str, Signal] = {}
    for signal in sorted(signals, key=lambda s: s.offset):
        first.setdefault(signal.id, signal)
    return sorted(first.values(), key=lambda s: (s.time, s.id))


def values_of(signals: Iterable[Signal]) -> Values:
    """What a user's function, or scorer, is given."""
    found: Values = {}
    for signal in ordered(signals):
        found.setdefault(signal.name, []).append(signal.value)
    return found


async def combined(rule: Rule, signals: Iterable[Signal], code: UserCode) -> Label | None:
    """The final label that these signals give; None if none of them is wanted. NoLabel when the
    user's function fails."""
    wanted = [signal for signal in ordered(signals) if rule.wants(signal)]
    if not wanted:
        return None
    if isinstance(rule.combine, str):
        value = COMBINE[rule.combine]([signal.value for signal in wanted])
    else:
        value = await _by_user(rule, rule.combine, values_of(wanted), code)
    within = min(max(value, rule.low), rule.high)
    return Label(_as_recorded(within), "final", None if within == value else value)


def provisional(value: float) -> Label:
    return Label(_as_recorded(value), "provisional")


async def _by_user(rule: Rule, combine: Combine, values: Values, code: UserCode) -> float:
    try:
        made = await code.run(partial(combine, values), timeout_s=rule.timeout_s)
    except TookTooLong as error:
        raise NoLabel("reward_timeout", str(error)) from error
    except Exception as error:  # foreign code: it raises anything
        raise NoLabel("reward_failed", said(error)) from error
    if isinstance(made, np.generic | np.ndarray) and made.ndim == 0:
        made = made.item()
    if not isinstance(made, Real):
        raise NoLabel("reward_failed", f"{made!r:.100} is no number")
    if not math.isfinite(made):
        raise NoLabel("reward_nan", f"{made!r:.100} is not finite")
    return float(made)


def _as_recorded(value: float) -> float:
    """A record's reward is a float32."""
    return float(np.float32(value))
