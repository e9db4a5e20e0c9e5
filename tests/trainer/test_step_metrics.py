"""What a step reports of its loss: sums over micro-batches, divided by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trainer.ages import UNKNOWN
from trainer.batches import Rows
from trainer.losses import policy_loss
from trainer.step_metrics import Tally, row_metrics

LOG_2 = float(np.log(2))


def test_sums_of_micro_batches_become_shares_means_and_an_effective_share() -> None:
    """Weights 1, 2 (capped) and, by a rejection, 0: three tokens in two micro-batches."""
    tally = Tally()
    for gaps, ages in (([0.0, LOG_2 + 1], [0, 2]), ([-5.0], [0])):
        zeros, ones = torch.zeros(1, len(gaps)), torch.ones(1, len(gaps))
        _, metrics = policy_loss(
            "ppo", zeros, zeros, torch.tensor([gaps]).neg(), ones, ones,
            row_weights=np.array([1 / 3]), entropy=ones / 2,
            rejection="k1", rejection_level="token", rejection_low=0.1, rejection_high=10.0,
        )  # fmt: skip
        tally.add(metrics, torch.tensor(gaps), torch.tensor(ages))
    tally.minibatch(-1.0, 0.5)
    found = tally.summary()
    expected = {
        "loss": -1.0,
        "grad_norm": 0.5,
        "loss/weight_mean": 1.0,
        "loss/effective_share": 9 / 5 / 3,
        "loss/ratio_mean": 1.0,
        "loss/clipped_share": 0.0,
        "loss/clamped_share": 0.0,
        "loss/capped_share": 1 / 3,
        "loss/masked_share": 0.0,
        "loss/rejected_share": 1 / 3,
        "entropy": 0.5,
        # r - 1 - log r of r = 2e and r = e^-5
        "kl/behaviour": ((2 * np.e - 1 - LOG_2 - 1) + (np.exp(-5) - 1 + 5)) / 3,
        "gap/mean": (LOG_2 + 6) / 3,
        "gap/max": 5.0,
        "gap/share_above_10pct": 2 / 3,
        "gap/fresh/mean": 2.5,
        "gap/fresh/max": 5.0,
        "gap/fresh/share_above_10pct": 0.5,
        "gap/fresh/tokens": 2,
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert found.keys() - expected.keys() == {"gap/p99"}


def test_a_step_whose_tokens_were_all_left_out_rests_on_none() -> None:
    tally = Tally()
    zeros, ones = torch.zeros(1, 2), torch.ones(1, 2)
    _, metrics = policy_loss(
        "ppo", zeros, zeros, torch.full((1, 2), -9.0), ones, ones, row_weights=np.array([0.5]),
        correction="icepop", correction_low=0.5, correction_cap=2.0,
    )  # fmt: skip
    tally.add(metrics)
    tally.minibatch(0.0, 0.0)
    assert tally.summary()["loss/effective_share"] == 0.0


def step_of(
    rewards: list[float], groups: list[int], samples: list[int] | None, masks: list[list[int]]
) -> Rows:
    return Rows(
        ids=tuple(map(str, range(len(rewards)))),
        tokens=tuple(np.zeros(len(mask), np.int32) for mask in masks),
        masks=tuple(np.array(mask, bool) for mask in masks),
        logprobs=tuple(np.zeros(len(mask), np.float32) for mask in masks),
        rewards=np.array(rewards),
        groups=np.array(groups),
        samples=None if samples is None else np.array(samples),
    )


def test_a_share_of_groups_is_of_those_it_could_be_of() -> None:
    """Group 0 agrees, 1 does not, 2 is two branches of one sample, 3 is one sample alone."""
    rewards, groups = [1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0], [0, 0, 1, 1, 2, 2, 3]
    rows = step_of(rewards, groups, [0, 1, 0, 1, 0, 0, 0], [[0, 1, 1]] * 5 + [[0, 0, 0]] * 2)
    # Of group 1 one row has an advantage; that of a token which is not trained plays no part.
    advantages = [np.array(row) for row in [[1, 0, 0]] * 2 + [[0, 0, 0], [0, 0, -1]]]
    found = row_metrics(rows, [*advantages, *[np.zeros(3)] * 3], 1)
    assert found["reward/homogeneous_share"] == 1 / 2
    assert found["advantage/zero_share"] == 2 / 3
    alone = row_metrics(step_of([1.0, 2.0], [0, 1], None, [[0, 0]] * 2), [np.zeros(2)] * 2, 0)
    assert not [name for name in alone if name.endswith("_share")]


def test_the_gap_is_of_probabilities_that_are_known_on_both_sides() -> None:
    """exp(0.09) is 9.4% and exp(-0.11) 10.4% away from 1; exp(100) is no float32."""
    tally = Tally()
    gaps = [0.09, -0.11, 100.0, math.nan, 0.0]
    tally.add({}, torch.tensor(gaps), torch.tensor([1, 3, -2, 0, UNKNOWN]))
    tally.add({})  # of the policy at the step's start nothing is known
    tally.minibatch(1.0, None)
    found = summary_of(tally)
    assert found["gap/share_above_10pct"] == 0.5
    assert found["gap/mean"] == pytest.approx(100.2 / 4)
    assert not [name for name in found if name.startswith("gap/fresh")]


def test_the_loss_and_the_norm_are_means_over_mini_batches_and_what_was_left_out_is_counted() -> (
    None
):
    tally = Tally()
    for loss, norm in ((1.0, 2.0), (5.0, None), (3.0, 4.0)):
        tally.minibatch(loss, norm)
    found = summary_of(tally)
    assert tally.num_applied == 2
    assert (found["loss"], found["grad_norm"], found["minibatches/skipped"]) == (3.0, 3.0, 1.0)


def summary_of(tally: Tally) -> dict[str, float]:
    """With one token of weight 1 beside what the tally has."""
    ones = torch.ones(1, 1)
    tally.add(policy_loss("imitation", -ones, -ones, None, ones, ones, correction="none")[1])
    return tally.summary()


def test_what_has_no_sampler_no_reference_and_no_entropy_reports_none_of_them() -> None:
    tally = Tally()
    zeros, ones = torch.zeros(1, 2), torch.ones(1, 2)
    _, metrics = policy_loss("imitation", zeros, zeros, None, ones, ones, correction="none")
    tally.add(metrics, torch.full((2,), torch.nan), torch.zeros(2, dtype=torch.int32))
    tally.minibatch(1.0, 1.0)
    found = tally.summary()
    assert found["loss/effective_share"] == 1
    assert not [name for name in found if name.startswith(("kl/", "gap/", "entropy", "minib"))]
