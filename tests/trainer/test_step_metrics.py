"""What a step reports of its loss: sums over micro-batches, divided by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.losses import policy_loss
from trainer.step_metrics import Tally

LOG_2 = float(np.log(2))


def test_sums_of_micro_batches_become_shares_means_and_an_effective_share() -> None:
    """Weights 1, 2 (capped) and, by a rejection, 0: three tokens in two micro-batches."""
    tally = Tally()
    for gaps in ([0.0, LOG_2 + 1], [-5.0]):
        zeros, ones = torch.zeros(1, len(gaps)), torch.ones(1, len(gaps))
        loss, metrics = policy_loss(
            "ppo", zeros, zeros, torch.tensor([gaps]).neg(), ones, ones,
            row_weights=np.array([1 / 3]), entropy=ones / 2,
            rejection="k1", rejection_level="token", rejection_low=0.1, rejection_high=10.0,
        )  # fmt: skip
        tally.add(float(loss), metrics, torch.tensor(gaps))
    found = tally.summary()
    expected = {
        "loss": -1.0,  # (1 + 2 + 0) / 3
        "tokens/trained": 3,
        "loss/weight_mean": 1.0,
        "loss/effective_share": 9 / 5 / 3,
        "loss/ratio_mean": 1.0,
        "loss/clipped_share": 0.0,
        "loss/clamped_share": 0.0,
        "loss/capped_share": 1 / 3,
        "loss/masked_share": 0.0,
        "loss/rejected_share": 1 / 3,
        "entropy": 0.5,
        "kl/reference": 0.0,
        # r - 1 - log r of r = 2e and r = e^-5
        "kl/behaviour": ((2 * np.e - 1 - LOG_2 - 1) + (np.exp(-5) - 1 + 5)) / 3,
        "gap/mean": (LOG_2 + 6) / 3,
        "gap/max": 5.0,
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert found.keys() - expected.keys() == {"gap/p99"}


def test_text_nobody_sampled_has_no_gap_and_no_divergence() -> None:
    tally = Tally()
    zeros, ones = torch.zeros(1, 2), torch.ones(1, 2)
    loss, metrics = policy_loss("imitation", zeros, zeros, None, ones, ones, correction="none")
    tally.add(float(loss), metrics, torch.full((2,), torch.nan))
    found = tally.summary()
    assert found["loss/effective_share"] == 1
    assert not {"kl/behaviour", "gap/mean", "gap/p99", "gap/max"} & found.keys()
