"""Which prompt offsets of one partition already had their terminal: the first one wins.

The state is a sorted list of disjoint intervals, so it stays a few numbers however long the run:
groups end out of order, but within a bounded window.
"""

from __future__ import annotations

from bisect import bisect_right

Intervals = tuple[tuple[int, int], ...]
"""Settled offsets as half-open [start, end), ascending, never touching."""


def settle(settled: Intervals, offset: int) -> tuple[Intervals, bool]:
    """The intervals with `offset` in them, and whether it is new."""
    at = bisect_right(settled, (offset, float("inf")))
    start, end = offset, offset + 1
    if at > 0 and settled[at - 1][1] > offset:
        return settled, False
    before, after = list(settled[:at]), list(settled[at:])
    if before and before[-1][1] == start:
        start = before.pop()[0]
    if after and after[0][0] == end:
        end = after.pop(0)[1]
    return (*before, (start, end), *after), True
