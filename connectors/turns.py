"""The turns of a sample: which tokens the policy wrote in one go.

A turn is a maximal run of trainable tokens. What a branch shares with an earlier one is trainable
only there, so over all branches of a sample no turn counts twice.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def turns_of(masks: Iterable[NDArray[np.int8]]) -> list[NDArray[np.int64]]:
    """The turn of each token, [T_i] a row, -1 where there is none; `masks` (nonzero = trainable)
    are those of one sample's rows, in order, and turns are numbered on from row to row."""
    found, num = [], 0
    for mask in masks:
        written = np.asarray(mask) != 0
        begins = written.copy()
        begins[1:] &= ~written[:-1]
        found.append(np.where(written, num + np.cumsum(begins) - 1, -1))
        num += int(begins.sum())
    return found


def ends_of(masks: Iterable[NDArray[np.int8]]) -> list[tuple[int, int]]:
    """(row, token) of each turn's last token, in the turns' order."""
    found: list[tuple[int, int]] = []
    for row, mask in enumerate(masks):
        last = np.asarray(mask) != 0
        last[:-1] &= ~last[1:]
        found += [(row, token) for token in last.nonzero()[0].tolist()]
    return found
