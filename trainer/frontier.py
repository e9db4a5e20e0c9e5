"""A set of offsets that is mostly everything below some offset: a frontier and the few above it."""

from __future__ import annotations

from connectors.settled import Intervals, includes, settle


class Frontier:
    """Offsets below `at`, and those in `above`, which begins beyond `at`. It takes two numbers for
    each gap, however much lies between two of them."""

    def __init__(self, at: int = 0, above: Intervals = ()) -> None:
        self.at = at
        self.above = above

    def __contains__(self, offset: int) -> bool:
        return offset < self.at or includes(self.above, offset)

    def add(self, offset: int) -> None:
        """ValueError if it is in already: what settles twice was counted twice."""
        if offset in self:
            raise ValueError(f"offset {offset} is settled already")
        self.above, _ = settle(self.above, offset)
        if self.above[0][0] == self.at:
            self.at, self.above = self.above[0][1], self.above[1:]
