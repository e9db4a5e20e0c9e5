"""How many tokens a trajectory has: distributions, all of them bounded.

`sample` draws n whole lengths of at least 1, each the nearest to what its distribution says; `mean`
is that of what it draws; `longest` is never exceeded. Parameters that make no distribution raise
ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

NEAR: Final = 1000
"""Tokens, from the least on: of longer ones rounding is nothing."""

Ints = NDArray[np.int64]


class Lengths(Protocol):
    @property
    def longest(self) -> int: ...

    def sample(self, rng: np.random.Generator, n: int) -> Ints: ...

    def mean(self) -> float: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Fixed:
    tokens: int

    def __post_init__(self) -> None:
        _require(self.tokens >= 1, f"tokens must be at least 1, got {self.tokens}")

    @property
    def longest(self) -> int:
        return self.tokens

    def sample(self, rng: np.random.Generator, n: int) -> Ints:
        return np.full(n, self.tokens, dtype=np.int64)

    def mean(self) -> float:
        return float(self.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Uniform:
    """Every length from `least` to `most` is as likely."""

    least: int
    most: int

    def __post_init__(self) -> None:
        _require(1 <= self.least <= self.most, f"needs 1 <= least <= most, got {self}")

    @property
    def longest(self) -> int:
        return self.most

    def sample(self, rng: np.random.Generator, n: int) -> Ints:
        return rng.integers(self.least, self.most, n, endpoint=True)

    def mean(self) -> float:
        return (self.least + self.most) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Bimodal:
    """`short`, or with chance `share_long` `long`."""

    short: int
    long: int
    share_long: float

    def __post_init__(self) -> None:
        _require(1 <= self.short <= self.long, f"needs 1 <= short <= long, got {self}")
        _require(0 <= self.share_long <= 1, f"share_long must be in [0, 1], got {self.share_long}")

    @property
    def longest(self) -> int:
        return self.long

    def sample(self, rng: np.random.Generator, n: int) -> Ints:
        return np.where(rng.random(n) < self.share_long, self.long, self.short)

    def mean(self) -> float:
        return self.short + self.share_long * (self.long - self.short)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lognormal:
    """exp of a normal variable of mean `mu` and deviation `sigma`, cut off at `most`."""

    mu: float
    sigma: float
    most: int

    def __post_init__(self) -> None:
        _require(math.isfinite(self.mu), f"mu must be finite, got {self.mu}")
        _require(0 < self.sigma < math.inf, f"sigma must be finite and above 0, got {self.sigma}")
        _require(self.most >= 1, f"most must be at least 1, got {self.most}")

    @property
    def longest(self) -> int:
        return self.most

    def sample(self, rng: np.random.Generator, n: int) -> Ints:
        return _whole(rng.lognormal(self.mu, self.sigma, n), self.most)

    def mean(self) -> float:
        return _whole_mean(1, self.most, self._above, lambda a, b: self._cut(b) - self._cut(a))

    def _above(self, x: float) -> float:
        return 1 - _normal_cdf((math.log(x) - self.mu) / self.sigma)

    def _cut(self, c: float) -> float:
        """E[min(X, c)] = exp(mu + s^2/2) P(Z < z - s) + c P(Z > z), z = (log c - mu)/s."""
        z = (math.log(c) - self.mu) / self.sigma
        below = math.exp(self.mu + self.sigma**2 / 2) * _normal_cdf(z - self.sigma)
        return below + c * self._above(c)


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerLaw:
    """Pareto: P(X > x) = (least/x)^alpha, cut off at `most`."""

    least: int
    alpha: float
    most: int

    def __post_init__(self) -> None:
        _require(1 <= self.least <= self.most, f"needs 1 <= least <= most, got {self}")
        _require(0 < self.alpha < math.inf, f"alpha must be finite and above 0, got {self.alpha}")

    @property
    def longest(self) -> int:
        return self.most

    def sample(self, rng: np.random.Generator, n: int) -> Ints:
        return _whole(self.least * (1 + rng.pareto(self.alpha, n)), self.most)

    def mean(self) -> float:
        return _whole_mean(self.least, self.most, self._above, self._area)

    def _above(self, x: float) -> float:
        return float((self.least / x) ** self.alpha)

    def _area(self, a: float, b: float) -> float:
        power = 1 - self.alpha
        unit = math.log(b / a) if power == 0 else ((b / a) ** power - 1) / power
        return a * self._above(a) * unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Each length as often as in `tokens`, drawn with replacement."""

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        _require(len(self.tokens) > 0, "a trace needs at least one length")
        _require(min(self.tokens) >= 1, f"a length must be at least 1, got {min(self.tokens)}")

    @property
    def longest(self) -> int:
        return max(self.tokens)

    def sample(self, rng: np.random.Generator, n: int) -> Ints:
        return rng.choice(np.asarray(self.tokens, dtype=np.int64), n)

    def mean(self) -> float:
        return sum(self.tokens) / len(self.tokens)


KINDS: Final[Mapping[str, type]] = {
    "fixed": Fixed,
    "uniform": Uniform,
    "bimodal": Bimodal,
    "lognormal": Lognormal,
    "power-law": PowerLaw,
    "trace": Trace,
}


def _whole(lengths: NDArray[np.float64], most: int) -> Ints:
    whole: Ints = np.clip(np.rint(np.minimum(lengths, most)), 1, most).astype(np.int64)
    return whole


def _whole_mean(
    least: int,
    most: int,
    above: Callable[[float], float],
    area: Callable[[float, float], float],
) -> float:
    """Of the whole number that is nearest to X, cut off at `least` and `most`: least plus the sum
    over k of P(X > k - 1/2); beyond NEAR terms it is the integral of P(X > x).

    above  P(X > x)
    area   its integral from one x to another
    """
    near = min(most, least + NEAR)
    return least + sum(above(k - 0.5) for k in range(least + 1, near + 1)) + area(near, most)


def _normal_cdf(z: float) -> float:
    return (1 + math.erf(z / math.sqrt(2))) / 2


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)
