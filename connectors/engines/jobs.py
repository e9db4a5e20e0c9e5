"""A request in an engine, from its arrival to the last time someone may ask for it again."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from connectors.engines.sequence import Sequence
from connectors.engines.types import Completion, GenerateRequest
from connectors.records import Version


@dataclass(slots=True, eq=False)
class Job:
    """One running or queued request. `waiting` are its samples that have no place in the batch yet;
    `result` ends with the completions, in sample order."""

    request: GenerateRequest
    samples: list[Sequence]
    result: asyncio.Future[tuple[Completion, ...]]
    waiting: deque[Sequence] = field(default_factory=deque)
    completions: dict[int, Completion] = field(default_factory=dict)
    num_waiters: int = 0
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def may_start_at(self, version: Version | None) -> bool:
        least = self.request.min_version
        return version is not None and (least is None or version >= least)

    def is_past(self, version: Version | None) -> bool:
        """Whether it could only have begun before."""
        most = self.request.max_version
        return version is not None and most is not None and version > most

    def has_missed(self, version: Version | None) -> bool:
        """Whether, now that `version` is held, a sample begins too late: it began so, or it waits,
        or is in the batch, without a token."""
        return self.is_past(version) and any(
            not sample.versions or self.is_past(sample.versions[0]) for sample in self.samples
        )

    def complete(self, sample: int, completion: Completion) -> bool:
        """True when it was the last one."""
        self.completions[sample] = completion
        return len(self.completions) == len(self.samples)

    def ordered(self) -> tuple[Completion, ...]:
        return tuple(self.completions[k] for k in range(len(self.samples)))


@dataclass(frozen=True, slots=True)
class _Kept:
    request: GenerateRequest
    completions: tuple[Completion, ...]
    until: float


class FinishedJobs:
    """Results that may still be asked for: the newest `max_count`, for `keep_s` seconds each."""

    def __init__(
        self, *, max_count: int, keep_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_count, self._keep_s, self._clock = max_count, keep_s, clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def keep(self, request: GenerateRequest, completions: tuple[Completion, ...]) -> None:
        self._kept.pop(request.request_id, None)
        self._kept[request.request_id] = _Kept(request, completions, self._clock() + self._keep_s)
        self._trim()

    def find(self, request_id: str) -> tuple[GenerateRequest, tuple[Completion, ...]] | None:
        self._trim()
        kept = self._kept.get(request_id)
        return None if kept is None else (kept.request, kept.completions)

    def forget(self, request_id: str) -> None:
        self._kept.pop(request_id, None)

    def _trim(self) -> None:
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if len(self._kept) <= self._max_count and oldest.until > self._clock():
                return
            self._kept.popitem(last=False)
