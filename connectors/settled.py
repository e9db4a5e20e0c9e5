"""Which prompt offsets of one partition are settled: each of them once.

The state is a sorted list of disjoint intervals, so it stays a few numbers however long the run:
what settles out of order lies between the few that do not settle.
"""

from __future__ import annotations

from bisect import bisect_right

Intervals = tuple[tuple[int, int], ...]
"""Settled offsets as half-open [start, end), ascending, never touching."""


def includes(settled: Intervals, offset: int) -> bool:
    """Whether `offset` is in one of the intervals."""
    at = _after(settled, offset)
    return at > 0 and settled[at - 1][1] > offset


def settle(settled: Intervals, offset: int) -> tuple[Intervals, bool]:
    """The intervals with `offset` in them, and whether it is new."""
    if includes(settled, offset):
        return settled, False
    at, start, end = _after(settled, offset), offset, offset + 1
    before, after = list(settled[:at]), list(settled[at:])
    if before and before[-1][1] == start:
        start = before.pop()[0]
    if after and after[0][0] == end:
        end = after.pop(0)[1]
    return (*before, (start, end), *after), True


def _after(settled: Intervals, offset: int) -> int:
    """The first interval that begins above `offset`."""
    return bisect_right(settled, (offset, float("inf")))
