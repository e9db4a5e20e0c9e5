"""Which engine a waiting request goes to, as a function of how the engines stand.

An engine gets nothing while it is down, while it cannot start the request though another can, or
while it is full. Of the rest a request prefers one that did not fail it, then one that failed
nobody lately, then the one that has its session, then the least loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from connectors.engines.types import GenerateRequest
from connectors.records import Version


@dataclass(slots=True, kw_only=True, eq=False)
class Standing:
    """How an engine stands, as last seen. `num_sent` counts this pool's samples there now, `limit`
    is the most there may be; `num_others` are everybody else's. `doubted` until then (loop time):
    it failed a request."""

    url: str
    up: bool = False
    leaving: bool = False
    version: Version | None = None
    limit: int = 1
    num_sent: int = 0
    num_others: int = 0
    doubted: float = float("-inf")

    def can_start(self, least: Version | None, most: Version | None = None) -> bool:
        if self.version is None or self.is_past(most):
            return False
        return least is None or self.version >= least

    def is_past(self, most: Version | None) -> bool:
        """Whether it can start nothing any more that is to begin at `most` at the latest."""
        return most is not None and self.version is not None and self.version > most

    def has_room(self, num_samples: int) -> bool:
        """One request is always let in: a limit must not hold a large one for ever."""
        return self.num_sent == 0 or self.num_sent + num_samples <= self.limit

    @property
    def load(self) -> float:
        return (self.num_sent + self.num_others) / self.limit


S = TypeVar("S", bound=Standing)


def able(request: GenerateRequest, tried: Collection[str], engines: Sequence[S]) -> list[S]:
    """The engines to go to, or to wait for: they can start the request, and, as long as one is
    left, did not fail it yet. None: it waits for a version, or for an engine."""
    least, most = request.min_version, request.max_version
    can = [e for e in engines if e.up and not e.leaving and e.can_start(least, most)]
    return [e for e in can if e.url not in tried] or can


def best(engines: Sequence[S], home: str | None, num_samples: int, now: float) -> S | None:
    """The engine of `engines` to send to now; None when all are full."""
    free = [e for e in engines if e.has_room(num_samples)]
    return min(free, key=lambda e: (e.doubted > now, e.url != home, e.load), default=None)
