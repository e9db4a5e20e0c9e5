"""Policy losses: log-probs and advantages enter, a scalar and what was clipped leave.

Three policies appear in a loss: the current one (`logprobs`, carries the gradient), the proximal
one at the step's start (`prox_logprobs`, what the clip is measured from) and the one that sampled
(`behaviour_logprobs`, what the correction weight makes up for). See "Batch size-invariance for
policy optimization" (arXiv:2110.00641) for the decoupling and arXiv:2505.24298 for its use in
asynchronous training.

A loss is a sum over tokens divided by `denominator`; given the denominator of the whole step,
micro-batches add up to the gradient of one big batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

MAX_LOG_RATIO: Final = 20.0
"""Log-ratios are clamped to +-this before exp: beyond it a ratio says only "far away" and overflows
soon."""


def policy_loss(
    name: str,
    logprobs: Any,
    prox_logprobs: Any,
    behaviour_logprobs: Any,
    advantages: Any,
    mask: Any,
    aggregation: str = "token-mean",
    *,
    correction: str = "tis",
    correction_cap: float = 2.0,
    denominator: float | None = None,
    **parameters: Any,
) -> tuple[Any, dict[str, float]]:
    """(loss, metrics). All arrays [B, T], float32 or wider; mask nonzero = trained.

    Values where the mask is 0 may be anything, NaN included: they reach neither loss nor gradient.
    correction   "tis": each token's loss is multiplied by min(exp(prox - behaviour),
                 correction_cap), without gradient; "none"
    denominator  what the sum over tokens is divided by; None = `units(mask, aggregation)`
    parameters   of the loss: ppo has clip_low and clip_high
    metrics      sums over this call's trained tokens, to be added over micro-batches: num_tokens,
                 num_clipped (the clip was in force), num_clamped (|log-ratio| above MAX_LOG_RATIO),
                 num_capped (the correction weight hit its cap), sum_weight
    numpy in, numpy out (float64, no gradient). Finite for log-ratios of any size.
    ValueError: unknown name, all tokens masked without a denominator, a trained token whose
    advantage or (when corrected) behaviour log-prob is not finite. A current log-prob that is NaN
    gives a NaN loss.
    """
    _check_name("loss", name, LOSSES)
    _check_name("aggregation", aggregation, AGGREGATIONS)
    _check_name("correction", correction, CORRECTIONS)
    is_numpy = isinstance(logprobs, np.ndarray)
    if is_numpy:
        logprobs, prox_logprobs, behaviour_logprobs, advantages = (
            torch.from_numpy(np.asarray(array, np.float64))
            for array in (logprobs, prox_logprobs, behaviour_logprobs, advantages)
        )
        mask = torch.from_numpy(np.asarray(mask) != 0)
    trained = mask != 0
    if denominator is None:
        denominator = units(trained, aggregation)
        if denominator == 0:
            raise ValueError("all tokens are masked: there is nothing to average over")
    # where() also stops the gradient: a masked NaN multiplied by 0 would still be NaN.
    current, prox, behaviour, advantage = (
        torch.where(trained, x, 0.0)
        for x in (logprobs, prox_logprobs.detach(), behaviour_logprobs.detach(), advantages)
    )
    _check_finite("advantage", advantage)
    losses_BT, clipped_BT, clamped_BT = LOSSES[name](current, prox, advantage, **parameters)
    weight_BT, capped_BT = _correction(correction, prox, behaviour, correction_cap)
    loss = torch.where(trained, losses_BT * weight_BT, 0.0).sum() / denominator
    metrics = {
        "num_tokens": _sum(trained),
        "num_clipped": _sum(clipped_BT & trained),
        "num_clamped": _sum(clamped_BT & trained),
        "num_capped": _sum(capped_BT & trained),
        "sum_weight": _sum(torch.where(trained, weight_BT, 0.0)),
    }
    return (np.float64(loss.item()) if is_numpy else loss), metrics


def ppo(
    logprobs: Tensor,
    prox_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, Tensor, Tensor]:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(current - prox)
    (arXiv:1707.06347; clip_high > clip_low as in DAPO, arXiv:2503.14476). Returns (losses, was
    clipped, was clamped)."""
    log_ratio = logprobs - prox_logprobs
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(plain, clipped), clipped > plain, log_ratio.abs() > MAX_LOG_RATIO


LOSSES: Final[dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]]] = {"ppo": ppo}
AGGREGATIONS: Final = ("token-mean",)
CORRECTIONS: Final = ("tis", "none")


def units(mask: Any, aggregation: str = "token-mean") -> float:
    """How many things the aggregation averages over in `mask`: for "token-mean" its trained tokens.
    Add it up over micro-batches for the denominator of a step."""
    _check_name("aggregation", aggregation, AGGREGATIONS)
    return float((mask != 0).sum())


def _correction(
    correction: str, prox: Tensor, behaviour: Tensor, cap: float
) -> tuple[Tensor, Tensor]:
    """(the weight of each token, whether it was capped). Capped in log space, so that nothing
    overflows; exp of a very negative difference is 0."""
    if correction == "none":
        return torch.ones_like(prox), torch.zeros_like(prox, dtype=torch.bool)
    _check_finite("behaviour log-prob", behaviour)
    gap, limit = prox - behaviour, math.log(cap)
    return gap.clamp(max=limit).exp(), gap > limit


def _check_name(what: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(sorted(known))}")


def _check_finite(what: str, values: Tensor) -> None:
    bad = (~torch.isfinite(values)).nonzero()
    if len(bad):
        where = tuple(bad[0].tolist())
        raise ValueError(f"the {what} of trained token {where} is {values[where].item()}")


def _sum(values: Tensor) -> float:
    return float(values.sum().item())
