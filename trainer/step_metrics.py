"""The numbers a step reports: sums over its micro-batches, and what its rows say by themselves.

Legend: N trained tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from trainer.advantages import homogeneous_share
from trainer.batches import Rows


class Tally:
    """Sums over a step's micro-batches.

    loss     of the step so far
    metrics  what `summary` adds its means to
    seconds  by phase: "logprobs", "update"
    """

    def __init__(self) -> None:
        self.loss = 0.0
        self.metrics: dict[str, float] = {}
        self.seconds = {"logprobs": 0.0, "update": 0.0}
        self._sums: dict[str, float] = {}
        self._gaps: list[Tensor] = []

    def add(self, loss: float, metrics: Mapping[str, float], gap_N: Tensor) -> None:
        """One micro-batch: its loss, `policy_loss`'s metrics, and trainer - engine log-probs of its
        N trained tokens."""
        self.loss += loss
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._gaps.append(gap_N.float().cpu())

    def summary(self) -> dict[str, float]:
        """Per token means of what was summed. `gap` is |trainer - engine| of the log-probs of the
        same tokens; it is rounding alone when the sampling and the trained version are the same.
        `loss/effective_share` is (sum w)^2 / sum w^2 over all tokens: the share of tokens of weight
        1 that would estimate as well."""
        sums, num = self._sums, self._sums["num_tokens"]
        gaps = torch.cat(self._gaps).abs().numpy()
        gaps = gaps[np.isfinite(gaps)]
        found = self.metrics | {
            "loss": self.loss,
            "tokens/trained": num,
            "loss/weight_mean": sums["sum_weight"] / num,
            "loss/ratio_mean": sums["sum_ratio"] / num,
            "entropy": sums["sum_entropy"] / num,
            "kl/reference": sums["sum_kl_reference"] / num,
        }
        for name in ("clipped", "clamped", "capped", "masked", "rejected"):
            found[f"loss/{name}_share"] = sums[f"num_{name}"] / num
        if sums["sum_weight_squared"]:
            found["loss/effective_share"] = (
                sums["sum_weight"] ** 2 / sums["sum_weight_squared"] / num
            )
        if sums["num_behaviour"]:
            found["kl/behaviour"] = sums["sum_kl_behaviour"] / sums["num_behaviour"]
        if len(gaps):
            found["gap/mean"] = float(gaps.mean())
            found["gap/p99"] = float(np.quantile(gaps, 0.99))
            found["gap/max"] = float(gaps.max())
        return found


def row_metrics(rows: Rows, num_micro_batches: int) -> dict[str, float]:
    """What the step's rows say by themselves."""
    return {
        "reward/mean": float(rows.rewards.mean()) if len(rows) else 0.0,
        "reward/homogeneous_share": homogeneous_share(rows.rewards, rows.groups),
        "rows/all": float(len(rows)),
        "rows/untrained": float(len(rows.untrained)),
        "tokens/total": float(rows.num_tokens),
        "tokens/trained": float(rows.num_trained),
        "micro_batches": float(num_micro_batches),
    }
