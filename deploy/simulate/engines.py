"""An engine in virtual time: samples decode side by side, every one at the same speed.

Its own clock counts the tokens that each of its samples was served so far (`served`); it runs
slower the more of them share the engine. On that clock a sample's end is known when it starts,
whatever comes after: the next end is the top of a heap, and new weights are a mark on that clock,
from which the versions of a sample's tokens follow at its end.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from deploy.simulate.clock import NEVER
from deploy.simulate.workload import Workload

KV_FREE_SHARE: Final = 0.01
"""A sample starts only where that share of the KV cache stays free, as vLLM's watermark has it;
else what was just preempted would overflow at once."""
ROUNDING: Final = 1e-6
"""Tokens: what sums of floats may be off."""

Runs = list[tuple[int, int]]
"""(version, tokens), in the order they were decoded."""


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """Samples that are equally far.

    group    what it is withdrawn by
    context  tokens that each of them has, which an engine prefills once
    lefts    tokens to decode, of each sample; on an engine in descending order
    slow     how many times as long as others its tokens take
    runs     what each of them decoded on engines that it left again
    first    version at their first prefill, None before
    """

    group: Any
    context: int
    lefts: list[int]
    slow: float = 1.0
    runs: Runs = field(default_factory=list)
    first: int | None = None
    stay: int = -1  # its number, unlike that of any other stay on any engine
    began: float = 0.0  # on the engine's clock, like the next one
    decodes_from: float = 0.0

    def split(self, num_samples: int) -> Self:
        """The first of its samples, as a request of their own; it keeps the others."""
        part = replace(self, lefts=self.lefts[:num_samples], runs=list(self.runs), stay=-1)
        del self.lefts[:num_samples]
        return part

    def forget(self) -> int:
        """Begins again; the number of tokens lost, of all samples."""
        num_each = sum(num_tokens for _, num_tokens in self.runs)
        self.context -= num_each
        self.lefts = [left + num_each for left in self.lefts]
        self.runs.clear()
        self.first = None
        return num_each * len(self.lefts)


class Engine:
    """`versions`: of the weights it held, one a mark. `next_at`: the second at which a sample ends
    or, if it `overflows`, the KV cache is full."""

    def __init__(self, workload: Workload, versions: list[int], stays: Iterator[int]) -> None:
        self.num_slots = workload.num_slots // workload.num_engines
        self.num_running = 0  # samples
        self.running: dict[Request, None] = {}  # in order of start
        self.next_at = NEVER
        self.overflows = False
        self.busy_s = 0.0  # seconds that slots ran a sample
        self._kv_tokens = (
            math.inf if workload.kv_tokens is None else workload.kv_tokens // workload.num_engines
        )
        self._fixed_s = workload.token_s
        self._s_per_sequence = workload.token_s_per_sequence
        self._prefill_tokens_per_s = workload.prefill_tokens_per_s or math.inf
        self._in_slices = workload.inflight == "slices"
        self._versions = versions
        self._stays = stays
        self._marks: list[float] = []
        self._now = 0.0
        self._served = 0.0
        self._token_s = self._fixed_s  # with as many as run
        self._ends: list[tuple[float, int, Request]] = []  # of each one's next sample
        self._kv_at_0 = 0.0  # the context in the cache is kv_at_0 + served * kv_per_token
        self._kv_per_token = 0.0

    def advance(self, now: float) -> None:
        if now > self._now and self.num_running:
            self._served += (now - self._now) / self._token_s
            self.busy_s += (now - self._now) * self.num_running
        self._now = now

    def mark(self, now: float) -> None:
        """From here on it holds the version just added to `versions`."""
        self.advance(now)
        self._marks.append(self._served)

    def kv_use(self, now: float) -> float:
        """Share of the KV cache in use."""
        self.advance(now)
        return self._kv() / self._kv_tokens

    def num_fitting(self, context: int, now: float) -> int:
        """Samples of that context that may start."""
        free = self.num_slots - self.num_running
        if self._kv_tokens == math.inf or not free:
            return free
        self.advance(now)
        room = self._kv_tokens * (1 - KV_FREE_SHARE) - self._kv()
        fitting = min(free, max(0, int(room // max(1, context))))
        return fitting if self.num_running else max(1, fitting)

    def start(self, request: Request, now: float) -> None:
        self.advance(now)
        num_samples = len(request.lefts)
        request.lefts.sort(reverse=True)
        self.running[request] = None
        self._count(num_samples)
        # prefill shares the engine like decoding: it counts as the tokens that would take as long
        prefill = request.context / self._prefill_tokens_per_s / self._token_s
        request.began = self._served
        request.decodes_from = self._served + prefill
        request.stay = next(self._stays)
        if request.first is None:
            request.first = self._versions[-1]
        self._count_kv(request, num_samples)
        heapq.heappush(self._ends, (self._next_end(request), request.stay, request))
        self._plan()

    def stop(self, request: Request, now: float) -> None:
        """Takes it off before its end; what each sample decoded is in its `runs` and `context`."""
        self.advance(now)
        self._remove(request, len(request.lefts))
        self._keep(request)

    def preempt(self, now: float) -> Request:
        """Stops one sample of what started last."""
        self.advance(now)
        request = next(reversed(self.running))
        if len(request.lefts) == 1:
            self._remove(request, 1)
        else:
            request = request.split(1)  # the longest: the next end is that of another one
            self._count(-1)
            self._count_kv(request, -1)
            self._plan()
        self._keep(request)
        return request

    def finish(self, now: float) -> tuple[Request, Runs]:
        """Takes off the sample that ends now, and what it decoded in all."""
        self.advance(now)
        self._served, _, request = self._ends[0]
        num_tokens = request.lefts.pop()
        if request.lefts:
            self._count(-1)
            self._count_kv(request, -1)
            heapq.heapreplace(self._ends, (self._next_end(request), request.stay, request))
            self._plan()
        else:
            self._remove(request, 1)
        return request, request.runs + self._runs(request, num_tokens)

    def _next_end(self, request: Request) -> float:
        return request.decodes_from + request.lefts[-1] * request.slow

    def _remove(self, request: Request, num_samples: int) -> None:
        del self.running[request]
        request.stay = -1
        self._count(-num_samples)
        self._count_kv(request, -num_samples)
        self._plan()

    def _keep(self, request: Request) -> None:
        """What each sample decoded since its start."""
        done = int((self._served - request.decodes_from) / request.slow + ROUNDING)
        done = min(request.lefts[-1], max(0, done))
        if done:
            request.runs += self._runs(request, done)
        request.context += done
        request.lefts = [left - done for left in request.lefts]

    def _runs(self, request: Request, num_tokens: int) -> Runs:
        """Token i is of the version that was held when it began, at decodes_from + i * slow; a
        slice is of one version, that of its start."""
        marks, versions = self._marks, self._versions
        if self._in_slices:
            return [(versions[bisect_right(marks, request.began) - 1], num_tokens)]
        at, done, runs = bisect_right(marks, request.decodes_from + ROUNDING), 0, []
        for mark in marks[at:]:
            upto = math.ceil((mark - request.decodes_from) / request.slow - ROUNDING)
            if upto >= num_tokens:
                break
            if upto > done:
                runs.append((versions[at - 1], upto - done))
                done = upto
            at += 1
        runs.append((versions[at - 1], num_tokens - done))
        return runs

    def _count(self, num_samples: int) -> None:
        self.num_running += num_samples
        self._token_s = self._fixed_s + self._s_per_sequence * self.num_running

    def _kv(self) -> float:
        return self._kv_at_0 + self._served * self._kv_per_token

    def _count_kv(self, request: Request, num_samples: int) -> None:
        if self._kv_tokens == math.inf:
            return
        per_token = num_samples / request.slow
        self._kv_per_token += per_token
        self._kv_at_0 += num_samples * request.context - request.decodes_from * per_token
        if not self.num_running:  # forgets what sums of floats are off
            self._kv_per_token = self._kv_at_0 = 0.0

    def _plan(self) -> None:
        ends = self._ends
        while ends and ends[0][1] != ends[0][2].stay:
            heapq.heappop(ends)
        if not ends:
            self.next_at = NEVER
            return
        left = ends[0][0] - self._served
        if self._kv_per_token:
            until_full = (self._kv_tokens - self._kv()) / self._kv_per_token
            self.overflows = until_full < left - ROUNDING and self.num_running > 1
            left = until_full if self.overflows else left
        self.next_at = self._now + left * self._token_s if left > 0 else self._now
