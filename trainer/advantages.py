"""Advantages of a step's rows: rewards and groups enter, one number a token leaves.

numpy or torch in, the same out. Estimators are looked up by name; each maps the rewards of the
step's samples and their groups to one advantage a sample, which `advantage` spreads over the rows'
masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Array = TypeVar("Array", NDArray[Any], torch.Tensor)


def advantage(
    name: str,
    rewards: Array,
    groups: Array,
    mask: Array | Sequence[Array],
    *,
    samples: Array | None = None,
    **parameters: Any,
) -> Any:
    """The advantage of every token, shaped like `mask`; 0 where the mask is 0.

    rewards  [N], finite; one a row
    groups   [N] integers: rows of one prompt share a number
    mask     [N, T], or a sequence of N arrays [T_i]; nonzero = trained
    samples  [N] integers or None: rows of one group with the same number are branches of one
             sample, hold the same reward, and count once in the group's statistics
    Answers in the kind (numpy or torch) of `mask` and the float type of `rewards`.
    ValueError: unknown estimator, lengths that disagree, a reward that is not finite, or a group
    the estimator cannot use (the message names it).
    """
    if name not in ESTIMATORS:
        raise ValueError(f"unknown advantage {name!r}; known: {', '.join(sorted(ESTIMATORS))}")
    values, ids = _numpy(rewards).astype(np.float64), _numpy(groups).astype(np.int64)
    branch = np.arange(len(values)) if samples is None else _numpy(samples).astype(np.int64)
    if not len(values) == len(ids) == len(branch) == len(mask):
        raise ValueError(
            f"rewards, groups, samples and mask differ in length: "
            f"{len(values)}, {len(ids)}, {len(branch)}, {len(mask)}"
        )
    _check_finite(values, ids)
    first, sample_of_row = _one_row_a_sample(values, ids, branch)
    per_sample = ESTIMATORS[name](values[first], ids[first], **parameters)
    return _spread(per_sample[sample_of_row], mask, rewards)


def grpo(rewards: Floats, groups: Ints, *, epsilon: float = 1e-6) -> Floats:
    """(R - mean) / (std + epsilon) within each group; std of a sample (n - 1), as in DeepSeekMath
    (arXiv:2402.03300) and its common implementations. Exactly 0 in a homogeneous group."""
    result = np.zeros_like(rewards)
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        if len(rows) < 2:
            raise ValueError(f"group {group} has one sample; grpo needs at least two")
        values = rewards[rows]
        if values.min() < values.max():  # else the mean's rounding would be scaled up by 1/epsilon
            result[rows] = (values - values.mean()) / (values.std(ddof=1) + epsilon)
    return result


ESTIMATORS: Final[dict[str, Callable[..., Floats]]] = {"grpo": grpo}


def homogeneous_share(rewards: Any, groups: Any) -> float:
    """Share of groups whose rewards are all equal: they carry no signal under a group baseline.
    0 without groups."""
    values, ids = _numpy(rewards), _numpy(groups)
    unique = np.unique(ids)
    same = [np.ptp(values[ids == group]) == 0 for group in unique]
    return float(np.mean(same)) if len(unique) else 0.0


def _check_finite(rewards: Floats, groups: Ints) -> None:
    bad = np.flatnonzero(~np.isfinite(rewards))
    if len(bad):
        raise ValueError(
            f"the reward of row {bad[0]} (group {groups[bad[0]]}) is {rewards[bad[0]]}; "
            "rewards must be finite"
        )


def _one_row_a_sample(rewards: Floats, groups: Ints, branch: Ints) -> tuple[Ints, Ints]:
    """(first row of each sample, sample index of each row); samples in order of first
    appearance."""
    keys: dict[tuple[int, int], int] = {}
    first: list[int] = []
    sample_of_row = np.empty(len(rewards), np.int64)
    for row, key in enumerate(zip(groups.tolist(), branch.tolist(), strict=True)):
        if key not in keys:
            keys[key] = len(first)
            first.append(row)
        sample_of_row[row] = keys[key]
        if rewards[row] != rewards[first[keys[key]]]:
            raise ValueError(
                f"rows {first[keys[key]]} and {row} are branches of sample {key[1]} of group "
                f"{key[0]} but their rewards differ: {rewards[first[keys[key]]]}, {rewards[row]}"
            )
    return np.array(first, np.int64), sample_of_row


def _spread(per_row: Floats, mask: Any, rewards: Any) -> Any:
    if not isinstance(mask, np.ndarray | torch.Tensor):
        return [_over_tokens(value, row, rewards) for value, row in zip(per_row, mask, strict=True)]
    return _over_tokens(per_row[:, None], mask, rewards)


def _over_tokens(value: Any, mask: Any, rewards: Any) -> Any:
    spread = np.where(_numpy(mask) != 0, value, 0.0)
    if isinstance(mask, torch.Tensor):
        floats = isinstance(rewards, torch.Tensor) and rewards.is_floating_point()
        return torch.as_tensor(
            spread, dtype=rewards.dtype if floats else torch.float32, device=mask.device
        )
    dtype = getattr(rewards, "dtype", None)
    is_float = isinstance(dtype, np.dtype) and np.issubdtype(dtype, np.floating)
    return spread.astype(dtype if is_float else np.float64)


def _numpy(values: Any) -> NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
