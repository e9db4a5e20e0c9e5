"""What a preset takes: its parameters, their rules, and what of them a run decides.

`Parameter`s are checked one by one here; a rule over several is `build`'s, which raises ValueError
with the rule and the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from operators.staleness.types import StalenessPolicy

REQUIRED: Final = object()
MOST: Final = 10**12
"""Of any number: no run comes near, and products of a few stay within floats."""
MOST_COUNT: Final = 10**6
"""Of groups, trajectories or requests at once."""
MOST_STEPS: Final = 10**4
"""Of what counts steps, versions or batches ahead."""


class Parameter(Protocol):
    @property
    def default(self) -> Any:
        """The framework's own, or REQUIRED."""

    def check(self, value: Any) -> str | None:
        """The rule, if `value` breaks it."""


@dataclass(frozen=True, slots=True)
class Count:
    """An integer from `least` to `most`; None too where it is `optional`."""

    default: Any = REQUIRED
    least: int = 0
    most: int = MOST_COUNT
    optional: bool = False

    def check(self, value: Any) -> str | None:
        if value is None and self.optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < self.least:
            return f"must be an integer of at least {self.least}"
        return None if value <= self.most else f"must be at most {self.most}"


@dataclass(frozen=True, slots=True)
class Number:
    """A number of at least 0, above it where it is `positive`, and at most `most`; None too where
    it is `optional`."""

    default: Any = REQUIRED
    most: float = MOST
    positive: bool = False
    optional: bool = False

    def check(self, value: Any) -> str | None:
        if value is None and self.optional:
            return None
        wrong = isinstance(value, bool) or not isinstance(value, int | float)
        if wrong or not 0 <= value <= self.most or (self.positive and value == 0):
            least = "above 0" if self.positive else "of at least 0"
            return f"must be a number {least} and at most {self.most:g}"
        return None


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


@dataclass(frozen=True, slots=True)
class CountOr:
    """An integer from 0 to `most`, or `word`; None too where it is `optional`."""

    word: str
    default: Any = REQUIRED
    most: int = MOST_COUNT
    optional: bool = False

    def check(self, value: Any) -> str | None:
        count = Count(most=self.most, optional=self.optional)
        rule = None if value == self.word else count.check(value)
        return rule and f"{rule} or {self.word!r}"


def check(rules: Mapping[str, Parameter], values: Mapping[str, Any]) -> None:
    """ValueError, with its name, the rule and the value, for the first of `values` that breaks its
    rule."""
    for name, value in values.items():
        broken = rules[name].check(value)
        if broken is not None:
            raise ValueError(f"{name} {broken}, got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunShape:
    """What a run decides for its policy: groups a step, trajectories a group, trajectories that
    all engines generate at once, engines."""

    batch_size: int
    group_size: int
    num_slots: int
    num_engines: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """build       from all parameters, by keyword
    parameters  by name, with the framework's own names and defaults
    from_run    parameters that a run gives when its configuration leaves them out
    fixed       those of `from_run` that may not differ from what the run gives: the framework's own
                name for the run's batch size
    """

    build: Callable[..., StalenessPolicy[Any]]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    from_run: Mapping[str, Callable[[RunShape], Any]] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
