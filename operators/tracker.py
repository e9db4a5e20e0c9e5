"""A value of each prompt that outlives its rollouts: rewards enter, one by one, a baseline leaves.

SPO (arXiv:2509.13232) keeps for each prompt the two counts of a Beta distribution over its success,
and lets old evidence fade as the policy moves away from the one that gathered it:

    value   alpha / (alpha + beta), before the reward it is to be compared with goes in
    rho     2 ** (-D / half_life) within [rho_min, rho_max], D the KL since the prompt's last reward
    alpha <- rho * alpha + r        beta <- rho * beta + (1 - r)

A prompt never seen has alpha = beta = 1/2.

D is not measured between those two policies, of which the older is gone, but from the path between
them: the KL is half the squared distance in the Fisher metric to second order, and no distance is
longer than a path, so the sum of sqrt(KL) over the steps, squared, bounds it from above. The sum of
the KLs would not: of n equal steps in one direction it is the n-th part of the whole.

The tracker is a pure fold like a staleness policy: rules here, state outside, JSON in and out
without the loss of a bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

import msgspec

MOST_PROMPTS: Final = 1_000_000
"""What is kept: beyond it the prompt whose last reward is the oldest is forgotten, that is, has
the value of one never seen."""
FARTHEST: Final = 1e6
"""KL of a step that moved the policy out of all bounds: no evidence before it is worth more than
rho_min."""


class Belief(msgspec.Struct, frozen=True, array_like=True):
    """The counts of a Beta distribution. `at`: how far the policy had come at the last reward."""

    alpha: float = 0.5
    beta: float = 0.5
    at: float = 0.0

    @property
    def mean(self) -> float:
        return self.alpha / (self.alpha + self.beta)


class TrackerState(msgspec.Struct, frozen=True):
    """beliefs  by prompt, the one whose last reward is the oldest first
    length   of the policy's path: how far it has come
    """

    beliefs: dict[str, Belief] = {}
    length: float = 0.0


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One reward of one prompt; with `before`, in place of one that was observed before, with that
    value."""

    key: str
    reward: float
    before: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueTracker:
    """The rules; the defaults are the paper's, what each may be says connectors/algorithms.py.

    half_life          the KL after which evidence counts half
    rho_min, rho_max   evidence counts at least and at most so much after each reward, so a belief
                       weighs at most 1 / (1 - rho_max) rewards
    low, high          bounds of the reward, mapped to [0, 1]
    """

    half_life: float = 0.06
    rho_min: float = 0.875
    rho_max: float = 0.96
    low: float = 0.0
    high: float = 1.0

    def value(self, state: TrackerState, key: str) -> float:
        """The baseline of that prompt's next reward, in the reward's own units."""
        return self.low + state.beliefs.get(key, Belief()).mean * (self.high - self.low)

    def rho(self, kl: float) -> float:
        """How much earlier evidence still counts."""
        return min(max(math.pow(2.0, -kl / self.half_life), self.rho_min), self.rho_max)

    def update(self, state: TrackerState, observations: Iterable[Observation]) -> TrackerState:
        """`state` with these rewards more, one by one; ValueError for one outside [low, high]. One
        that replaces another is no new evidence: what there is moves from failure to success, or
        back, by the difference, as far as there is any."""
        beliefs = dict(state.beliefs)
        for seen in observations:
            reward = self.mapped(seen.reward, seen.key)
            if seen.before is not None:
                if (known := beliefs.get(seen.key)) is not None:
                    by = reward - self.mapped(seen.before, seen.key)
                    by = min(max(by, -known.alpha), known.beta)
                    beliefs[seen.key] = Belief(known.alpha + by, known.beta - by, known.at)
                continue
            before = beliefs.pop(seen.key, Belief(at=state.length))
            rho = self.rho((state.length - before.at) ** 2)
            beliefs[seen.key] = Belief(
                rho * before.alpha + reward, rho * before.beta + (1.0 - reward), state.length
            )
        for key in list(islice(beliefs, max(0, len(beliefs) - MOST_PROMPTS))):
            del beliefs[key]
        return TrackerState(beliefs, state.length)

    def mapped(self, reward: float, key: str = "") -> float:
        """To [0, 1]; ValueError, naming the `key`, for one outside [low, high]."""
        if not self.low <= reward <= self.high:
            raise ValueError(
                f"{key}: the reward must be between {self.low:g} and {self.high:g}, got {reward}"
            )
        return (reward - self.low) / (self.high - self.low)


def moved(state: TrackerState, drift: float) -> TrackerState:
    """After a step that moved the policy by so much: the KL of the policy before it from the one
    after it, mean a token. Below 0 (an estimate may be, by rounding) it is none."""
    kl = drift if drift < FARTHEST else FARTHEST  # of what is no number too
    return TrackerState(state.beliefs, state.length + math.sqrt(max(kl, 0.0)))
