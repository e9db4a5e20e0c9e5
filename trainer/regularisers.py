"""Estimators of KL(current || reference) as a term of the loss: log-probs enter, [N] leaves.

d = current - reference, of tokens drawn from the current policy. What a term does to the weights is
its gradient, which is not the gradient of what its value estimates (arXiv:2510.01555):

    name          value                mean of the value   gradient      mean of the gradient
    k1            d                    the KL              1             0: it pulls nowhere
    k2            d^2 / 2              not the KL          d             that of the KL
    k3            exp(-d) - 1 + d      the KL              1 - exp(-d)   that of KL(ref || current)
    low-variance  k3, d clamped to     k3's, of at most    as k3's,      as k3's, without what is
                  +-20, then to 10     10                  0 beyond      far away

(Gradients: factors of that of log current; values: http://joschu.net/blog/kl-approx.html.) For
tokens of an older policy all of this is as true as that policy is near. k3 takes d as at least
-MAX_LOG_RATIO and has no gradient below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from trainer.surrogates import MAX_LOG_RATIO

LOW_VARIANCE_MOST: Final = 10.0


def k1(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    return log_ratio, torch.zeros_like(log_ratio, dtype=torch.bool)


def k2(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    return log_ratio.square() / 2, torch.zeros_like(log_ratio, dtype=torch.bool)


def k3(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    d = log_ratio.clamp(min=-MAX_LOG_RATIO)
    return torch.expm1(-d) + d, log_ratio < -MAX_LOG_RATIO


def low_variance(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    d = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    value = torch.expm1(-d) + d
    return value.clamp(max=LOW_VARIANCE_MOST), value.detach() > LOW_VARIANCE_MOST


KLS: Final[dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "low-variance": low_variance,
}
"""Of d: (values, where they were clamped)."""
