"""What makes up for data of another policy: log-ratios enter, weights and keep masks leave.

r = exp(proximal - behaviour) is how much likelier a token is under the policy at the step's start
than under the one that sampled it. Whatever is computed here carries no gradient. All arrays [N],
of the tokens of a `Trained`; a row is a sequence.

A level says what one r is of: "token"; "sequence", the product over the row's tokens; "geometric",
their geometric mean, which does not grow with the row's length. At the last two every token of the
row has the row's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from trainer.surrogates import MAX_LOG_RATIO
from trainer.trained import Trained

LEVELS: Final[dict[str, Callable[[Tensor, Trained], Tensor]]] = {
    "token": lambda values, trained: values,
    "sequence": lambda values, trained: trained.over_row(values, mean=False),
    "geometric": lambda values, trained: trained.over_row(values, mean=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """weight   of each token's loss
    capped   the weight is the cap, not r
    masked   the weight is 0, not r
    clamped  r was beyond exp(+-MAX_LOG_RATIO)"""

    weight: Tensor
    capped: Tensor
    masked: Tensor
    clamped: Tensor


def weights(
    correction: str,
    log_ratio: Tensor,
    trained: Trained,
    *,
    level: str = "token",
    low: float = 0.5,
    cap: float = 2.0,
) -> Weights:
    """The weight of each token's loss, of `log_ratio` = prox - behaviour.

    "none"    1
    "tis"     min(r, cap): truncated importance sampling (Ionides 2008; for engines that sample
              otherwise than the trainer computes: IMPALA's, arXiv:1802.01561)
    "icepop"  r where low <= r <= cap, else 0 (arXiv:2510.18855)
    "mis"     the token's own r where low <= r <= cap at the level, else 0: masked importance
              sampling; at "geometric" what others call seq-mask-tis. Here alone the level may keep
              a row one of whose tokens is beyond MAX_LOG_RATIO, so r is clamped there.

    Compared in log space, so that nothing overflows. ValueError unless cap > 0 and, where it is
    used, 0 <= low <= cap.
    """
    at_level = LEVELS[level](log_ratio, trained)
    least, most = _band(low if correction in ("icepop", "mis") else 0.0, cap)
    nowhere = torch.zeros_like(log_ratio, dtype=torch.bool)
    outside = (at_level < least) | (at_level > most)
    match correction:
        case "none":
            one = torch.ones_like(log_ratio)
            return Weights(weight=one, capped=nowhere, masked=nowhere, clamped=nowhere)
        case "tis":
            capped = at_level > most
            weight = at_level.clamp(max=most).exp()
            return Weights(weight=weight, capped=capped, masked=nowhere, clamped=nowhere)
        case "icepop":
            weight = torch.where(outside, 0.0, at_level.clamp(max=most).exp())
            return Weights(weight=weight, capped=nowhere, masked=outside, clamped=nowhere)
        case "mis":
            weight = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
            clamped = (log_ratio.abs() > MAX_LOG_RATIO) & ~outside
            weight = torch.where(outside, 0.0, weight)
            return Weights(weight=weight, capped=nowhere, masked=outside, clamped=clamped)
    raise ValueError(f"unknown correction {correction!r}; known: {', '.join(sorted(CORRECTIONS))}")


CORRECTIONS: Final = ("none", "tis", "icepop", "mis")


def kept(
    rejection: str,
    log_ratio: Tensor,
    trained: Trained,
    *,
    level: str = "sequence",
    low: float = 0.5,
    high: float = 2.0,
) -> Tensor:
    """Which tokens stay, bool; the others leave the loss altogether. Of each token, then summed
    ("sequence") or averaged ("geometric") over its row:

    "none"  all stay
    "k1"    log r, within [log low, log high]
    "k2"    (log r)^2 / 2, at most high
    "k3"    r - 1 - log r, at most high; its mean is KL(behaviour || prox)

    The three estimators of the KL: http://joschu.net/blog/kl-approx.html. ValueError unless
    high > 0 and, for k1, 0 <= low <= high.
    """
    least, most = _band(low if rejection == "k1" else 0.0, high)
    match rejection:
        case "none":
            return torch.ones_like(log_ratio, dtype=torch.bool)
        case "k1":
            at_level = LEVELS[level](log_ratio, trained)
            return (at_level >= least) & (at_level <= most)
        case "k2":
            return LEVELS[level](log_ratio.square() / 2, trained) <= high
        case "k3":
            return LEVELS[level](k3(log_ratio), trained) <= high
    raise ValueError(f"unknown rejection {rejection!r}; known: {', '.join(sorted(REJECTIONS))}")


REJECTIONS: Final = ("none", "k1", "k2", "k3")


def k3(log_ratio: Tensor) -> Tensor:
    """r - 1 - log r, with r of at most exp(MAX_LOG_RATIO); not below 0, and 0 for r = 1."""
    return torch.expm1(log_ratio.clamp(max=MAX_LOG_RATIO)) - log_ratio


def proximal(
    kind: str,
    logprobs: Tensor,
    behaviour_logprobs: Any = None,
    *,
    recomputed: Any = None,
    ages: Any = None,
) -> Tensor:
    """Log-probs of the proximal policy, without gradient, shaped like `logprobs` (the current
    policy's).

    "recompute"  `recomputed`: a forward of their own at the step's start
    "reuse"      the current ones: exact where a step takes one optimizer step
    "loglinear"  behaviour + a (current - behaviour), a = age / (age + 1) with `ages` in steps, as
                 `batches.MicroBatch` has them: the proximal policy lies `age` versions after the
                 behaviour's and one before the one that the step comes to. No second forward where
                 several optimizer steps make a step (A-3PO, arXiv:2512.06547). A token of age 0 or
                 of unknown age keeps the behaviour's.
    "behaviour"  the behaviour's: PPO against the policy that sampled; r is 1 everywhere
    """
    match kind:
        case "recompute":
            found: Tensor = recomputed
        case "reuse":
            found = logprobs
        case "behaviour":
            found = behaviour_logprobs
        case "loglinear":
            if ages is None:
                raise ValueError("proximal 'loglinear': the ages of the tokens are missing")
            age = ages.clamp(min=0).to(logprobs.dtype)
            share = age / (age + 1)
            found = behaviour_logprobs + share * (logprobs.detach() - behaviour_logprobs)
        case _:
            known_kinds = ", ".join(sorted(PROXIMALS))
            raise ValueError(f"unknown proximal {kind!r}; known: {known_kinds}")
    if found is None:
        raise ValueError(f"proximal {kind!r}: its log-probs are missing")
    return found.detach()


PROXIMALS: Final = ("recompute", "reuse", "loglinear", "behaviour")


def _band(low: float, high: float) -> tuple[float, float]:
    """(log low, log high)."""
    if not (0 <= low <= high and 0 < high < math.inf):
        raise ValueError(f"a band of ratios needs 0 <= low <= high, above 0; got [{low}, {high}]")
    return (math.log(low) if low else -math.inf), math.log(high)
