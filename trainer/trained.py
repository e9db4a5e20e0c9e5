"""The trained tokens of a micro-batch, one after another: what every array of the loss is cut to.

Rows of unequal length, tokens that are not trained and rows without any are met here and nowhere
below: the mathematics of the loss is of [N] trained tokens, each of a known row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """N trained tokens of `num_rows` rows.

    rows_N  int64, ascending, below num_rows: the row of each
    mask    where they stand in the arrays given, which have its shape; None: these are [N]
    shape   of the arrays given
    """

    rows_N: Tensor
    num_rows: int
    mask: Tensor | None
    shape: torch.Size

    @classmethod
    def of_mask(cls, mask: Tensor) -> Trained:
        """Where `mask` [B, T], bool, says so."""
        return cls(rows_N=mask.nonzero()[:, 0], num_rows=len(mask), mask=mask, shape=mask.shape)

    @classmethod
    def of_rows(cls, rows: Tensor, num_rows: int, mask: Tensor | None = None) -> Trained:
        """Of arrays shaped like `rows` [tokens], the row of each; `mask` likewise, None: all."""
        taken = rows if mask is None else rows[mask]
        return cls(rows_N=taken, num_rows=num_rows, mask=mask, shape=rows.shape)

    def take(self, values: Tensor) -> Tensor:
        """[N] of values of the shape of the arrays; what is left out gets no gradient, so that a
        NaN there stays there. ValueError: another shape."""
        if values.shape != self.shape:
            raise ValueError(f"expected an array of {list(self.shape)}, got {list(values.shape)}")
        return values if self.mask is None else values[self.mask]

    def over_row(self, values_N: Tensor, *, mean: bool) -> Tensor:
        """[N]: at each token the sum or mean over its row's, summed in float64."""
        sums_B = self._sums(values_N.double())
        if mean:
            sums_B = sums_B / self._sums(torch.ones_like(self.rows_N)).clamp(min=1)
        return sums_B[self.rows_N].to(values_N.dtype)

    def name(self, index: int) -> str:
        """Of the index-th of the N, as its reader finds it in the arrays given."""
        if self.mask is None:
            return f"{index} of row {self.rows_N[index].item()}"
        at: Any = self.mask.nonzero()[index].tolist()
        return str(tuple(at)) if len(at) > 1 else f"{at[0]} of row {self.rows_N[index].item()}"

    def _sums(self, values_N: Tensor) -> Tensor:
        return values_N.new_zeros(self.num_rows).index_add_(0, self.rows_N, values_N)
