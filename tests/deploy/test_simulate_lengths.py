"""Length distributions: their means against samples, their limits, what makes none."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest

from deploy.simulate.lengths import (
    KINDS,
    Bimodal,
    Fixed,
    Lengths,
    Lognormal,
    PowerLaw,
    Trace,
    Uniform,
)

EXAMPLES: list[Lengths] = [
    Fixed(tokens=700),
    Uniform(least=1, most=9),
    Bimodal(short=100, long=4_000, share_long=0.1),
    Lognormal(mu=6.5, sigma=1.0, most=16_000),
    Lognormal(mu=6.5, sigma=1.4, most=2_000),
    Lognormal(mu=math.log(1 / 4), sigma=1.0, most=1),
    Lognormal(mu=math.log(3 / 4), sigma=1.0, most=3),
    Lognormal(mu=math.log(1500), sigma=1.0, most=6_000),
    PowerLaw(least=1, alpha=1.2, most=2_000),
    PowerLaw(least=50, alpha=1.5, most=10_000),
    PowerLaw(least=50, alpha=1.0, most=10_000),
    PowerLaw(least=50, alpha=0.5, most=10_000),
    Trace(tokens=(5, 5, 900)),
]


@pytest.mark.parametrize("lengths", EXAMPLES, ids=repr)
def test_the_mean_is_that_of_the_samples_and_nothing_is_longer_than_the_longest(
    lengths: Lengths,
) -> None:
    drawn = lengths.sample(np.random.default_rng(7), 400_000)
    error = drawn.std() / 400_000**0.5
    assert abs(drawn.mean() - lengths.mean()) <= 4 * error
    assert drawn.dtype == np.int64
    assert drawn.min() >= 1
    assert drawn.max() == lengths.longest


def test_the_mean_is_that_of_whole_lengths_also_where_all_are_short() -> None:
    """2 from 3/2 on: 1 + P(X > 3/2); for the power law up to 3, 1 + P(X > 3/2) + P(X > 5/2)."""
    normal = 1 + (1 - math.erf(math.log(1.5) / math.sqrt(2))) / 2
    assert Lognormal(mu=0.0, sigma=1.0, most=2).mean() == pytest.approx(normal)
    law = PowerLaw(least=1, alpha=2.0, most=3)
    assert law.mean() == pytest.approx(1 + 1 / 1.5**2 + 1 / 2.5**2)


def test_every_kind_has_an_example() -> None:
    assert {type(lengths) for lengths in EXAMPLES} == set(KINDS.values())


def test_the_power_law_has_its_exponent() -> None:
    drawn = PowerLaw(least=100, alpha=2.0, most=100_000).sample(np.random.default_rng(1), 200_000)
    assert np.mean(drawn > 200) == pytest.approx(1 / 4, abs=0.01)  # (100 / 200)^2
    assert np.mean(drawn > 1000) == pytest.approx(1 / 100, abs=0.002)


def test_a_trace_gives_its_own_lengths_as_often_as_they_are_in_it() -> None:
    drawn = Trace(tokens=(5, 5, 900)).sample(np.random.default_rng(1), 30_000)
    assert set(drawn.tolist()) == {5, 900}
    assert np.mean(drawn == 5) == pytest.approx(2 / 3, abs=0.02)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fixed(tokens=0), "tokens must be at least 1, got 0"),
        (lambda: Uniform(least=5, most=4), "needs 1 <= least <= most"),
        (lambda: Bimodal(short=5, long=4, share_long=0.5), "needs 1 <= short <= long"),
        (lambda: Bimodal(short=1, long=4, share_long=1.5), "share_long must be in [0, 1], got 1.5"),
        (lambda: Lognormal(mu=1.0, sigma=0.0, most=9), "sigma must be finite and above 0, got 0.0"),
        (lambda: Lognormal(mu=math.nan, sigma=1.0, most=9), "mu must be finite, got nan"),
        (lambda: Lognormal(mu=1.0, sigma=1.0, most=0), "most must be at least 1, got 0"),
        (lambda: PowerLaw(least=0, alpha=1.0, most=9), "needs 1 <= least <= most"),
        (lambda: PowerLaw(least=1, alpha=0.0, most=9), "alpha must be finite and above 0, got 0.0"),
        (lambda: PowerLaw(least=1, alpha=math.inf, most=9), "alpha must be finite and above 0"),
        (lambda: Trace(tokens=()), "a trace needs at least one length"),
        (lambda: Trace(tokens=(3, 0)), "a length must be at least 1, got 0"),
    ],
)
def test_what_makes_no_distribution_is_refused(make: Callable[[], Lengths], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
