"""Intervals and pass@k against counting, tables and the definitions they solve."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.records import Estimate, decode_as, encode
from operators.estimates import Z, average, estimate, pass_at_k, t_quantile, wilson


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_choices_of_k_samples_that_hold_a_pass(
    n: int, data: st.DataObject
) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    choices = list(combinations([i < c for i in range(n)], k))
    assert pass_at_k(n, c, k) == pytest.approx(
        float(Fraction(sum(map(any, choices)), len(choices)))
    )


def test_pass_at_k_of_many_samples_stays_exact() -> None:
    assert pass_at_k(1000, 1, 500) == 0.5
    assert pass_at_k(5, 2, 3) == pytest.approx(0.9)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0)])
def test_counts_that_make_no_sense_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, c, k)


@given(st.integers(1, 500), st.data())
def test_wilsons_limits_are_those_shares_that_the_seen_one_is_z_errors_from(
    n: int, data: st.DataObject
) -> None:
    c = data.draw(st.integers(0, n))
    low, high = wilson(c, n)
    assert 0 <= low < high <= 1
    for p in (low, high):
        if 0 < p < 1:
            assert abs(c / n - p) == pytest.approx(Z * math.sqrt(p * (1 - p) / n), rel=1e-6)


def test_wilsons_interval_of_a_known_example() -> None:
    # Newcombe 1998, table I: 81 of 263
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)


@pytest.mark.parametrize(
    ("freedom", "table"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (7, 2.3646), (30, 2.0423),
     (127, 1.9788), (1000, 1.9623)],
)  # fmt: skip
def test_quantiles_of_students_t_are_those_of_the_tables(freedom: int, table: float) -> None:
    assert t_quantile(freedom) == pytest.approx(table, abs=5e-5)


def test_graded_rewards_get_students_interval_and_shares_wilsons() -> None:
    found = estimate([0.0, 0.5, 1.0])  # standard deviation 0.5
    assert found.low == pytest.approx(0.5 - 4.3027 * 0.5 / math.sqrt(3), abs=1e-4)
    assert found.high == pytest.approx(0.5 + 4.3027 * 0.5 / math.sqrt(3), abs=1e-4)
    assert estimate([0.0] * 8) == Estimate(0.0, *wilson(0, 8))
    assert estimate([0.0] * 8).high == pytest.approx(Z**2 / (8 + Z**2))
    assert estimate([0.3]) == Estimate(0.3)
    with pytest.raises(ValueError, match="nothing"):
        estimate([])


def test_an_average_of_estimates_is_as_sure_as_their_errors_together() -> None:
    one, other = Estimate(0.5, 0.2, 0.7), Estimate(0.25, -0.15, 0.35)
    found = average([one, other])
    assert found.mean == 0.375
    assert found.low == pytest.approx(0.375 - 0.5 / 2)  # distances 0.3 and 0.4: hypotenuse 0.5
    assert found.high == pytest.approx(0.375 + math.hypot(0.2, 0.1) / 2)
    alone = average([one])
    assert (alone.mean, alone.low, alone.high) == pytest.approx((0.5, 0.2, 0.7))
    assert average([one, Estimate(0.75)]) == Estimate(0.625)


def test_an_estimate_survives_the_log() -> None:
    found = {4: Estimate(0.5), 1: Estimate(0.25, 0.0, 1.0)}
    assert decode_as(encode(found), dict[int, Estimate]) == found
