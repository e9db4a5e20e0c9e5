"""Sampling: logits, settings and a number in (0, 1) in; a token and its log-prob out.

The number is a function of (seed, position in the sequence), so a token neither depends on its
neighbours in the batch nor on how its prompt was cut into parts, nor on a pause in mid-sequence.

Shape legend: R rows (each gets a token), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from connectors.weights.layout import mix64

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment


def uniform(seed: int, position: int) -> float:
    """In (0, 1), a pure function of both: the `position`-th number of the splitmix64 generator
    (Steele et al. 2014) that starts where the seed says."""
    start = mix64((seed + _GOLDEN) & _MASK_64)
    bits = mix64((start + (position + 1) * _GOLDEN) & _MASK_64)
    return ((bits >> 11) + 0.5) * 2.0**-53


def draw(
    logits_RV: Tensor,
    temperatures: Sequence[float],
    top_ps: Sequence[float],
    uniforms: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """One token a row: (ids [R] int64, log-probs [R] float32), by inverting the distribution's sum
    at the row's number in (0, 1). The log-prob is log-softmax(logits/temperature) before top-p, NaN
    where the logits are not finite; temperature 0 takes the most likely token and its log-prob at
    temperature 1. Top-p keeps the smallest set of most likely tokens whose probability reaches it
    (Holtzman et al. 2020)."""
    device = logits_RV.device

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

    scales_R1 = column([t or 1.0 for t in temperatures]).float()
    logprobs_RV = torch.log_softmax(logits_RV.float() / scales_R1, dim=-1)
    ids_R = logprobs_RV.argmax(dim=-1)
    for rows, nucleus in (
        ([r for r, t in enumerate(temperatures) if t and top_ps[r] >= 1], False),
        ([r for r, t in enumerate(temperatures) if t and top_ps[r] < 1], True),
    ):
        if not rows:
            continue
        probs_RV = logprobs_RV[rows].exp().double()
        order_RV = None
        if nucleus:
            probs_RV, order_RV = probs_RV.sort(dim=-1, descending=True, stable=True)
            before_RV = probs_RV.cumsum(dim=-1) - probs_RV
            outside_RV = before_RV >= column([top_ps[r] for r in rows])
            outside_RV[:, 0] = False
            probs_RV = probs_RV.masked_fill(outside_RV, 0)
        sums_RV = probs_RV.cumsum(dim=-1)
        levels_R1 = column([uniforms[r] for r in rows]) * sums_RV[:, -1:]
        drawn_R1 = torch.searchsorted(sums_RV, levels_R1, right=True)
        drawn_R1.clamp_(max=sums_RV.shape[-1] - 1)  # rows that are not finite
        ids_R[rows] = (drawn_R1 if order_RV is None else order_RV.gather(1, drawn_R1))[:, 0]
    return ids_R, logprobs_RV.gather(1, ids_R[:, None])[:, 0]
