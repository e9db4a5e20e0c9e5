"""Engines in virtual time: sequences decode side by side, every one at the same speed.

An engine's own clock counts the tokens that each of its sequences was served so far (`served`); it
runs slower the more of them share it. On that clock a sequence's end is known when it starts,
whatever comes after: the next end is the top of a heap, and new weights are a mark on that clock,
from which the versions of a sequence's tokens follow at its end.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from deploy.simulate.clock import NEVER
from deploy.simulate.workload import Workload

KV_FREE_SHARE: Final = 0.01
"""A sequence starts only where that share of the KV cache stays free, as vLLM's watermark has it;
else what was just preempted would overflow at once."""
ROUNDING: Final = 1e-6
"""Tokens: what sums of floats may be off."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One request: `left` tokens to decode after `context`, each as long as `slow` others take.

    runs   (version, tokens) it decoded on engines that it has left again
    first  version at its first prefill, None before
    """

    context: int
    left: int
    slow: float
    runs: list[tuple[int, int]] = field(default_factory=list)
    first: int | None = None
    engine: Engine | None = None
    began: float = 0.0  # on the engine's clock, like the next two
    decodes_from: float = 0.0
    ends: float = 0.0
    stay: int = -1  # its number, unlike that of any other stay on an engine

    def forget(self) -> int:
        """The request begins again; the number of tokens lost."""
        num_lost = sum(num_tokens for _, num_tokens in self.runs)
        self.context -= num_lost
        self.left += num_lost
        self.runs.clear()
        self.first = None
        return num_lost


class Engine:
    """`versions`: of the weights it held, one a mark. `next_at`: the second at which a sequence
    ends or, if it `overflows`, the KV cache is full."""

    def __init__(self, workload: Workload, versions: list[int], stays: Iterator[int]) -> None:
        self.num_slots = workload.num_slots // workload.num_engines
        self.running: dict[Sequence, None] = {}  # in order of start
        self.next_at = NEVER
        self.overflows = False
        self.busy_s = 0.0  # seconds that slots ran a sequence
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
        self._ends: list[tuple[float, int, Sequence]] = []
        self._kv_at_0 = 0.0  # the context in the cache is kv_at_0 + served * kv_per_token
        self._kv_per_token = 0.0

    def advance(self, now: float) -> None:
        if self.running:
            seconds = now - self._now
            self._served += seconds / self._token_s
            self.busy_s += seconds * len(self.running)
        self._now = now

    def mark(self, now: float) -> None:
        """From here on it holds the version just added to `versions`."""
        self.advance(now)
        self._marks.append(self._served)

    def kv_use(self) -> float:
        """Share of the KV cache in use, as of the last `advance`."""
        return self._kv() / self._kv_tokens

    def has_room(self, sequence: Sequence, now: float) -> bool:
        if len(self.running) == self.num_slots:
            return False
        if not self.running or self._kv_tokens == math.inf:
            return True
        self.advance(now)
        return sequence.context <= self._kv_tokens * (1 - KV_FREE_SHARE) - self._kv()

    def start(self, sequence: Sequence, now: float) -> None:
        self.advance(now)
        self.running[sequence] = None
        self._token_s = self._fixed_s + self._s_per_sequence * len(self.running)
        # prefill shares the engine like decoding: it counts as the tokens that would take as long
        prefill = sequence.context / self._prefill_tokens_per_s / self._token_s
        sequence.engine, sequence.stay = self, next(self._stays)
        sequence.began = self._served
        sequence.decodes_from = self._served + prefill
        sequence.ends = sequence.decodes_from + sequence.left * sequence.slow
        if sequence.first is None:
            sequence.first = self._versions[-1]
        self._count_kv(sequence, 1)
        heapq.heappush(self._ends, (sequence.ends, sequence.stay, sequence))
        self._plan()

    def stop(self, sequence: Sequence, now: float) -> None:
        """Takes it off before its end; what it decoded is in its `runs` and `context`."""
        self.advance(now)
        done = (self._served - sequence.decodes_from) / sequence.slow
        self._leave(sequence, min(sequence.left, max(0, int(done + ROUNDING))))

    def finish(self, now: float) -> Sequence:
        """Takes off the sequence that ends now."""
        self.advance(now)
        self._served, _, sequence = heapq.heappop(self._ends)
        self._leave(sequence, sequence.left)
        return sequence

    def _leave(self, sequence: Sequence, num_tokens: int) -> None:
        del self.running[sequence]
        self._token_s = self._fixed_s + self._s_per_sequence * len(self.running)
        self._count_kv(sequence, -1)
        if num_tokens:
            self._add_runs(sequence, num_tokens)
        sequence.context += num_tokens
        sequence.left -= num_tokens
        sequence.engine, sequence.stay = None, -1
        self._plan()

    def _add_runs(self, sequence: Sequence, num_tokens: int) -> None:
        """Token i is of the version that was held when it began, at decodes_from + i * slow; a
        slice is of one version, that of its start."""
        marks, versions = self._marks, self._versions
        begin = sequence.began if self._in_slices else sequence.decodes_from
        at, done = bisect_right(marks, begin + ROUNDING), 0
        while at < len(marks) and not self._in_slices:
            upto = math.ceil((marks[at] - begin) / sequence.slow - ROUNDING)
            if upto >= num_tokens:
                break
            if upto > done:
                sequence.runs.append((versions[at - 1], upto - done))
                done = upto
            at += 1
        sequence.runs.append((versions[at - 1], num_tokens - done))

    def _kv(self) -> float:
        return self._kv_at_0 + self._served * self._kv_per_token

    def _count_kv(self, sequence: Sequence, sign: int) -> None:
        if self._kv_tokens == math.inf:
            return
        per_token = 1 / sequence.slow
        self._kv_per_token += sign * per_token
        self._kv_at_0 += sign * (sequence.context - sequence.decodes_from * per_token)
        if not self.running:  # forgets what sums of floats are off
            self._kv_per_token = self._kv_at_0 = 0.0

    def _plan(self) -> None:
        ends = self._ends
        while ends and ends[0][1] != ends[0][2].stay:
            heapq.heappop(ends)
        if not ends:
            self.next_at = NEVER
            return
        due = ends[0][0]
        if self._kv_per_token:
            full = (self._kv_tokens - self._kv_at_0) / self._kv_per_token
            self.overflows = full < due - ROUNDING and len(self.running) > 1
            due = full if self.overflows else due
        self.next_at = self._now + max(0.0, due - self._served) * self._token_s
