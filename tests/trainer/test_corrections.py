"""Correction weights, keep masks and the proximal policy: by hand and against loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer import loss_reference as reference
from trainer.ages import UNKNOWN
from trainer.corrections import CORRECTIONS, LEVELS, REJECTIONS, kept, proximal, weights
from trainer.trained import Trained

# Two rows and one without a token between them: log r of (2, 1/2) and of (3, 3).
LOG_2, LOG_3 = math.log(2), math.log(3)
GAPS = torch.tensor([LOG_2, -LOG_2, LOG_3, LOG_3], dtype=torch.float64)
TRAINED = Trained.of_rows(torch.tensor([0, 0, 2, 2]), 3)


def about(values: Any) -> list[Any]:
    return [pytest.approx(v) for v in values.double().tolist()]


@pytest.mark.parametrize(
    ("correction", "level", "expected"),
    [
        ("none", "token", [1, 1, 1, 1]),
        ("tis", "token", [2, 0.5, 2.5, 2.5]),
        ("tis", "sequence", [1, 1, 2.5, 2.5]),  # products 1 and 9
        ("tis", "geometric", [1, 1, 2.5, 2.5]),  # geometric means 1 and 3
        ("icepop", "token", [2, 0, 0, 0]),  # the band is [0.8, 2.5]
        ("icepop", "sequence", [1, 1, 0, 0]),
        ("icepop", "geometric", [1, 1, 0, 0]),
        ("mis", "token", [2, 0, 0, 0]),
        ("mis", "sequence", [2, 0.5, 0, 0]),  # a kept row's tokens have their own
        ("mis", "geometric", [2, 0.5, 0, 0]),
    ],
)
def test_weights_by_hand(correction: str, level: str, expected: list[float]) -> None:
    found = weights(correction, GAPS, TRAINED, level=level, low=0.8, cap=2.5)
    assert expected == about(found.weight)
    capped = [correction == "tis" and w == 2.5 for w in expected]
    assert found.capped.tolist() == capped
    assert found.masked.tolist() == [w == 0 for w in expected]
    assert not found.clamped.any()


def test_the_band_of_icepop_and_mis_holds_its_ends() -> None:
    for correction in ("icepop", "mis"):
        at_ends = weights(correction, GAPS, TRAINED, low=0.5, cap=3.0)
        assert about(at_ends.weight) == [2, 0.5, 3, 3]
        from_zero = weights(correction, GAPS, TRAINED, low=0.0, cap=2.0)
        assert about(from_zero.weight) == [2, 0.5, 0, 0]


@pytest.mark.parametrize(
    ("rejection", "level", "high", "expected"),
    [
        ("none", "token", 2.5, [1, 1, 1, 1]),
        ("k1", "token", 2.5, [1, 0, 0, 0]),
        ("k1", "sequence", 2.5, [1, 1, 0, 0]),
        ("k1", "sequence", 9.1, [1, 1, 1, 1]),
        ("k1", "geometric", 3.1, [1, 1, 1, 1]),
        # (log 2)^2 / 2 = 0.2402, (log 3)^2 / 2 = 0.6035
        ("k2", "token", 0.3, [1, 1, 0, 0]),
        ("k2", "sequence", 0.48, [0, 0, 0, 0]),
        ("k2", "sequence", 0.49, [1, 1, 0, 0]),
        ("k2", "geometric", 0.61, [1, 1, 1, 1]),
        # 2 - 1 - log 2 = 0.3069, 1/2 - 1 + log 2 = 0.1931, 3 - 1 - log 3 = 0.9014
        ("k3", "token", 0.2, [0, 1, 0, 0]),
        ("k3", "sequence", 0.51, [1, 1, 0, 0]),
        ("k3", "geometric", 0.24, [0, 0, 0, 0]),
        ("k3", "geometric", 0.91, [1, 1, 1, 1]),
    ],
)
def test_what_a_rejection_keeps_by_hand(
    rejection: str, level: str, high: float, expected: list[int]
) -> None:
    found = kept(rejection, GAPS, TRAINED, level=level, low=0.8, high=high)
    assert found.tolist() == [bool(keep) for keep in expected]


@pytest.mark.parametrize("level", sorted(LEVELS))
@pytest.mark.parametrize("seed", range(4))
def test_weights_and_keep_masks_equal_the_loops(level: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = np.repeat(np.arange(6), rng.integers(0, 7, 6))
    gaps = rng.normal(scale=0.4, size=len(rows))
    trained, given = Trained.of_rows(torch.from_numpy(rows), 6), torch.from_numpy(gaps)
    for row in range(6):
        of_row, at = gaps[rows == row].tolist(), torch.from_numpy(rows == row)
        if not of_row:
            continue
        for correction in CORRECTIONS:
            found = weights(correction, given, trained, level=level, low=0.7, cap=1.3).weight
            expected = reference.weights(correction, of_row, level, 0.7, 1.3)
            assert found[at].tolist() == pytest.approx(expected)
        for rejection, high in zip(REJECTIONS, (1.0, 1.2, 0.08, 0.1), strict=True):
            keep = kept(rejection, given, trained, level=level, low=0.8, high=high)
            assert keep[at].tolist() == reference.keeps(rejection, of_row, level, 0.8, high)


def test_a_long_row_survives_its_geometric_mean_and_not_its_product() -> None:
    # 1.01 ^ 200 = 7.3: at a band of [1/2, 2] the product rejects what the mean keeps.
    gaps, row = torch.full((200,), math.log(1.01)), torch.zeros(200, dtype=torch.int64)
    assert not kept("k1", gaps, Trained.of_rows(row, 1), level="sequence").any()
    assert kept("k1", gaps, Trained.of_rows(row, 1), level="geometric").all()
    assert kept("k1", gaps[:50], Trained.of_rows(row[:50], 1), level="sequence").all()


def test_loglinear_interpolates_by_age() -> None:
    # Of age 3, a = 3/4; of 1, a = 1/2; of 0, ahead or unknown, a = 0: the behaviour's.
    behaviour = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0])
    current = torch.tensor([-1.5, -2.2, -3.5, -4.5, -5.5, -6.5], requires_grad=True)
    ages = torch.tensor([3, 1, 0, 0, -3, UNKNOWN], dtype=torch.int32)
    found = proximal("loglinear", current, behaviour, ages=ages)
    torch.testing.assert_close(found, torch.tensor([-1.375, -2.1, -3.0, -4.0, -5.0, -6.0]))
    assert not found.requires_grad
    with pytest.raises(ValueError, match="proximal 'loglinear': the ages of the tokens are"):
        proximal("loglinear", current, behaviour)


def test_the_other_proximal_policies_are_what_they_say_without_gradient() -> None:
    current = torch.tensor([-1.0], requires_grad=True)
    behaviour, again = current * 2, current * 3
    kinds = {"reuse": -1.0, "behaviour": -2.0, "recompute": -3.0}
    for kind, value in kinds.items():
        found = proximal(kind, current, behaviour, recomputed=again)
        assert found.item() == value
        assert not found.requires_grad
    with pytest.raises(ValueError, match="proximal 'recompute': its log-probs are missing"):
        proximal("recompute", current, behaviour)
    with pytest.raises(ValueError, match="unknown proximal 'old'; known: behaviour, loglinear"):
        proximal("old", current, behaviour)


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown correction 'cap'; known: icepop, mis, none, tis"):
        weights("cap", GAPS, TRAINED)
    with pytest.raises(ValueError, match="unknown rejection 'k4'; known: k1, k2, k3, none"):
        kept("k4", GAPS, TRAINED)
    with pytest.raises(ValueError, match=r"band of ratios .* \[0.5, 0.1\]"):
        kept("k1", GAPS, TRAINED, high=0.1)
