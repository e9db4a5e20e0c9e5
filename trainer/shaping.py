"""Rewards shaped by length: lengths enter, what is added to the rewards leaves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def overlong(
    lengths: ArrayLike, *, max_length: int, buffer: int, penalty: float = 1.0
) -> NDArray[np.float64]:
    """[N], what is added to each reward, in [-penalty, 0]: DAPO's soft overlong punishment
    (arXiv:2503.14476).

    lengths     [N], trainable tokens
    max_length  what is longer gets the whole penalty
    buffer      the last tokens below it, over which the penalty grows linearly from 0
    penalty     1 in the paper

    ValueError for a length below 0, a buffer outside [1, max_length] or a penalty below 0.
    """
    tokens: NDArray[Any] = np.asarray(lengths)
    if (tokens < 0).any():
        raise ValueError(f"lengths must be at least 0, got {tokens.min()}")
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer must be between 1 and max_length ({max_length}), got {buffer}")
    if not (math.isfinite(penalty) and penalty >= 0):
        raise ValueError(f"penalty must be at least 0, got {penalty}")
    over = np.clip(tokens - (max_length - buffer), 0, buffer)
    return -penalty * (over / buffer) + 0.0  # no negative zero
