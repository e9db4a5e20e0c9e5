"""Staleness policies by name: `policy("n-step-off", n=1)`.

What a policy is and promises: `operators.staleness.types`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from operators.staleness.n_step_off import NStepOff
from operators.staleness.types import StalenessPolicy


@dataclass(frozen=True, slots=True)
class Count:
    """A parameter that is an integer of at least `least`."""

    least: int = 0

    def check(self, value: Any) -> str | None:
        """The rule, if `value` breaks it."""
        if isinstance(value, bool) or not isinstance(value, int) or value < self.least:
            return f"must be an integer of at least {self.least}"
        return None


@dataclass(frozen=True, slots=True)
class Preset:
    build: Callable[..., StalenessPolicy[Any]]
    parameters: Mapping[str, Count]


PRESETS: Mapping[str, Preset] = {
    "n-step-off": Preset(lambda n: NStepOff(n), {"n": Count()}),
    "sync": Preset(lambda: NStepOff(0, "sync"), {}),
    "one-step-off": Preset(lambda: NStepOff(1, "one-step-off"), {}),
}


def policy(name: str, **parameters: Any) -> StalenessPolicy[Any]:
    """The policy of that name. ValueError, one line, for an unknown name or parameter (with the
    nearest known one), a missing parameter, or a value that breaks the parameter's rule."""
    preset = PRESETS.get(name)
    if preset is None:
        raise ValueError(f"unknown staleness policy {name!r}{_nearest(name, PRESETS)}")
    for key, value in parameters.items():
        if key not in preset.parameters:
            raise ValueError(f"{name}: unknown parameter {key!r}{_nearest(key, preset.parameters)}")
        broken = preset.parameters[key].check(value)
        if broken:
            raise ValueError(f"{name}: {key} {broken}, got {value!r}")
    missing = [key for key in preset.parameters if key not in parameters]
    if missing:
        raise ValueError(f"{name}: parameter {missing[0]!r} is missing")
    return preset.build(**parameters)


def _nearest(word: str, known: Mapping[str, Any]) -> str:
    if not known:
        return ": it takes none"
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f", did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}"
