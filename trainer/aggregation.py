"""How the losses of a step's tokens become one number: masks enter, one weight a row leaves.

    loss = sum over rows i of  weight_i * sum over trained tokens t of  loss_it

Every aggregation is such a set of weights. They are computed once, over the whole step (all ranks,
all micro-batches); after that rows may be cut into micro-batches and spread over ranks as one
likes: losses and gradients add up (a sum, not a mean) to those of one big batch.

N trained tokens, P prompts and S samples of the step; n_i trained tokens of row i's sample (the
branches of a sample are several rows), m_i of its prompt. Samples and prompts without a trained
token do not count.

    aggregation           weight of row i     its loss is
    token-mean            1 / N               the mean over all tokens (DAPO, arXiv:2503.14476)
    seq-mean-token-mean   1 / (S n_i)         the mean over samples of their tokens' mean
                                              (GRPO, arXiv:2402.03300)
    seq-mean-token-sum    1 / S               the mean over samples of their tokens' sum
    constant-norm         1 / (S constant)    the same, over a constant, such as the longest
                                              sample allowed (Dr. GRPO, arXiv:2503.20783)
    prompt-mean           1 / (P m_i)         the mean over prompts of their tokens' mean

The counts are of the mask as it is before corrections set tokens aside: a rejected token adds 0 and
does not make the others weigh more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Of one step. All [N rows]: trained tokens of each row's sample and prompt (0: it has none);
    the totals beside them."""

    of_sample: Floats
    of_prompt: Floats
    num_tokens: float
    num_samples: float
    num_prompts: float
    constant: float


def row_weights(
    masks: Any,
    aggregation: str = "token-mean",
    *,
    groups: Any = None,
    samples: Any = None,
    constant: float | None = None,
) -> Floats:
    """The weight of each row, float64 [N]; 0 for rows of samples without a trained token.

    masks     [N, T], or a sequence of N arrays [T_i]; nonzero = trained; numpy or torch
    groups    [N] integers: rows of one prompt share a number; "prompt-mean" needs them
    samples   [N] integers: rows of one group with the same number are branches of one sample (so
              they need `groups`); None: each row is a sample
    constant  of "constant-norm", above 0
    ValueError: unknown aggregation, lengths that disagree, no trained token at all, a constant or
    groups that are missing.
    """
    if aggregation not in AGGREGATIONS:
        known = ", ".join(sorted(AGGREGATIONS))
        raise ValueError(f"unknown aggregation {aggregation!r}; known: {known}")
    if groups is None and (aggregation == "prompt-mean" or samples is not None):
        what = "prompt-mean" if samples is None else "samples"
        raise ValueError(f"{what}: the groups of the rows are missing")
    if aggregation == "constant-norm" and not (constant and constant > 0):
        raise ValueError(f"constant-norm needs a constant above 0, got {constant}")
    lengths = _lengths(masks)
    num_rows = len(lengths)
    prompts = np.zeros(num_rows, np.int64) if groups is None else _numbers(groups)
    branches = np.arange(num_rows) if samples is None else _numbers(samples)
    if not num_rows == len(prompts) == len(branches):
        raise ValueError(
            f"masks, groups and samples differ in length: {num_rows}, {len(prompts)}, "
            f"{len(branches)}"
        )
    if not lengths.sum():
        raise ValueError("all tokens are masked: there is nothing to average over")
    of_sample, num_samples = _per_unit(lengths, np.stack([prompts, branches]))
    of_prompt, num_prompts = _per_unit(lengths, prompts[None])
    counts = Counts(
        of_sample=of_sample,
        of_prompt=of_prompt,
        num_tokens=lengths.sum(),
        num_samples=num_samples,
        num_prompts=num_prompts,
        constant=constant or 1.0,
    )
    inverse = np.broadcast_to(AGGREGATIONS[aggregation](counts), num_rows)
    weights: Floats = np.divide(1.0, inverse, out=np.zeros(num_rows), where=of_sample > 0)
    return weights


AGGREGATIONS: Final[dict[str, Callable[[Counts], Any]]] = {
    "token-mean": lambda c: c.num_tokens,
    "seq-mean-token-mean": lambda c: c.num_samples * c.of_sample,
    "seq-mean-token-sum": lambda c: c.num_samples,
    "constant-norm": lambda c: c.num_samples * c.constant,
    "prompt-mean": lambda c: c.num_prompts * c.of_prompt,
}
"""One over the weight of each row, or of all of them."""


def _per_unit(lengths: Floats, keys: Ints) -> tuple[Floats, float]:
    """(Trained tokens of each row's unit, how many units have any); rows whose columns of `keys`
    are equal are one unit."""
    unit = np.unique(keys, axis=1, return_inverse=True)[1].ravel()
    totals: Floats = np.bincount(unit, weights=lengths).astype(np.float64)
    return totals[unit], float((totals > 0).sum())


def _lengths(masks: Any) -> Floats:
    rows: Sequence[Any] = masks
    return np.array([float(_count(row)) for row in rows], np.float64)


def _count(row: Any) -> Any:
    return np.count_nonzero(row) if isinstance(row, np.ndarray) else (row != 0).sum()


def _numbers(values: Any) -> Ints:
    array = values.cpu().numpy() if isinstance(values, torch.Tensor) else values
    return np.asarray(array, np.int64)
