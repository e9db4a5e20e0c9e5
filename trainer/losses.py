"""The loss of a step: log-probs and advantages enter, a scalar and sums for its metrics leave.

    [B, T] and a mask, or [N] and the row of each -> the trained tokens, [N] -> the loss

Three policies appear in a loss: the current one (`logprobs`, carries the gradient), the proximal
one at the step's start (`prox_logprobs`, what the clip is measured from) and the one that sampled
(`behaviour_logprobs`, what the correction makes up for). See "Batch size-invariance for policy
optimization" (arXiv:2110.00641) for the decoupling and arXiv:2505.24298 for its use in asynchronous
training.

    loss = sum_i weight_i sum_t keep_it (w_it surrogate_it + b kl_it - c entropy_it)

for rows i and trained tokens t: `surrogate` of surrogates.py, the correction weight w and `keep` of
the rejection of corrections.py, `kl` to a reference of regularisers.py, the row's weight of
aggregation.py. The regularisers are not corrected; a rejected token leaves the loss altogether.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer import aggregation as aggregations
from trainer import corrections, surrogates
from trainer.regularisers import KLS
from trainer.trained import Trained


def policy_loss(
    name: str,
    logprobs: Any,
    prox_logprobs: Any,
    behaviour_logprobs: Any,
    advantages: Any,
    mask: Any,
    aggregation: str = "token-mean",
    *,
    rows: Any = None,
    row_weights: Any = None,
    groups: Any = None,
    samples: Any = None,
    constant: float | None = None,
    correction: str = "tis",
    correction_level: str = "token",
    correction_low: float = 0.5,
    correction_cap: float = 2.0,
    rejection: str = "none",
    rejection_level: str = "sequence",
    rejection_low: float = 0.5,
    rejection_high: float = 2.0,
    reference_logprobs: Any = None,
    kl: str = "k3",
    kl_coefficient: float = 0.0,
    entropy: Any = None,
    entropy_coefficient: float = 0.0,
    **parameters: Any,
) -> tuple[Any, dict[str, float]]:
    """(loss, metrics). All arrays [B, T], float32 or wider; mask nonzero = trained. With `rows` all
    are [tokens] instead, as a pack has them, and nothing of a [B, T] is ever made.

    Values where the mask is 0 may be anything, NaN included: they reach neither loss nor gradient.
    rows                int64 [tokens], ascending: the row of each token, an index of row_weights,
                        which it needs; rows may have none. `mask` may then be None: all trained
    behaviour_logprobs  None or NaN only where neither correction nor rejection reads them
    row_weights         [B], of these rows among those of the whole step; None: these rows are the
                        step, `aggregation.row_weights` of groups, samples and constant
    entropy             of the policy at each token; with a coefficient, differentiable
    parameters          of the loss, see surrogates.py
    numpy in, numpy out (float64, no gradient). Finite for log-ratios of any size.
    ValueError: unknown name, no trained token and no row_weights, shapes that disagree, a trained
    token whose advantage or needed log-prob is not finite, a coefficient without its array, a
    correction or rejection with "imitation". A current log-prob that is NaN gives a NaN loss.

    Metrics are sums over this call's trained tokens, to be added over micro-batches:

        num_tokens           trained tokens
        num_clipped          the clip or trust region of the loss was in force
        num_clamped          a log-ratio in the loss was beyond its clamp: no gradient there
        num_capped           the correction weight was its cap
        num_masked           the correction gave weight 0
        num_rejected         the rejection took the token out
        sum_weight           correction weights, 0 where rejected
        sum_weight_squared   of those: (sum w)^2 / sum w^2 is the effective number of tokens
        sum_ratio            current / proximal policy as the loss takes it, before its clip
        num_behaviour        the behaviour log-prob is known
        sum_kl_behaviour     over those, the k3 estimate of KL(behaviour || prox)
        sum_kl_reference     the `kl` estimate; not there without a reference
        sum_entropy          not there without entropies
    """
    _check_name("loss", name, surrogates.LOSSES)
    _check_name("kl", kl, KLS)
    _check_name("correction level", correction_level, corrections.LEVELS)
    _check_name("rejection level", rejection_level, corrections.LEVELS)
    if name == "imitation" and (correction, rejection) != ("none", "none"):
        raise ValueError(
            "imitation is of text without behaviour log-probs: it takes correction and rejection "
            f"'none', got {correction!r} and {rejection!r}"
        )
    is_numpy = isinstance(logprobs, np.ndarray)
    trained, weights_B = _trained(
        mask, rows, row_weights, aggregation, groups=groups, samples=samples, constant=constant
    )
    current = _taken("", logprobs, trained)
    prox = _taken("", prox_logprobs, trained).detach()
    advantage = _taken("advantage", advantages, trained)
    reads_behaviour = (correction, rejection) != ("none", "none")
    checked = "behaviour log-prob" if reads_behaviour else ""
    behaviour = _taken(checked, behaviour_logprobs, trained).detach()
    known = torch.isfinite(behaviour)
    gap = torch.where(known, prox - behaviour, 0.0)

    surrogate = surrogates.LOSSES[name](current, prox, advantage, trained, **parameters)
    weight = corrections.weights(
        correction, gap, trained, level=correction_level, low=correction_low, cap=correction_cap
    )
    kept = corrections.kept(
        rejection, gap, trained, level=rejection_level, low=rejection_low, high=rejection_high
    )
    reference_kl, far = _kl(kl, current, reference_logprobs, trained, kl_coefficient)
    entropies = _entropy(entropy, trained, current, entropy_coefficient)
    losses = surrogate.losses * weight.weight
    if kl_coefficient:
        losses = losses + kl_coefficient * reference_kl
    if entropy_coefficient:
        losses = losses - entropy_coefficient * entropies
    loss = (torch.where(kept, losses, 0.0) * weights_B.to(losses)[trained.rows_N]).sum()

    final = torch.where(kept, weight.weight, 0.0)
    metrics = _sums(
        num_tokens=torch.ones_like(kept),
        num_clipped=surrogate.clipped,
        num_clamped=surrogate.clamped | weight.clamped | far,
        num_capped=weight.capped,
        num_masked=weight.masked,
        num_rejected=~kept,
        sum_weight=final,
        sum_weight_squared=final.square(),
        sum_ratio=surrogate.ratio,
        num_behaviour=known,
        sum_kl_behaviour=corrections.k3(gap),
        **({} if reference_logprobs is None else {"sum_kl_reference": reference_kl}),
        **({} if entropy is None else {"sum_entropy": entropies}),
    )
    return (np.float64(loss.item()) if is_numpy else loss), metrics


def _trained(
    mask: Any, rows: Any, row_weights: Any, aggregation: str, **of_rows: Any
) -> tuple[Trained, Tensor]:
    """(Which tokens are trained, the weight of each row)."""
    is_trained = None if mask is None else torch.as_tensor(mask) != 0
    if rows is not None:
        if row_weights is None:
            raise ValueError("rows: the weights of the rows are missing")
        trained = Trained.of_rows(torch.as_tensor(rows), len(row_weights), is_trained)
    elif is_trained is None:
        raise ValueError("the mask is missing, or the rows of the tokens")
    else:
        trained = Trained.of_mask(is_trained)
        if row_weights is None:
            row_weights = aggregations.row_weights(is_trained, aggregation, **of_rows)
        elif len(row_weights) != trained.num_rows:
            raise ValueError(f"{trained.num_rows} rows, and weights of {len(row_weights)}")
    return trained, torch.as_tensor(row_weights)


def _kl(
    kl: str, current: Tensor, reference_logprobs: Any, trained: Trained, coefficient: float
) -> tuple[Tensor, Tensor]:
    """(The estimate at each token, where the loss takes it clamped); 0 without a reference."""
    nowhere = torch.zeros_like(current, dtype=torch.bool)
    if reference_logprobs is None:
        if coefficient:
            raise ValueError(f"kl_coefficient is {coefficient}: reference log-probs are missing")
        return torch.zeros_like(current), nowhere
    reference = _taken("reference log-prob", reference_logprobs, trained).detach()
    values, clamped = KLS[kl](current - reference)
    return values, clamped if coefficient else nowhere


def _entropy(entropy: Any, trained: Trained, current: Tensor, coefficient: float) -> Tensor:
    if entropy is None:
        if coefficient:
            raise ValueError(f"entropy_coefficient is {coefficient}: entropies are missing")
        return torch.zeros_like(current)
    return _taken("", entropy, trained)


def _taken(checked: str, values: Any, trained: Trained) -> Tensor:
    """[N] of `values`; NaN for None. ValueError if `checked` names what they are and one is not
    finite."""
    if isinstance(values, np.ndarray):
        values = torch.from_numpy(np.asarray(values, np.float64))
    if values is None:
        found = torch.full_like(trained.rows_N, torch.nan, dtype=torch.float32)
    else:
        found = trained.take(values)
    if checked and not bool(torch.isfinite(found).all()):
        first = int((~torch.isfinite(found)).nonzero()[0])
        raise ValueError(
            f"the {checked} of trained token {trained.name(first)} is {found[first].item()}"
        )
    return found


def _sums(**values: Tensor) -> dict[str, float]:
    """In float64, fetched from the device at once."""
    sums = [v.detach().sum(dtype=torch.float64) for v in values.values()]
    return dict(zip(values, torch.stack(sums).tolist(), strict=True))


def _check_name(what: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(sorted(known))}")
