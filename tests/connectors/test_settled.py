"""Settled offsets: each is new once, in a state that stays small."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from connectors.settled import Intervals, includes, settle


@given(st.lists(st.integers(0, 30)))
def test_an_offset_is_new_exactly_once(offsets: list[int]) -> None:
    settled: Intervals = ()
    seen: set[int] = set()
    for offset in offsets:
        settled, new = settle(settled, offset)
        assert new == (offset not in seen)
        seen.add(offset)
        assert {x for a, b in settled for x in range(a, b)} == seen
        assert [includes(settled, x) for x in range(-1, 32)] == [x in seen for x in range(-1, 32)]
        assert all(b < c for (_, b), (c, _) in pairwise(settled))


def test_a_log_that_ends_in_order_is_one_interval() -> None:
    settled: Intervals = ()
    for offset in range(1000, 2000):
        settled, _ = settle(settled, offset)
    assert settled == ((1000, 2000),)
