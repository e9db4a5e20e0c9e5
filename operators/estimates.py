"""Means with 95% confidence intervals, and pass@k: what an evaluation says of its prompts.

Values of single prompts enter, an `Estimate` leaves. The prompt is the unit: samples of one prompt
depend on each other, so they are averaged first and widen no interval's count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Final

from connectors.records import Estimate

LEVEL: Final = 0.95
Z: Final = 1.959963984540054
"""Quantile (1 + LEVEL) / 2 of the standard normal distribution."""


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Probability that at least one of k samples passes: 1 - C(n - c, k) / C(n, k), unbiased for
    any k <= n (arXiv:2107.03374, equation 1). ValueError for counts that make no sense."""
    if not 1 <= k <= num_samples or not 0 <= num_passed <= num_samples:
        raise ValueError(f"pass@{k} of {num_passed} passes among {num_samples} samples")
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of independent values. Its interval: Wilson's where every value is 0 or 1 (it has a
    width even where all are equal), else Student's t. One value that is neither: no interval."""
    if not values:
        raise ValueError("there is nothing to average")
    mean = fmean(values)
    if set(values) <= {0.0, 1.0}:
        return Estimate(mean, *wilson(round(sum(values)), len(values)))
    if len(values) == 1:
        return Estimate(mean)
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def wilson(num_passed: int, num_trials: int) -> tuple[float, float]:
    """The score interval of a share (Wilson 1927): all p with |p' - p| <= z sqrt(p (1 - p) / n),
    p' the share seen."""
    n, share = num_trials, num_passed / num_trials
    centre = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return centre - half if num_passed else 0.0, centre + half if num_passed < n else 1.0


def t_quantile(freedom: int) -> float:
    """t with P(|T| <= t) = LEVEL for Student's distribution of `freedom` >= 1 degrees of freedom,
    by bisection of its exact distribution."""
    low, high = 0.0, math.pi / 2  # in the angle atan(t / sqrt(freedom)) it is smooth and bounded
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _within(middle, freedom) < LEVEL else (low, middle)
    return math.tan(high) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """P(|T| <= sqrt(freedom) tan(angle)), a finite sum (Abramowitz and Stegun, 26.7.3 and
    26.7.4)."""
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for j in range(1 + odd, freedom, 2):
        total += term
        term *= square * j / (j + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def average(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of independent estimates, each weighing the same: distances to the limits add up as
    standard errors do (Zou and Donner 2008). One estimate stays as it is; without an interval of
    each, none."""
    n = len(estimates)
    mean = fmean(e.mean for e in estimates)
    below = [e.mean - e.low for e in estimates if e.low is not None]
    above = [e.high - e.mean for e in estimates if e.high is not None]
    if len(below) < n or len(above) < n:
        return Estimate(mean)
    return Estimate(mean, mean - math.hypot(*below) / n, mean + math.hypot(*above) / n)
