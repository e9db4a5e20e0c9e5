"""Advantages of a step's rows: rewards and groups enter, one number a token leaves.

numpy or torch in, the same out. The rows are cut into units of credit (`trainer.units`), an
estimator (`trainer.estimators`, by name) gives each unit its advantage, and every trained token
gets that of its unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from connectors.algorithms import Estimator, estimator
from trainer.estimators import ESTIMATORS, Floats, Ints
from trainer.units import Rows, of_samples, of_tokens, of_turns

Array = TypeVar("Array", NDArray[Any], torch.Tensor)


def advantage(
    name: str,
    rewards: Array,
    groups: Array,
    mask: Array | Sequence[Array],
    *,
    samples: Array | None = None,
    token_rewards: Array | Sequence[Array] | None = None,
    turns: Array | Sequence[Array] | None = None,
    discount: float = 1.0,
    values: Array | None = None,
    row_names: Sequence[str] | None = None,
    **parameters: Any,
) -> Any:
    """The advantage of every token, shaped like `mask`; 0 where the mask is 0.

    rewards        [N], finite; of the row's whole sample
    groups         [N] integers: rows of one prompt share a number
    mask           [N, T], or a sequence of N arrays [T_i]; nonzero = trained
    samples        [N] integers or None: rows of one group with the same number are branches of one
                   sample, hold the same reward and value, and count once in the group's statistics
    token_rewards  shaped like `mask`: which parts of `rewards` were earned where. The rest of a
                   sample's reward is earned at its end, so it is the same in all, however it is
                   split
    turns          integers shaped like `mask`: the turn of its sample that a token belongs to, -1:
                   none. With them a turn, not a sample, is the unit: its value is its own reward
                   plus `discount` times the next turn's value, and the group's statistics run over
                   all turns of its samples
    values         [N]: the baseline of each row, for estimators that need one
    row_names      [N]: named in errors beside the row's number
    parameters     the estimator's own; those of the tracker its values come from play no part

    Answers in the kind (numpy or torch) of `mask` and the float type of `rewards`.
    ValueError, naming the row or group: an unknown estimator or parameter, lengths that disagree, a
    number that is not finite, branches that differ, a trained token without a turn, a group the
    estimator refuses, fewer than two tokens to whiten over.
    """
    chosen = estimator(name, parameters)
    masks: list[NDArray[Any]] = [_numpy(row) for row in mask]
    num = len(masks)
    rows = Rows(
        lengths=np.array([len(row) for row in masks], np.int64),
        mask=np.concatenate([np.zeros(0, np.bool_), *masks]) != 0,
        rewards=_numpy(rewards).astype(np.float64),
        groups=_numpy(groups).astype(np.int64),
        samples=np.arange(num) if samples is None else _numpy(samples).astype(np.int64),
        values=np.zeros(num) if values is None else _numpy(values).astype(np.float64),
        names=row_names,
    )
    if chosen.needs_value and values is None:
        raise ValueError(f"{name} needs values, the baseline of each row")
    if chosen.per_token and turns is not None:
        raise ValueError(f"{name} gives each token a return of its own: it takes no turns")
    if not 0 <= discount <= 1:
        raise ValueError(f"discount must be between 0 and 1, got {discount}")
    rows.check()
    _check_usable(name, chosen, rows)
    parts = rows.parts(None if token_rewards is None else [_numpy(r) for r in token_rewards])
    own = {key: parameters[key] for key in chosen.parameters.keys() & parameters.keys()}
    if chosen.per_token:
        default = chosen.parameters["gamma"].default
        units, unit_of_token = of_tokens(rows, parts, own.pop("gamma", default))
    elif turns is not None:
        units, unit_of_token = of_turns(rows, [_numpy(row) for row in turns], parts, discount)
    else:
        units, unit_of_token = of_samples(rows)
    if chosen.needs_group:
        ids, sizes = np.unique(units.groups, return_counts=True)
        for group in ids[sizes < 2]:
            raise ValueError(f"group {group} has one turn; {name} needs at least two")
    per_unit = ESTIMATORS[name](units, **own)
    of_token = np.append(per_unit, 0.0)[unit_of_token]  # -1, no unit, gets the 0
    return _shaped(of_token, rows.lengths, mask, rewards)


def _check_usable(name: str, chosen: Estimator, rows: Rows) -> None:
    """What the estimator refuses, as a table says it (connectors/algorithms.py)."""
    low = np.flatnonzero(rows.rewards < chosen.least)
    if len(low):
        raise ValueError(
            f"the reward of {rows.label(low[0])} is {rows.rewards[low[0]]}; "
            f"{name} needs rewards of at least {chosen.least:g}"
        )
    if chosen.needs_group:
        pairs = np.unique(np.stack([rows.groups, rows.samples]), axis=1)[0]
        ids, sizes = np.unique(pairs, return_counts=True)
        for group in ids[sizes < 2]:
            row = int(np.flatnonzero(rows.groups == group)[0])
            raise ValueError(
                f"group {group} has one sample, {rows.label(row)}; {name} needs at least two"
            )
    if chosen.whitens and (num := int(rows.mask.sum())) < 2:
        where = f", in {rows.place(int(rows.mask.argmax()))[1]}" if num else ": all are masked"
        raise ValueError(f"{name} whitens over at least two trained tokens, got {num}{where}")


def _shaped(of_token: Floats, lengths: Ints, mask: Any, rewards: Any) -> Any:
    """`of_token` [E] in the shape and kind of `mask`, in the float type of `rewards`."""
    dtype = getattr(rewards, "dtype", None)
    if isinstance(dtype, np.dtype) and np.issubdtype(dtype, np.floating):
        of_token = of_token.astype(dtype, copy=False)
    if isinstance(mask, np.ndarray | torch.Tensor):
        return _like(of_token.reshape(tuple(mask.shape)), mask, rewards)
    bounds = pairwise([0, *np.cumsum(lengths).tolist()])
    return [_like(of_token[a:b], row, rewards) for (a, b), row in zip(bounds, mask, strict=True)]


def _like(tokens: Floats, mask: Any, rewards: Any) -> Any:
    if not isinstance(mask, torch.Tensor):
        return tokens
    floats = isinstance(rewards, torch.Tensor) and rewards.is_floating_point()
    return torch.as_tensor(
        tokens, dtype=rewards.dtype if floats else torch.float32, device=mask.device
    )


def _numpy(values: Any) -> NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
