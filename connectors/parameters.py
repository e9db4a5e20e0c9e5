"""Parameters by name, of what is chosen by name: what each may be, and the one line that refuses.

A rule over several parameters is whoever's takes them.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

REQUIRED: Final = object()


class Parameter(Protocol):
    @property
    def default(self) -> Any:
        """Of what is left out, or REQUIRED."""

    def check(self, value: Any) -> str | None:
        """The rule, if `value` breaks it."""


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number from `least` (above it where it is `above`) to `most`; None too where it is
    `optional`."""

    default: Any = REQUIRED
    least: float = 0.0
    most: float = math.inf
    above: bool = False
    optional: bool = False

    def check(self, value: Any) -> str | None:
        if value is None and self.optional:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool):
            low = self.least < value if self.above else self.least <= value
            if low and value <= self.most and abs(value) <= sys.float_info.max:
                return None
        rules = []
        if math.isfinite(self.least):
            rules.append(f"{'above' if self.above else 'of at least'} {self.least:g}")
        if math.isfinite(self.most):
            rules.append(f"at most {self.most:g}")
        kind = "a number" if math.isfinite(self.most) else "a finite number"
        return f"must be {kind} {' and '.join(rules)}".rstrip()


@dataclass(frozen=True, slots=True)
class Count:
    """An integer from `least` to `most`; None too where it is `optional`."""

    default: Any = REQUIRED
    least: int = 0
    most: int = 10**6
    optional: bool = False

    def check(self, value: Any) -> str | None:
        if value is None and self.optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < self.least:
            return f"must be an integer of at least {self.least}"
        return None if value <= self.most else f"must be at most {self.most}"


@dataclass(frozen=True, slots=True)
class CountOr:
    """An integer from 0 to `most`, or `word`; None too where it is `optional`."""

    word: str
    default: Any = REQUIRED
    most: int = 10**6
    optional: bool = False

    def check(self, value: Any) -> str | None:
        count = Count(most=self.most, optional=self.optional)
        rule = None if value == self.word else count.check(value)
        return rule and f"{rule} or {self.word!r}"


@dataclass(frozen=True, slots=True)
class Flag:
    default: bool

    def check(self, value: Any) -> str | None:
        return None if isinstance(value, bool) else "must be true or false"


@dataclass(frozen=True, slots=True)
class OneOf:
    values: tuple[Any, ...]
    default: Any = REQUIRED

    def check(self, value: Any) -> str | None:
        # True == 1: a flag is no count
        known = any(value == v and type(value) is type(v) for v in self.values)
        return None if known else f"must be one of {', '.join(map(repr, self.values))}"


def check(rules: Mapping[str, Parameter], values: Mapping[str, Any]) -> None:
    """ValueError, one line, for the first of `values` that `rules` do not know (with the nearest
    known one) or that breaks its rule (with the rule and the value)."""
    for name, value in values.items():
        if name not in rules:
            raise ValueError(f"unknown parameter {name!r}{nearest(name, rules)}")
        if (broken := rules[name].check(value)) is not None:
            raise ValueError(f"{name} {broken}, got {value!r}")


def nearest(word: str, known: Iterable[str]) -> str:
    """', did you mean X?' for the closest of `known`, or else all of them."""
    names = sorted(known)
    if not names:
        return ": it takes none"
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.4)
    return f", did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"
