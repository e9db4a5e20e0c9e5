"""Rows of one group for the tests of packed forward passes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.batches import Rows
from trainer.packing import Pack, pack


def rows_of(lengths: Sequence[int], *, shared: int = 0, num_ids: int = 260) -> Rows:
    """Random tokens; rows longer than `shared` begin with the same so many. The second half of each
    is trained."""
    rng = np.random.default_rng(sum(lengths))
    prompt = rng.integers(0, num_ids, shared)
    tokens = [rng.integers(0, num_ids, length).astype(np.int32) for length in lengths]
    for row in tokens:
        if len(row) > shared:
            row[:shared] = prompt
    return Rows(
        ids=tuple(f"g/{i}" for i in range(len(tokens))),
        tokens=tuple(tokens),
        masks=tuple(np.arange(len(row)) >= max(1, len(row) // 2) for row in tokens),
        logprobs=tuple(np.zeros(len(row), np.float32) for row in tokens),
        rewards=np.zeros(len(tokens)),
        groups=np.zeros(len(tokens), np.int64),
    )


def pack_of(rows: Rows, order: Sequence[int] | None = None) -> Pack:
    """All of them, without advantages."""
    indices = range(len(rows)) if order is None else order
    return pack(rows, indices, [np.zeros(len(tokens)) for tokens in rows.tokens])
