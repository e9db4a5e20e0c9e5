"""Advantages against values derived by hand and an independent float64 reference."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.algorithms import ESTIMATORS
from trainer.advantages import advantage


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


# ------------------------------------------------------------------ turns and token rewards
def turn_values(
    rewards: list[float], token_rewards: list[list[float]], turns: list[list[int]], discount: float
) -> list[dict[int, float]]:
    """Each row's turns and their discounted returns, in loops; a sample is a row."""
    result = []
    for reward, parts, of in zip(rewards, token_rewards, turns, strict=True):
        numbers = sorted({k for k in of if k >= 0})
        earned = {k: sum(p for p, j in zip(parts, of, strict=True) if j == k) for k in numbers}
        earned[numbers[-1]] += reward - sum(earned.values())
        result.append(
            {
                k: sum(discount ** (j - i) * earned[numbers[j]] for j in range(i, len(numbers)))
                for i, k in enumerate(numbers)
            }
        )
    return result


def test_a_turn_s_value_is_its_discounted_return_by_hand() -> None:
    # Row 0: turns of reward 1 and 2 of 3 in all; row 1: one turn of 5. Discount 1/2.
    # Values 1 + 2/2 = 2, 2 and 5: mean 3.
    masks = [np.array([0, 1, 1, 0, 1]), np.array([0, 0, 1])]
    got = advantage(
        "dr-grpo",
        np.array([3.0, 5.0]),
        np.array([0, 0]),
        masks,
        token_rewards=[np.array([0, 0, 1.0, 0, 0]), np.zeros(3)],
        turns=[np.array([-1, 0, 0, 0, 1]), np.array([-1, -1, 0])],
        discount=0.5,
    )
    np.testing.assert_array_equal(got[0], [0, -1, -1, 0, -1])
    np.testing.assert_array_equal(got[1], [0, 0, 2])


@pytest.mark.parametrize("discount", [0.0, 0.9, 1.0])
def test_turns_of_a_group_are_compared_with_each_other(discount: float) -> None:
    rng = np.random.default_rng(2)
    rewards, groups = rng.normal(size=5).tolist(), [4, 4, 4, 8, 8]
    turns = [[-1, 0, 0, -1, 1, 1, 2], [-1, 0, 1], [-1, -1, 0, 0], [0, 1, 2, 3], [-1, 5, 7]]
    parts = [[float(rng.normal()) if k >= 0 else 0.0 for k in of] for of in turns]
    masks = [np.array([k >= 0 for k in of]) for of in turns]
    got = advantage(
        "grpo",
        np.array(rewards),
        np.array(groups),
        masks,
        token_rewards=[np.array(p) for p in parts],
        turns=[np.array(of) for of in turns],
        discount=discount,
    )
    values = turn_values(rewards, parts, turns, discount)
    for row, of in enumerate(turns):
        members = [v for r, g in enumerate(groups) if g == groups[row] for v in values[r].values()]
        mean, std = statistics.fmean(members), statistics.stdev(members)
        expected = [(values[row][k] - mean) / (std + 1e-6) if k >= 0 else 0 for k in of]
        np.testing.assert_allclose(got[row], expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.floats(-2, 2), min_size=6, max_size=6),
    reward=st.floats(-2, 2),
    of=st.lists(st.integers(-1, 2), min_size=6, max_size=6).filter(lambda of: max(of) >= 0),
)
def test_the_first_turn_is_worth_the_whole_reward_however_it_is_split(
    parts: list[float], reward: float, of: list[int]
) -> None:
    mask = np.array([[k >= 0 for k in of], [True] * 6])
    got = advantage(
        "dr-grpo",
        np.array([reward, 0.0]),
        np.array([0, 0]),
        mask,
        token_rewards=np.array([parts, [0.0] * 6]),
        turns=np.array([of, [0] * 6]),
    )
    first, other = got[0][of.index(min(k for k in of if k >= 0))], got[1][0]
    np.testing.assert_allclose(first - other, reward, atol=1e-9)


def test_branches_that_share_a_turn_are_one_unit() -> None:
    # Sample 0 has two branches: turn 0 in both, turn 1 in the second; sample 1 has one turn.
    # Values: 1, 1 (nothing but the outcome) and 0: mean 2/3, not that of four rows' worth.
    got = advantage(
        "dr-grpo",
        np.array([1.0, 1.0, 0.0]),
        np.array([0, 0, 0]),
        [np.array([1, 0]), np.array([0, 0, 1]), np.array([1])],
        samples=np.array([0, 0, 1]),
        turns=[np.array([0, 0]), np.array([0, -1, 1]), np.array([0])],
    )
    np.testing.assert_allclose(got[0], [1 / 3, 0])
    np.testing.assert_allclose(got[1], [0, 0, 1 / 3])
    np.testing.assert_allclose(got[2], [-2 / 3])


