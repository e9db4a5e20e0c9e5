"""A value of each prompt that outlives its rollouts: rewards enter, one by one, a baseline leaves.

SPO (arXiv:2509.13232) keeps for each prompt the two counts of a Beta distribution over its success,
and lets old evidence fade as the policy moves away from the one that gathered it:

    value   alpha / (alpha + beta), before the reward it is to be compared with goes in
    rho     2 ** (-D / half_life) within [rho_min, rho_max], D the KL since the prompt's last reward
    alpha <- rho * alpha + r        beta <- rho * beta + (1 - r)

A prompt never seen has alpha = beta = 1/2. The tracker is a pure fold like a staleness policy:
rules here, state outside, JSON in and out without the loss of a bit. It also scores its own
predictions, each against the reward that came after it, by labels of the caller's choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec


class Belief(msgspec.Struct, frozen=True, array_like=True):
    """The counts of a Beta distribution."""

    alpha: float = 0.5
    beta: float = 0.5

    @property
    def mean(self) -> float:
        return self.alpha / (self.alpha + self.beta)


class Score(msgspec.Struct, frozen=True, array_like=True):
    """Of predictions, in units of a reward mapped to [0, 1], each made before its reward was known
    (prequential)."""

    num: int = 0
    sum_squared: float = 0.0
    sum_absolute: float = 0.0

    @property
    def brier(self) -> float:
        """Mean squared error; NaN without predictions. Saying 1/2 of a 0/1 reward scores 1/4."""
        return self.sum_squared / self.num if self.num else math.nan

    @property
    def absolute(self) -> float:
        """Mean absolute error; NaN without predictions."""
        return self.sum_absolute / self.num if self.num else math.nan


class TrackerState(msgspec.Struct, frozen=True):
    """beliefs by prompt; scores by label."""

    beliefs: dict[str, Belief] = {}
    scores: dict[str, Score] = {}


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One reward of one prompt.

    kl     of the policy that earned it from the one that earned the prompt's last, at least 0; 0
           for a prompt never seen
    label  whose score the prediction counts in; None: nobody's
    """

    key: str
    reward: float
    kl: float = 0.0
    label: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueTracker:
    """The rules; the defaults are the paper's.

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

    def __post_init__(self) -> None:
        if not 0 < self.half_life < math.inf:
            raise ValueError(f"half_life must be above 0, got {self.half_life}")
        if not 0 <= self.rho_min <= self.rho_max <= 1:
            raise ValueError(
                "0 <= rho_min <= rho_max <= 1 must hold, "
                f"got rho_min = {self.rho_min}, rho_max = {self.rho_max}"
            )
        if not -math.inf < self.low < self.high < math.inf:
            raise ValueError(f"low must be below high, got {self.low}, {self.high}")

    def start(self) -> TrackerState:
        """Nothing seen."""
        return TrackerState()

    def value(self, state: TrackerState, key: str) -> float:
        """The baseline of that prompt's next reward, in the reward's own units."""
        return self.low + state.beliefs.get(key, Belief()).mean * (self.high - self.low)

    def rho(self, kl: float) -> float:
        """How much earlier evidence still counts; ValueError for a KL below 0 or not finite."""
        if not 0 <= kl < math.inf:
            raise ValueError(f"the KL must be finite and at least 0, got {kl}")
        return min(max(math.pow(2.0, -kl / self.half_life), self.rho_min), self.rho_max)

    def update(
        self,
        state: TrackerState,
        key: str,
        reward: float,
        kl: float = 0.0,
        label: str | None = None,
    ) -> TrackerState:
        """`state` with one reward more; ValueError for a reward outside [low, high]."""
        return self.update_all(state, [Observation(key=key, reward=reward, kl=kl, label=label)])

    def update_all(self, state: TrackerState, observations: Iterable[Observation]) -> TrackerState:
        """As `update` of each in turn, and the state is copied once."""
        beliefs, scores = dict(state.beliefs), dict(state.scores)
        for seen in observations:
            before = beliefs.get(seen.key, Belief())
            reward, rho = self._mapped(seen), self.rho(seen.kl)
            if seen.label is not None:
                scores[seen.label] = _scored(scores.get(seen.label, Score()), before.mean - reward)
            beliefs[seen.key] = Belief(
                rho * before.alpha + reward, rho * before.beta + (1.0 - reward)
            )
        return TrackerState(beliefs, scores)

    def _mapped(self, seen: Observation) -> float:
        if not self.low <= seen.reward <= self.high:
            raise ValueError(
                f"{seen.key}: the reward must be between {self.low:g} and {self.high:g}, "
                f"got {seen.reward}"
            )
        return (seen.reward - self.low) / (self.high - self.low)


def _scored(score: Score, error: float) -> Score:
    return Score(score.num + 1, score.sum_squared + error * error, score.sum_absolute + abs(error))
