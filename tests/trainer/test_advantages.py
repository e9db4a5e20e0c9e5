"""Advantages against values derived by hand and an independent float64 reference."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch

from trainer.advantages import advantage, homogeneous_share


def reference(rewards: list[float], groups: list[int]) -> list[float]:
    """Group-normalised rewards with the standard library's sample deviation."""
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        result.append((reward - statistics.fmean(members)) / (statistics.stdev(members) + 1e-6))
    return result


def test_two_samples_of_reward_zero_and_one_by_hand() -> None:
    # mean 1/2, sample std sqrt(1/2): +-(1/2) / (0.70710678 + 1e-6)
    got = advantage("grpo", np.array([0.0, 1.0]), np.array([7, 7]), np.ones((2, 3)))
    expected = 0.5 / (0.5**0.5 + 1e-6)
    np.testing.assert_allclose(got, [[-expected] * 3, [expected] * 3], rtol=1e-12)


def test_mixed_group_sizes_interleaved_rows_and_masks_in_mid_sequence() -> None:
    rng = np.random.default_rng(0)
    groups = [3, 9, 3, 9, 9, 3, 1, 1]
    rewards = rng.normal(size=8).tolist()
    mask = rng.integers(0, 2, (8, 5))
    got = advantage("grpo", np.array(rewards), np.array(groups), mask)
    expected = np.array(reference(rewards, groups))[:, None] * mask
    np.testing.assert_allclose(got, expected, rtol=1e-10)
    assert got.dtype == np.float64


def test_rows_of_different_lengths_come_back_as_they_came() -> None:
    masks = [np.array([0, 1]), np.array([0, 1, 0, 1])]
    got = advantage("grpo", np.array([1.0, 3.0], np.float32), np.array([0, 0]), masks)
    assert [row.dtype for row in got] == [np.float32, np.float32]
    # mean 2, sample std sqrt(2)
    value = 1 / (2**0.5 + 1e-6)
    np.testing.assert_allclose(got[0], [0, -value], rtol=1e-6)
    np.testing.assert_allclose(got[1], [0, value, 0, value], rtol=1e-6)


def test_torch_in_torch_out() -> None:
    rewards, groups = torch.tensor([0.0, 1.0, 5.0]), torch.tensor([4, 4, 4])
    mask = torch.tensor([[1, 1], [0, 1], [1, 0]])
    got = advantage("grpo", rewards, groups, mask)
    assert isinstance(got, torch.Tensor)
    assert got.dtype == torch.float32
    expected = advantage("grpo", rewards.double().numpy(), groups.numpy(), mask.numpy())
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6)


def test_a_homogeneous_group_has_exactly_no_signal() -> None:
    # The mean of three times 0.1 is not 0.1 in floating point; over epsilon that would be a signal.
    rewards = np.array([0.1, 0.1, 0.1, 0.0, 1.0])
    got = advantage("grpo", rewards, np.array([0, 0, 0, 1, 1]), np.ones((5, 1)))
    assert got[:3].tolist() == [[0.0]] * 3
    assert got[4, 0] > 0


def test_branches_of_one_sample_count_once() -> None:
    rewards = np.array([1.0, 1.0, 1.0, 0.0, 0.0])
    groups = np.zeros(5, int)
    samples = np.array([0, 0, 0, 1, 2])  # three branches of one sample, two samples of one row
    got = advantage("grpo", rewards, groups, np.ones((5, 1)), samples=samples)
    alone = advantage("grpo", np.array([1.0, 0.0, 0.0]), np.zeros(3, int), np.ones((3, 1)))
    np.testing.assert_array_equal(got[:, 0], alone[[0, 0, 0, 1, 2], 0])


def test_equal_sample_numbers_in_different_groups_are_different_samples() -> None:
    rewards, groups = np.array([1.0, 0.0, 0.0, 1.0]), np.array([0, 0, 1, 1])
    samples = np.array([0, 1, 0, 1])
    mask = np.ones((4, 1))
    np.testing.assert_array_equal(
        advantage("grpo", rewards, groups, mask, samples=samples),
        advantage("grpo", rewards, groups, mask),
    )


def test_one_token_may_be_all_a_row_has() -> None:
    got = advantage("grpo", np.array([0.0, 1.0]), np.array([0, 0]), np.array([[1], [0]]))
    assert np.isfinite(got).all()
    assert got[1, 0] == 0


@pytest.mark.parametrize(
    ("rewards", "groups", "samples", "message"),
    [
        ([1.0, 0.0, 1.0], [5, 5, 6], None, "group 6 has one sample"),
        ([1.0, float("nan")], [2, 2], None, r"row 1 \(group 2\) is nan"),
        ([float("inf"), 0.0], [2, 2], None, r"row 0 \(group 2\) is inf"),
        ([1.0, 0.0], [2, 2], [0, 0], "rows 0 and 1 are branches of sample 0 of group 2"),
        ([1.0, 0.0], [2], None, "differ in length: 2, 1, 2, 2"),
    ],
)
def test_what_cannot_be_used_is_named(
    rewards: list[float], groups: list[int], samples: list[int] | None, message: str
) -> None:
    ids = None if samples is None else np.array(samples)
    mask = np.ones((len(rewards), 2))
    with pytest.raises(ValueError, match=message):
        advantage("grpo", np.array(rewards), np.array(groups), mask, samples=ids)


def test_an_unknown_estimator_is_answered_with_the_nearest_known_one() -> None:
    with pytest.raises(ValueError, match="unknown advantage 'grop', did you mean 'grpo'"):
        advantage("grop", np.zeros(2), np.zeros(2), np.ones((2, 1)))


def test_the_share_of_homogeneous_groups_is_p_to_the_g_plus_its_opposite() -> None:
    # Success rate 1/2, groups of 2: a quarter both right, a quarter both wrong.
    rewards = np.array([0, 0, 0, 1, 1, 0, 1, 1])
    assert homogeneous_share(rewards, np.repeat(range(4), 2)) == 0.5
    assert homogeneous_share(np.array([]), np.array([])) == 0.0