def test_one_turn_a_sample_and_no_discount_is_as_without_turns() -> None:
    rng = np.random.default_rng(3)
    rewards, groups = rng.normal(size=6), np.array([0, 0, 0, 1, 1, 1])
    mask = rng.integers(0, 2, (6, 4))
    mask[:, 0] = 1
    for name in ("grpo", "rloo", "opo", "gpg", "reinforce++-baseline", "leave-one-out"):
        np.testing.assert_array_equal(
            advantage(name, rewards, groups, mask, turns=np.zeros((6, 4), int)),
            advantage(name, rewards, groups, mask),
        )


def test_no_rows_have_no_advantages() -> None:
    none = np.zeros(0)
    assert advantage("gpg", none, none, []) == []
    assert advantage("gpg", none, none, [], turns=[]) == []
    assert advantage("grpo", none, none, np.zeros((0, 3))).shape == (0, 3)


def test_token_returns_skip_what_is_masked_and_carry_what_was_earned_on_the_way() -> None:
    # Rewards 1 at token 1, 8 at the masked token 2 (so at the end), 2 left of 11: trained tokens
    # earn 1, 10 and return 1 + 10/2 and 10. Row 1: 0 and 0.
    got = advantage(
        "reinforce++",
        np.array([11.0, 0.0]),
        np.array([0, 1]),
        np.array([[0, 1, 0, 1], [1, 1, 0, 0]]),
        token_rewards=np.array([[0, 1.0, 8.0, 0], [0, 0, 0, 0]]),
        gamma=0.5,
    )
    returns = [6.0, 10.0, 0.0, 0.0]
    mean, variance = 4.0, (4 + 36 + 16 + 16) / 3
    white = [(x - mean) / (variance + 1e-8) ** 0.5 for x in returns]
    np.testing.assert_allclose(got, [[0, white[0], 0, white[1]], [white[2], white[3], 0, 0]])


def test_every_estimator_answers_torch_as_numpy_and_zero_where_masked() -> None:
    rng = np.random.default_rng(4)
    rewards, groups = rng.random(6), np.array([0, 0, 0, 1, 1, 1])
    mask, values = rng.integers(0, 2, (6, 5)), rng.random(6)
    for name in ESTIMATORS:
        got = advantage(name, rewards, groups, mask, values=values)
        tensor = advantage(
            name,
            torch.from_numpy(rewards),
            torch.from_numpy(groups),
            torch.from_numpy(mask),
            values=torch.from_numpy(values),
        )
        assert tensor.dtype == torch.float64
        np.testing.assert_array_equal(tensor.numpy(), got)
        assert (got[mask == 0] == 0).all()
        if not ESTIMATORS[name].whitens:
            assert not advantage(name, rewards, groups, 0 * mask, values=values).any()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"turns": [[0, 0], [0, -1]]}, r"token 1 of row 1 \(b, group 2\) is trained but has no tu"),
        ({"turns": [[0, 0], [0]]}, r"turns of row 1 \(b, group 2\) has 1 tokens, its mask 2"),
        (
            {"turns": [[0, 0], [-1, -1]], "mask": [np.ones(2), np.zeros(2)]},
            "group 2 has one turn; grpo needs at least two",
        ),
        ({"turns": [[0, 0]]}, "turns of 1 rows, mask of 2"),
        ({"turns": [[0, 0], [0, 1]], "discount": 1.5}, "discount must be between 0 and 1, got 1.5"),
        ({"values": [0.0]}, "1 values for 2 rows"),
        ({"values": [0.0, float("nan")]}, r"the value of row 1 \(b, group 2\) is nan"),
        ({"samples": [0, 0], "rewards": [1.0, 1.0], "values": [0.0, 1.0]}, "their values differ"),
        ({"rewards": [1.0, float("nan")]}, r"the reward of row 1 \(b, group 2\) is nan"),
        ({"row_names": ["a"]}, "1 row_names for 2 rows"),
        (
            {"token_rewards": [[0.0, 0.0], [float("inf"), 0.0]]},
            r"the reward at token 0 of row 1 \(b, group 2\) is inf",
        ),
        ({"name": "reinforce++", "turns": [[0, 0], [0, 1]]}, "it takes no turns"),
    ],
)
def test_what_cannot_be_used_names_the_row(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "name": "grpo",
        "rewards": [1.0, 0.0],
        "groups": [2, 2],
        "mask": [np.ones(2), np.ones(2)],
        "row_names": ["a", "b"],
    } | changed
    with pytest.raises(ValueError, match=message):
        advantage(**given)
