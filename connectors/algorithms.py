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


@dataclass(frozen=True, slots=True)
class Choice:
    default: str
    known: tuple[str, ...]

    def check(self, value: Any) -> str | None:
        """The rule, if `value` breaks it."""
        return None if value in self.known else f"must be one of {', '.join(self.known)}"


Parameter = Number | Flag | Choice


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


Loss = Literal["ppo", "gspo", "cispo", "dppo", "reinforce", "imitation"]
Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-norm", "prompt-mean"
]
Level = Literal["token", "sequence", "geometric"]
Correction = Literal["none", "tis", "icepop", "mis"]
Rejection = Literal["none", "k1", "k2", "k3"]
Proximal = Literal["recompute", "reuse", "loglinear", "behaviour"]
KL = Literal["k1", "k2", "k3", "low-variance"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """A policy loss.

    reads_proximal  it measures from the proximal policy; else only the correction does
    corrected       it takes a correction and a rejection
    parameters      by keyword, with their defaults
    """

    reads_proximal: bool = True
    corrected: bool = True
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


def _clip(low: float, high: float) -> dict[str, Parameter]:
    return {
        "clip_low": Number(default=low, least=0.0, most=1.0, above=True),
        "clip_high": Number(default=high, least=0.0, above=True),
    }


LOSSES: Final[Mapping[str, PolicyLoss]] = {
    "ppo": PolicyLoss(
        parameters={**_clip(0.2, 0.2), "dual_clip": Number(default=math.inf, least=1.0, above=True)}
    ),
    "gspo": PolicyLoss(parameters=_clip(3e-4, 4e-4)),
    "cispo": PolicyLoss(parameters=_clip(1.0, 4.0)),
    "dppo": PolicyLoss(
        parameters={
            "divergence": Choice("tv", ("tv", "kl")),
            "limit_low": Number(default=0.2, least=0.0, above=True),
            "limit_high": Number(default=0.2, least=0.0, above=True),
            "ratio_cap": Number(default=20.0, least=1.0),
        }
    ),
    "reinforce": PolicyLoss(reads_proximal=False),
    "imitation": PolicyLoss(reads_proximal=False, corrected=False),
}
"""By the name in `trainer.loss`; each one's formula and paper: trainer/surrogates.py."""


def policy_loss(name: str, parameters: Mapping[str, Any]) -> PolicyLoss:
    """As `estimator`."""
    found = LOSSES.get(name)
    if found is None:
        raise ValueError(f"unknown loss {name!r}{nearest(name, LOSSES)}")
    check_parameters(name, found.parameters, parameters)
    return found


def needs_behaviour(
    *,
    loss: str,
    proximal: str = "reuse",
    correction: str = "tis",
    rejection: str = "none",
) -> str | None:
    """What reads the log-probs of the policy that sampled, or None: then text nobody sampled can be
    trained on."""
    if correction != "none":
        return f"correction {correction!r}"
    if rejection != "none":
        return f"rejection {rejection!r}"
    if proximal in ("behaviour", "loglinear") and LOSSES[loss].reads_proximal:
        return f"proximal policy {proximal!r} of loss {loss!r}"
    return None


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
