"""Which offsets of a partition have ended, where most offsets never do: a bit each, of the latest.

A near-line group is named by one call of its session or one feedback, so between two that end lie
any number that name none: there is no frontier, and the gaps of an interval set would only grow.
"""

from __future__ import annotations

from typing import Final

from trainer.feed_state import Bits

WINDOW: Final = 1 << 20
"""Offsets that are remembered at least, below the highest that ended; at most twice as many."""


class Remembered:
    """Offsets below `floor` are forgotten."""

    def __init__(self, bits: Bits | None = None) -> None:
        bits = bits or Bits()
        self.floor = bits.floor
        self._bits = bytearray(bits.bits)

    def has(self, offset: int) -> bool | None:
        """Whether it has ended; None where that is forgotten."""
        at = offset - self.floor
        if at < 0:
            return None
        return at >> 3 < len(self._bits) and bool(self._bits[at >> 3] >> (at & 7) & 1)

    def add(self, offset: int) -> None:
        """It ended. One that is forgotten stays so."""
        if offset - self.floor >= 2 * WINDOW:
            floor = (offset - WINDOW) & ~7
            del self._bits[: (floor - self.floor) >> 3]
            self.floor = floor
        at = offset - self.floor
        if at < 0:
            return
        self._bits.extend(bytes(max(0, (at >> 3) + 1 - len(self._bits))))
        self._bits[at >> 3] |= 1 << (at & 7)

    def bits(self) -> Bits:
        return Bits(self.floor, bytes(self._bits))
