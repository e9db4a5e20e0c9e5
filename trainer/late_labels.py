"""Late labels: groups of live traffic that correct the label another one was trained with.

Such a group has the rows of the one it corrects, which the policy was moved by according to the old
label. What the new one adds is the difference, so its tokens get that as their advantage, whatever
the estimator, and no part in what that normalises over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from connectors.algorithms import MOST_REWARD
from connectors.branches import BEFORE, CORRECTS
from connectors.records import Group
from trainer.batches import Rows


def is_correction(group: Group) -> bool:
    return any(CORRECTS in t.metadata for t in group.trajectories)


def before(group: Group) -> float:
    """The label that a correction corrects, as the record of that group holds it; NaN where it says
    none."""
    try:
        said = float(group.trajectories[0].metadata.get(BEFORE, ""))
    except ValueError:
        return math.nan
    with np.errstate(over="ignore"):
        return float(np.float32(said))


def gain(group: Group) -> float:
    """The new label less the old one."""
    return group.trajectories[0].reward - before(group)


def problem(group: Group) -> str | None:
    """Why a correction cannot be trained, or None."""
    if not is_correction(group) or abs(before(group)) <= MOST_REWARD:
        return None
    said = group.trajectories[0].metadata.get(BEFORE)
    return f"it corrects a label, but says that label was {said!r} ({BEFORE})"


def corrected(rows: Rows, groups: Sequence[Group]) -> NDArray[np.bool_]:
    """[N], which rows are corrections'."""
    of_group = np.array([is_correction(group) for group in groups], np.bool_)
    found: NDArray[np.bool_] = of_group[rows.groups]
    return found


def advantages(rows: Rows, groups: Sequence[Group]) -> list[NDArray[np.float64]]:
    """[T_i] a row: the difference at each trained token; 0 in rows that correct nothing."""
    gains = np.array([gain(group) if is_correction(group) else 0.0 for group in groups])
    return [gains[g] * mask for g, mask in zip(rows.groups, rows.masks, strict=True)]


def alone(rows: Rows, groups: Sequence[Group]) -> Rows:
    """Only the tokens of corrections are trained."""
    kept = corrected(rows, groups)
    masks = (mask if k else np.zeros_like(mask) for mask, k in zip(rows.masks, kept, strict=True))
    return replace(rows, masks=tuple(masks))
