"""Virtual time, and what is due later."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Final

NEVER: Final = math.inf

Action = Callable[[], None]


class Clock:
    """`now` in seconds. Actions due at the same time happen in the order they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()

    def later(self, seconds: float, action: Action) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), action))

    def after(self, seconds: float, action: Action) -> None:
        """As `later`, at once where it takes no time."""
        if seconds:
            self.later(seconds, action)
        else:
            action()

    def next_at(self) -> float:
        return self._due[0][0] if self._due else NEVER

    def happen(self) -> None:
        """The next action, when it is due."""
        self.now, _, action = heapq.heappop(self._due)
        action()
