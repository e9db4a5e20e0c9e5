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
        self._entropy = 0.0

    def add(
        self, loss: float, metrics: Mapping[str, float], gap_N: Tensor, entropy_N: Tensor
    ) -> None:
        """One micro-batch: its loss, `policy_loss`'s metrics, and trainer - engine log-probs and
        entropies of its N trained tokens."""
        self.loss += loss
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._gaps.append(gap_N.float().cpu())
        self._entropy += float(entropy_N.sum().item())

    def summary(self) -> dict[str, float]:
        """Per token means of what was summed. `gap` is |trainer - engine| of the log-probs of the
        same tokens; it is rounding alone when the sampling and the trained version are the same."""
        num = self._sums["num_tokens"]
        gaps = torch.cat(self._gaps).abs().numpy()
        return self.metrics | {
            "loss": self.loss,
            "tokens/trained": num,
            "loss/clipped_share": self._sums["num_clipped"] / num,
            "loss/clamped_share": self._sums["num_clamped"] / num,
            "loss/capped_share": self._sums["num_capped"] / num,
            "loss/weight_mean": self._sums["sum_weight"] / num,
            "entropy": self._entropy / num,
            "gap/mean": float(gaps.mean()),
            "gap/p99": float(np.quantile(gaps, 0.99)),
            "gap/max": float(gaps.max()),
        }


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
