"""Turns of a sample, by hand."""

from __future__ import annotations

import numpy as np

from connectors.turns import ends_of, turns_of


def test_a_turn_is_a_run_of_trainable_tokens_numbered_on_over_branches() -> None:
    masks = [np.array(m, np.int8) for m in ([0, 1, 1, 0, 1], [0, 0, 0], [1, 0, 0, 1, 1])]
    turns = turns_of(masks)
    assert [of.tolist() for of in turns] == [
        [-1, 0, 0, -1, 1],
        [-1, -1, -1],
        [2, -1, -1, 3, 3],
    ]
    assert ends_of(masks) == [(0, 2), (0, 4), (2, 0), (2, 4)]


def test_a_sample_without_a_trainable_token_has_no_turn() -> None:
    assert ends_of([np.zeros(3, np.int8), np.zeros(0, np.int8)]) == []
