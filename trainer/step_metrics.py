"""The numbers a step reports: sums over its micro-batches, of all ranks, and what its rows say by
themselves.

Legend: N trained tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.batches import Rows


class Part(NamedTuple):
    """Of one rank: sums over trained tokens, and what it says of each."""

    sums: Mapping[str, float]
    gaps: Sequence[Tensor]
    ages: Sequence[Tensor]


class Tally:
    """Sums over a step's micro-batches.

    num_applied  mini-batches that the optimizer stepped on
    metrics      what `summary` adds its means to
    seconds      by phase: "logprobs", "update"
    """

    def __init__(self) -> None:
        self.num_applied = 0
        self.metrics: dict[str, float] = {}
        self.seconds = {"logprobs": 0.0, "update": 0.0}
        self._losses: list[float] = []
        self._grad_norms: list[float] = []
        self._sums: dict[str, float] = {}
        self._gaps: list[Tensor] = []
        self._ages: list[Tensor] = []

    def add(
        self, metrics: Mapping[str, float], gap_N: Tensor | None = None, age_N: Tensor | None = None
    ) -> None:
        """One micro-batch: `policy_loss`'s metrics and, of its N trained tokens, the trainer's
        log-probs less the engine's (None where it has not those of the step's start) and ages."""
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        if gap_N is not None and age_N is not None:
            self._gaps.append(gap_N.float().cpu())
            self._ages.append(age_N.cpu())

    def part(self) -> Part:
        """What this rank's micro-batches add to the step's sums."""
        return Part(self._sums, self._gaps, self._ages)

    def merge(self, parts: Sequence[Part]) -> None:
        """Of all ranks, this one's among them."""
        self._sums, self._gaps, self._ages = {}, [], []
        for part in parts:
            for name, value in part.sums.items():
                self._sums[name] = self._sums.get(name, 0.0) + value
            self._gaps += part.gaps
            self._ages += part.ages

    def minibatch(self, loss: float, grad_norm: float | None) -> None:
        """All of one mini-batch; no norm: the optimizer did not step on it."""
        self._losses.append(loss)
        if grad_norm is not None:
            self._grad_norms.append(grad_norm)
            self.num_applied += 1

    def summary(self) -> dict[str, float]:
        """Per token means of what was summed; `loss` and `grad_norm`: means over mini-batches.
        `loss/effective_share` is (sum w)^2 / sum w^2 over all tokens: the share of tokens of weight
        1 that would estimate as well, 0 where all were left out. Of several mini-batches, how many
        changed nothing because they were not finite."""
        sums, num = self._sums, self._sums["num_tokens"]
        found = self.metrics | _gap(self._gaps, self._ages)
        found |= {
            "loss": sum(self._losses) / len(self._losses),
            "loss/weight_mean": sums["sum_weight"] / num,
            "loss/ratio_mean": sums["sum_ratio"] / num,
        }
        if self._grad_norms:
            found["grad_norm"] = sum(self._grad_norms) / len(self._grad_norms)
        if len(self._losses) > 1:
            found["minibatches/skipped"] = float(len(self._losses) - self.num_applied)
        if "num_computed" in sums:
            found["tokens/computed"] = sums["num_computed"]
        for name, summed in (("entropy", "sum_entropy"), ("kl/reference", "sum_kl_reference")):
            if summed in sums:
                found[name] = sums[summed] / num
        for name in ("clipped", "clamped", "capped", "masked", "rejected"):
            found[f"loss/{name}_share"] = sums[f"num_{name}"] / num
        found["loss/effective_share"] = _effective(sums) / num
        if sums["num_behaviour"]:
            found["kl/behaviour"] = sums["sum_kl_behaviour"] / sums["num_behaviour"]
        return found


def _effective(sums: Mapping[str, float]) -> float:
    squared = sums["sum_weight_squared"]
    return sums["sum_weight"] ** 2 / squared if squared else 0.0


def _gap(gaps: Sequence[Tensor], ages: Sequence[Tensor]) -> dict[str, float]:
    """How far the log-probs of the policy at the step's start, as the trainer computes them, are
    from the engine's of the same tokens, for tokens that have both: of all, and of those that the
    very version wrote which is trained, for which only the two programs can differ. Left out
    without tokens.

    With several mini-batches, tokens of those after the first have both only where the proximal
    policy is recomputed."""
    if not gaps:
        return {}
    gap_N, age_N = torch.cat(list(gaps)).numpy(), torch.cat(list(ages)).numpy()
    known_N = np.isfinite(gap_N)
    all_, fresh = gap_N[known_N], gap_N[known_N & (age_N == 0)]
    found: dict[str, float] = {}
    if len(all_):
        found |= {
            "gap/mean": float(np.abs(all_).mean()),
            "gap/p99": float(np.quantile(np.abs(all_), 0.99)),
            "gap/max": float(np.abs(all_).max()),
            "gap/share_above_10pct": _share_above(all_),
        }
    if len(fresh):
        found |= {
            "gap/fresh/mean": float(np.abs(fresh).mean()),
            "gap/fresh/max": float(np.abs(fresh).max()),
            "gap/fresh/share_above_10pct": _share_above(fresh),
            "gap/fresh/tokens": float(len(fresh)),
        }
    return found


def _share_above(gap_N: NDArray[np.float32]) -> float:
    """Of the tokens whose two probabilities are more than 10% apart."""
    with np.errstate(over="ignore"):
        return float((np.abs(np.expm1(gap_N)) > 0.1).mean())


def row_metrics(
    rows: Rows, advantages: Sequence[NDArray[np.floating[Any]]], num_micro_batches: int
) -> dict[str, float]:
    """What the step's rows say by themselves. `advantages`: of their tokens, [T_i] a row. A share
    of groups is left out where there is no group that it could be of."""
    found = {
        "reward/mean": float(rows.rewards.mean()) if len(rows) else 0.0,
        "rows/all": float(len(rows)),
        "rows/untrained": float(len(rows.untrained)),
        "tokens/total": float(rows.num_tokens),
        "tokens/trained": float(rows.num_trained),
        "micro_batches": float(num_micro_batches),
    }
    if same := _homogeneous(rows):
        found["reward/homogeneous_share"] = float(np.mean(same))
    if zero := _zero(rows, advantages):
        found["advantage/zero_share"] = float(np.mean(zero))
    return found


def _homogeneous(rows: Rows) -> list[bool]:
    """Of each group of at least two samples: whether all its rewards are equal."""
    samples = np.arange(len(rows)) if rows.samples is None else rows.samples
    groups = [rows.groups == group for group in np.unique(rows.groups)]
    return [bool(np.ptp(rows.rewards[at]) == 0) for at in groups if len(np.unique(samples[at])) > 1]


def _zero(rows: Rows, advantages: Sequence[NDArray[np.floating[Any]]]) -> list[bool]:
    """Of each group with a trained token: whether the advantage of all of them is 0."""
    found: dict[int, bool] = {}
    for group, mask, of_row in zip(rows.groups.tolist(), rows.masks, advantages, strict=True):
        if mask.any():
            found[group] = found.get(group, True) and not of_row[mask].any()
    return list(found.values())
