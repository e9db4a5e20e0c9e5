"""The training mathematics by name: what each algorithm takes and needs, without torch.

One table for the configuration, which checks names and parameters before anything heavy is
imported, and for the trainer, whose functions a test holds to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

from connectors.parameters import Flag, Number, OneOf, Parameter, check, nearest

Advantage = Literal[
    "grpo", "dr-grpo", "grpo-passk", "rloo", "leave-one-out", "maxrl", "opo", "gpg",
    "reinforce++", "reinforce++-baseline", "spo",
]  # fmt: skip


MOST_REWARD: Final = 1e12
"""Magnitude of a reward, of a part of one and of a penalty. Advantages are taken into float32: so
far below its 3.4e38, no sum of a sample's parts, over the least `epsilon` or `f_norm`, leaves
it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimator:
    """An advantage estimator.

    needs_group  it compares the samples of one prompt and refuses a group of fewer than two
    needs_value  it takes a baseline from outside (`values`), a number a sample, which a run tracks
                 for each prompt
    per_token    each trained token has a return of its own; else a sample or a turn has one
    whitens      it normalises over the step's trained tokens and refuses fewer than two
    least        of a reward; less is refused
    parameters   by keyword, with their defaults
    tracker      those of the values it takes (operators/tracker.py)
    rule         the one over several of all these, if they break it
    """

    needs_group: bool = False
    needs_value: bool = False
    per_token: bool = False
    whitens: bool = False
    least: float = -math.inf
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    tracker: Mapping[str, Parameter] = field(default_factory=dict)
    rule: Callable[[Mapping[str, Any]], str | None] = lambda given: None


_TRACKER: Final[Mapping[str, Parameter]] = {
    "half_life": Number(0.06, above=True),
    "rho_min": Number(0.875, most=1.0),
    "rho_max": Number(0.96, most=1.0),
    "low": Number(0.0, least=-MOST_REWARD, most=MOST_REWARD),
    "high": Number(1.0, least=-MOST_REWARD, most=MOST_REWARD),
}


def _tracker_rule(given: Mapping[str, Any]) -> str | None:
    if given["rho_min"] > given["rho_max"]:
        return f"rho_min must be at most rho_max ({given['rho_max']}), got {given['rho_min']}"
    if np.float32(given["low"]) >= np.float32(given["high"]):  # as records hold rewards
        return f"low must be below high ({given['high']}), got {given['low']}"
    return None


_EPSILON: Final = {"epsilon": Number(1e-6, least=1e-12)}

ESTIMATORS: Final[Mapping[str, Estimator]] = {
    "grpo": Estimator(needs_group=True, parameters=_EPSILON),
    "dr-grpo": Estimator(needs_group=True),
    "grpo-passk": Estimator(needs_group=True, parameters={**_EPSILON, "normalise": Flag(True)}),
    "rloo": Estimator(needs_group=True),
    "leave-one-out": Estimator(needs_group=True, parameters=_EPSILON),
    "maxrl": Estimator(needs_group=True, least=0.0, parameters=_EPSILON),
    "opo": Estimator(),
    "gpg": Estimator(parameters={"f_norm": Number(1.0, least=1e-6)}),
    "reinforce++": Estimator(
        per_token=True,
        whitens=True,
        parameters={"gamma": Number(1.0, most=1.0)},
    ),
    "reinforce++-baseline": Estimator(whitens=True),
    "spo": Estimator(needs_value=True, tracker=_TRACKER, rule=_tracker_rule),
}
"""By the name in `trainer.advantage`; each one's formula and paper: trainer/estimators.py."""


def estimator(name: str, parameters: Mapping[str, Any]) -> Estimator:
    """The one of that name, which takes these parameters, those of its tracker too. ValueError, one
    line, for an unknown name or parameter (with the nearest known one) or a value that breaks its
    rule (with the rule)."""
    found = ESTIMATORS.get(name)
    if found is None:
        raise ValueError(f"unknown advantage {name!r}{nearest(name, ESTIMATORS)}")
    known = {**found.parameters, **found.tracker}
    _check(name, known, parameters)
    if broken := found.rule({key: parameters.get(key, p.default) for key, p in known.items()}):
        raise ValueError(f"{name}: {broken}")
    return found


def _check(name: str, known: Mapping[str, Parameter], parameters: Mapping[str, Any]) -> None:
    try:
        check(known, parameters)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


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
        "clip_low": Number(low, most=1.0, above=True),
        "clip_high": Number(high, above=True),
    }


LOSSES: Final[Mapping[str, PolicyLoss]] = {
    "ppo": PolicyLoss(
        parameters={**_clip(0.2, 0.2), "dual_clip": Number(math.inf, least=1.0, above=True)}
    ),
    "gspo": PolicyLoss(parameters=_clip(3e-4, 4e-4)),
    "cispo": PolicyLoss(parameters=_clip(1.0, 4.0)),
    "dppo": PolicyLoss(
        parameters={
            "divergence": OneOf(("tv", "kl"), "tv"),
            "limit_low": Number(0.2, above=True),
            "limit_high": Number(0.2, above=True),
            "ratio_cap": Number(20.0, least=1.0),
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
    _check(name, found.parameters, parameters)
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
