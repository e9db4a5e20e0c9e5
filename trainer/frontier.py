"""A set of offsets that is mostly everything below some offset: a frontier and the few above it."""

from __future__ import annotations

from collections.abc import Iterable


class Frontier:
    """Offsets below `at`, and those in `above`."""

    def __init__(self, at: int = 0, above: Iterable[int] = ()) -> None:
        self.at = at
        self._above = set(above)

    @property
    def above(self) -> tuple[int, ...]:
        return tuple(sorted(self._above))

    def __contains__(self, offset: int) -> bool:
        return offset < self.at or offset in self._above

    def add(self, offset: int) -> None:
        """ValueError if it is in already: what settles twice was counted twice."""
        if offset in self:
            raise ValueError(f"offset {offset} is settled already")
        self._above.add(offset)
        while self.at in self._above:
            self._above.remove(self.at)
            self.at += 1
