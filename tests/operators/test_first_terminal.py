"""The first terminal wins, in a state that stays small; and which groups are stale."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.records import Group, Origin, Prompt, Segment, Trajectory, Version
from operators.settled import Intervals, settle
from operators.version_filter import is_stale


@given(st.lists(st.integers(0, 30)))
def test_an_offset_is_new_exactly_once(offsets: list[int]) -> None:
    settled: Intervals = ()
    seen: set[int] = set()
    for offset in offsets:
        settled, new = settle(settled, offset)
        assert new == (offset not in seen)
        seen.add(offset)
        assert {x for a, b in settled for x in range(a, b)} == seen
        assert all(b < c for (_, b), (c, _) in pairwise(settled))


def test_a_log_that_ends_in_order_is_one_interval() -> None:
    settled: Intervals = ()
    for offset in range(1000, 2000):
        settled, _ = settle(settled, offset)
    assert settled == ((1000, 2000),)


@pytest.mark.parametrize(
    ("drop_before", "stale"),
    [(None, False), (Version(0, 3), False), (Version(0, 4), True), (Version(1, 0), True)],
)
def test_a_group_is_as_old_as_its_oldest_token(drop_before: Version | None, stale: bool) -> None:
    origin = Origin("p", 0, 1)
    row = Trajectory(
        trajectory_id="p/0/1/0",
        group_id="p/0/1",
        task="t",
        tokens=np.zeros(4, np.int32),
        loss_mask=np.ones(4, np.int8),
        logprobs=np.zeros(4, np.float32),
        segments=(Segment(0, 2, 0, 3), Segment(2, 4, 0, 5)),
        origin=origin,
    )
    group = Group(group_id="p/0/1", prompt=Prompt(task="t", prompt="q"), trajectories=(row,))
    assert is_stale(group, drop_before) is stale
