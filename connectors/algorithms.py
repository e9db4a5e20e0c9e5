"""The training mathematics by name: what each algorithm takes and needs, without torch.

One table for the configuration, which checks names and parameters before anything heavy is
imported, and for the trainer, whose functions a test holds to it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """A finite number in [least, most]; in (least, most] where it is `above`."""

    default: float
    least: float = -math.inf
    most: float = math.inf
    above: bool = False

    def check(self, value: Any) -> str | None:
        """The rule, if `value` breaks it."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            low = self.least < value if self.above else self.least <= value
            if math.isfinite(value) and low and value <= self.most:
                return None
        rules = []
        if math.isfinite(self.least):
            rules.append(f"{'above' if self.above else 'of at least'} {self.least:g}")
        if math.isfinite(self.most):
            rules.append(f"at most {self.most:g}")
        return f"must be a finite number {' and '.join(rules)}".rstrip()


@dataclass(frozen=True, slots=True)
class Flag:
    default: bool

    def check(self, value: Any) -> str | None:
        """The rule, if `value` breaks it."""
        return None if isinstance(value, bool) else "must be true or false"


Parameter = Number | Flag


Advantage = Literal[
    "grpo", "dr-grpo", "grpo-passk", "rloo", "leave-one-out", "maxrl", "opo", "gpg",
    "reinforce++", "reinforce++-baseline", "spo",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimator:
    """An advantage estimator.

    needs_group  it compares the samples of one prompt and refuses a group of fewer than two
    needs_value  it takes a baseline from outside (`values`), a number a sample
    per_token    each trained token has a return of its own; else a sample or a turn has one
    whitens      it normalises over the step's trained tokens and refuses fewer than two
    least        of a reward; less is refused
    parameters   by keyword, with their defaults
    """

    needs_group: bool = False
    needs_value: bool = False
    per_token: bool = False
    whitens: bool = False
    least: float = -math.inf
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


_EPSILON: Final = {"epsilon": Number(default=1e-6, least=0.0, above=True)}

ESTIMATORS: Final[Mapping[str, Estimator]] = {
    "grpo": Estimator(needs_group=True, parameters=_EPSILON),
    "dr-grpo": Estimator(needs_group=True),
    "grpo-passk": Estimator(needs_group=True, parameters={**_EPSILON, "normalise": Flag(True)}),
    "rloo": Estimator(needs_group=True),
    "leave-one-out": Estimator(needs_group=True, parameters=_EPSILON),
    "maxrl": Estimator(needs_group=True, least=0.0, parameters=_EPSILON),
    "opo": Estimator(),
    "gpg": Estimator(parameters={"f_norm": Number(default=1.0, least=0.0, above=True)}),
    "reinforce++": Estimator(
        per_token=True,
        whitens=True,
        parameters={"gamma": Number(default=1.0, least=0.0, most=1.0)},
    ),
    "reinforce++-baseline": Estimator(whitens=True),
    "spo": Estimator(needs_value=True),
}
"""By the name in `trainer.advantage`; each one's formula and paper: trainer/estimators.py."""


def estimator(name: str, parameters: Mapping[str, Any]) -> Estimator:
    """The one of that name, which takes these parameters. ValueError, one line, for an unknown name
    or parameter (with the nearest known one) or a value that breaks its rule (with the rule)."""
    found = ESTIMATORS.get(name)
    if found is None:
        raise ValueError(f"unknown advantage {name!r}{nearest(name, ESTIMATORS)}")
    check_parameters(name, found.parameters, parameters)
    return found


def check_parameters(
    name: str, known: Mapping[str, Parameter], parameters: Mapping[str, Any]
) -> None:
    """ValueError, one line, for a parameter that `name` does not know or a value it refuses."""
    for key, value in parameters.items():
        if key not in known:
            raise ValueError(f"{name}: unknown parameter {key!r}{nearest(key, known)}")
        if rule := known[key].check(value):
            raise ValueError(f"{name}: {key} {rule}, got {value!r}")


def nearest(word: str, known: Iterable[str]) -> str:
    """', did you mean X?' for the closest of `known`, or else all of them."""
    names = sorted(known)
    if not names:
        return ": it takes none"
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.4)
    return f", did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"
