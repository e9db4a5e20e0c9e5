"""Overlong shaping against the paper's three cases, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.shaping import overlong


def test_the_penalty_grows_over_the_buffer_and_ends_at_the_maximum() -> None:
    # Maximum 20, buffer 8: free up to 12, then 1/8 a token, -1 from 20 on.
    got = overlong([0, 12, 13, 16, 20, 21, 99], max_length=20, buffer=8)
    np.testing.assert_array_equal(got, [0, 0, -1 / 8, -4 / 8, -1, -1, -1])
    assert got.dtype == np.float64
    assert not np.signbit(got[:2]).any()


def test_the_penalty_scales() -> None:
    got = overlong(np.array([16]), max_length=20, buffer=8, penalty=0.5)
    assert got.tolist() == [-0.25]
    assert overlong([99], max_length=20, buffer=8, penalty=0.0).tolist() == [0.0]


def test_a_buffer_may_be_the_whole_length_and_a_step_without_rows_is_empty() -> None:
    assert overlong([5], max_length=10, buffer=10).tolist() == [-0.5]
    assert overlong([], max_length=10, buffer=10).shape == (0,)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": [3, -1]}, "lengths must be at least 0, got -1"),
        ({"buffer": 0}, "buffer must be between 1 and max_length"),
        ({"buffer": 11}, r"between 1 and max_length \(10\), got 11"),
        ({"penalty": -1.0}, "penalty must be at least 0, got -1"),
        ({"penalty": float("nan")}, "penalty must be at least 0, got nan"),
    ],
)
def test_what_makes_no_sense_is_refused(changed: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"lengths": [1], "max_length": 10, "buffer": 4}
    with pytest.raises(ValueError, match=message):
        overlong(**(given | changed))  # type: ignore[arg-type]
