"""Policy losses a token: log-probs of current and proximal policy enter, losses leave.

Each is a function `(logprobs, prox_logprobs, advantages, trained, **parameters) -> Surrogate`. All
arrays [N], of the tokens of `trained`. Only `logprobs` carries a gradient. What each one's
parameters may be: connectors/algorithms.py.

A log-ratio is clamped to +-MAX_LOG_RATIO before exp; where the clamp bites a ratio has no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from trainer.trained import Trained

MAX_LOG_RATIO: Final = 20.0
"""Beyond it a ratio says only "far away" and overflows soon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Surrogate:
    """losses   before the correction weight
    ratio    current / proximal policy as the loss takes it, clamped but not clipped
    clipped  the clip or the trust region was in force
    clamped  the log-ratio was beyond MAX_LOG_RATIO"""

    losses: Tensor
    ratio: Tensor
    clipped: Tensor
    clamped: Tensor


def ppo(
    logprobs: Tensor,
    prox_logprobs: Tensor,
    advantages: Tensor,
    trained: Trained,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = math.inf,
) -> Surrogate:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(current - prox)
    (arXiv:1707.06347; clip_high > clip_low as in DAPO, arXiv:2503.14476). Where A < 0, at most
    -A dual_clip (above 1; arXiv:1912.09729)."""
    log_ratio = logprobs - prox_logprobs
    return _clipped(log_ratio, advantages, clip_low, clip_high, dual_clip)


def gspo(
    logprobs: Tensor,
    prox_logprobs: Tensor,
    advantages: Tensor,
    trained: Trained,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Surrogate:
    """PPO's loss with the ratio of the row, s = exp(mean over its tokens of current - prox), at
    every token (arXiv:2507.18071).

    The gradient goes to token t as that of A_t s * current_t: the paper's GSPO-token, which for one
    advantage a row is GSPO itself. That is an average over samples of their tokens' mean:
    "seq-mean-token-mean"."""
    log_ratio = logprobs - prox_logprobs
    of_row = trained.over_row(log_ratio.detach(), mean=True)
    # current - current: 0 in value, the gradient of this token.
    return _clipped(of_row + (logprobs - logprobs.detach()), advantages, clip_low, clip_high)


def cispo(
    logprobs: Tensor,
    prox_logprobs: Tensor,
    advantages: Tensor,
    trained: Trained,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> Surrogate:
    """-A clip(r, 1 - clip_low, 1 + clip_high) log(current), the clipped ratio without gradient, so
    that no token loses its own (arXiv:2506.13585). clip_low = 1 is no lower clip."""
    ratio, clamped = _ratio((logprobs - prox_logprobs).detach())
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return Surrogate(
        losses=-advantages * weight * logprobs,
        ratio=ratio,
        clipped=weight != ratio,
        clamped=clamped,
    )


def dppo(
    logprobs: Tensor,
    prox_logprobs: Tensor,
    advantages: Tensor,
    trained: Trained,
    *,
    divergence: str = "tv",
    limit_low: float = 0.2,
    limit_high: float = 0.2,
    ratio_cap: float = 20.0,
) -> Surrogate:
    """-M A min(r, ratio_cap) log(current), the ratio without gradient (arXiv:2602.04879).

    M is 0 where the step would lead further out of the trust region: A > 0, current > prox and
    divergence > limit_high, or A < 0, current < prox and divergence > limit_low. The divergence is
    that of two-valued distributions, this token or another one, with probabilities p now and q of
    the proximal policy: "tv" |p - q|, "kl" q log(q / p) + (1 - q) log((1 - q) / (1 - p)). The paper
    measures from the policy that sampled: that is `proximal` "behaviour"."""
    log_ratio = (logprobs - prox_logprobs).detach()
    ratio, clamped = _ratio(log_ratio)
    distance = DIVERGENCES[divergence](logprobs.detach().clamp(max=0), prox_logprobs.clamp(max=0))
    outside = torch.where(
        advantages > 0,
        (distance > limit_high) & (log_ratio > 0),
        (distance > limit_low) & (log_ratio < 0) & (advantages < 0),
    )
    weight = torch.where(outside, 0.0, ratio.clamp(max=ratio_cap))
    return Surrogate(
        losses=-advantages * weight * logprobs, ratio=ratio, clipped=outside, clamped=clamped
    )


def reinforce(
    logprobs: Tensor, prox_logprobs: Tensor, advantages: Tensor, trained: Trained
) -> Surrogate:
    """-A log(current): no ratio, no clip (Williams, 1992; what GPG, arXiv:2504.02546, trains
    with). Off-policy only the correction weight makes up for the difference."""
    nowhere = torch.zeros_like(logprobs, dtype=torch.bool)
    return Surrogate(
        losses=-advantages * logprobs,
        ratio=torch.ones_like(prox_logprobs),
        clipped=nowhere,
        clamped=nowhere,
    )


imitation = reinforce
"""The same for text nobody sampled: without log-probs of a policy that did, no correction can be
taken, and `policy_loss` refuses one. With advantage 1 it is the cross-entropy."""


def binary_tv(logprobs: Tensor, prox_logprobs: Tensor) -> Tensor:
    """Total variation between (p, 1 - p) and (q, 1 - q)."""
    return (logprobs.exp() - prox_logprobs.exp()).abs()


def binary_kl(logprobs: Tensor, prox_logprobs: Tensor) -> Tensor:
    """KL of (q, 1 - q) from (p, 1 - p); 1 - p and 1 - q are taken as at least 1e-8."""
    rest, prox_rest = ((-torch.expm1(x)).clamp(min=1e-8).log() for x in (logprobs, prox_logprobs))
    q = prox_logprobs.exp()
    return q * (prox_logprobs - logprobs) + (1 - q) * (prox_rest - rest)


DIVERGENCES: Final = {"tv": binary_tv, "kl": binary_kl}
LOSSES: Final[dict[str, Callable[..., Surrogate]]] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "dppo": dppo,
    "reinforce": reinforce,
    "imitation": imitation,
}


def _clipped(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float = math.inf
) -> Surrogate:
    ratio, clamped = _ratio(log_ratio)
    plain, held = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    losses = torch.maximum(plain, held)
    most = torch.where(advantages < 0, -advantages * dual_clip, torch.inf)
    return Surrogate(
        losses=torch.minimum(losses, most),
        ratio=ratio,
        clipped=(held > plain) | (losses > most),
        clamped=clamped,
    )


def _ratio(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """(exp of it, where it was clamped)."""
    clamped = log_ratio.detach().abs() > MAX_LOG_RATIO
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), clamped
