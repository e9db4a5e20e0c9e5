"""Engines in virtual time: sequences decode side by side, every one at the same speed.

An engine's clock counts the tokens that each of its sequences was served so far (`served`); it
runs slower the more sequences share it, so a sequence's end on that clock is known when it starts
whatever comes after: the next end is the top of a heap, and a version of weights is a mark on that
clock, from which the version of each token follows at the end. Sequences that find no slot, or no
room for their context, wait in one line for all engines.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from deploy.simulate.clock import NEVER
from deploy.simulate.workload import Workload

KV_FREE_SHARE: Final = 0.01
"""A sequence starts only where that share of the KV cache stays free, as vLLM's watermark has it;
else what was just preempted would overflow at once."""
ROUNDING: Final = 1e-6
"""Tokens: what sums of floats may be off."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request: `left` tokens to decode after `context`, each as long as `slow` others take.

    runs   (version, tokens) it decoded on engines it has left again, or when it ended
    first  version at its first prefill, None before
    """

    owner: Any
    context: int
    left: int
    slow: float = 1.0
    runs: list[tuple[int, int]] = field(default_factory=list)
    first: int | None = None
    engine: Engine | None = None
    began: float = 0.0  # on the engine's clock, like the next two
    decodes_from: float = 0.0
    ends: float = 0.0
    stay: int = -1  # its number, unlike that of any other stay on an engine


class Engine:
    """`num_slots` sequences at once, `kv_tokens` of context (None = enough)."""

    def __init__(self, workload: Workload, versions: list[int], stays: Iterator[int]) -> None:
        self.num_slots = workload.num_slots // workload.num_engines
        self.kv_tokens = (
            math.inf if workload.kv_tokens is None else workload.kv_tokens // workload.num_engines
        )
        self.running: dict[Sequence, None] = {}  # in order of start
        self.next_at = NEVER
        self.overflows = False  # what happens then: the KV cache is full, or a sequence ends
        self.busy_s = 0.0  # slots' seconds
        self._workload = workload
        self._versions = versions  # of the marks
        self._marks: list[float] = []
        self._now = 0.0
        self._served = 0.0
        self._ends: list[tuple[float, int, Sequence]] = []
        self._stays = stays
        self._token_s = 0.0
        self._kv_at_0 = 0.0  # the context in the cache is kv_at_0 + served * kv_per_token
        self._kv_per_token = 0.0

    def advance(self, now: float) -> None:
        if self.running:
            self._served += (now - self._now) / self._token_s
            self.busy_s += (now - self._now) * len(self.running)
        self._now = now

    def mark(self, now: float) -> None:
        """Tokens from here on are of the version just added to `versions`."""
        self.advance(now)
        self._marks.append(self._served)

    def kv_use(self) -> float:
        """Share of the KV cache in use."""
        return self._kv() / self.kv_tokens

    def has_room(self, sequence: Sequence, now: float) -> bool:
        if len(self.running) == self.num_slots:
            return False
        if not self.running or self.kv_tokens == math.inf:
            return True
        self.advance(now)
        return sequence.context <= self.kv_tokens * (1 - KV_FREE_SHARE) - self._kv()

    def start(self, sequence: Sequence, now: float) -> None:
        self.advance(now)
        self.running[sequence] = None
        self._share()
        per_s = self._workload.prefill_tokens_per_s
        # prefill shares the engine like decoding: it counts as the tokens that would take as long
        prefill = 0.0 if per_s is None else sequence.context / per_s / self._token_s
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
        """The sequence that ends now."""
        self.advance(now)
        ends, _, sequence = heapq.heappop(self._ends)
        self._served = ends
        self._leave(sequence, sequence.left)
        return sequence

    def _leave(self, sequence: Sequence, num_tokens: int) -> None:
        del self.running[sequence]
        self._count_kv(sequence, -1)
        if num_tokens:
            self._add_runs(sequence, num_tokens)
        sequence.context += num_tokens
        sequence.left -= num_tokens
        sequence.engine, sequence.stay = None, -1
        self._share()
        self._plan()

    def _add_runs(self, sequence: Sequence, num_tokens: int) -> None:
        """Token i is of the version that was held when it began, at decodes_from + i * slow; a
        slice is of one version, that of its start."""
        marks, versions = self._marks, self._versions
        if self._workload.inflight == "slices":
            at = bisect_right(marks, sequence.began) - 1
            sequence.runs.append((versions[at], num_tokens))
            return
        first, done = bisect_right(marks, sequence.decodes_from + ROUNDING) - 1, 0
        for at in range(first, len(marks) - 1):
            older = (marks[at + 1] - sequence.decodes_from) / sequence.slow
            upto = min(num_tokens, math.ceil(older - ROUNDING))
            if upto > done:
                sequence.runs.append((versions[at], upto - done))
                done = upto
            if done == num_tokens:
                return
        sequence.runs.append((versions[-1], num_tokens - done))

    def _share(self) -> None:
        """The speed at which so many run."""
        w = self._workload
        self._token_s = w.token_s + w.token_s_per_sequence * len(self.running)

    def _kv(self) -> float:
        return self._kv_at_0 + self._served * self._kv_per_token

    def _count_kv(self, sequence: Sequence, sign: int) -> None:
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
        full = (self.kv_tokens - self._kv_at_0) / self._kv_per_token
        self.overflows = full < due - ROUNDING and len(self.running) > 1
        due = full if self.overflows else due
        self.next_at = self._now + max(0.0, due - self._served) * self._token_s


class Engines:
    """All engines and the line before them. `ended` is called with each sequence that comes to its
    end."""

    def __init__(self, workload: Workload, ended: Callable[[Sequence], None]) -> None:
        self.versions: list[int] = []
        stays = itertools.count()
        self.engines = [Engine(workload, self.versions, stays) for _ in range(workload.num_engines)]
        self._ended = ended
        self._line: OrderedDict[Sequence, None] = OrderedDict()
        self._restarts = workload.inflight == "restart"
        self._num_preempted = 0

    @property
    def num_running(self) -> int:
        return sum(len(engine.running) for engine in self.engines)

    @property
    def num_queued(self) -> int:
        return len(self._line)

    def next_at(self) -> float:
        return min(engine.next_at for engine in self.engines)

    def happen(self, now: float) -> None:
        """What is due now: a sequence ends, or is preempted and waits first in line."""
        engine = min(self.engines, key=_next_at)
        if engine.overflows:
            preempted = next(reversed(engine.running))
            engine.stop(preempted, now)
            self._line[preempted] = None
            self._line.move_to_end(preempted, last=False)
            self._num_preempted += 1
            self._fill(now)
            return
        sequence = engine.finish(now)
        self._fill(now)
        self._ended(sequence)

    def submit(self, sequence: Sequence, now: float) -> None:
        self._line[sequence] = None
        self._fill(now)

    def withdraw(self, sequence: Sequence, now: float) -> None:
        """Off its engine or out of the line; its `runs` say what it decoded."""
        if sequence.engine is not None:
            sequence.engine.stop(sequence, now)
            self._fill(now)
        else:
            self._line.pop(sequence, None)

    def hold(self, version: int, now: float) -> int:
        """All engines hold these weights now. The number of tokens lost, where a new version
        restarts what runs."""
        self.versions.append(version)
        for engine in self.engines:
            engine.mark(now)
        return self._restart(now) if self._restarts else 0

    def busy_s(self, now: float) -> float:
        """Seconds that slots ran a sequence, all slots together."""
        for engine in self.engines:
            engine.advance(now)
        return sum(engine.busy_s for engine in self.engines)

    def kv_use(self, now: float) -> float:
        """Share of its KV cache that the fullest one uses."""
        for engine in self.engines:
            engine.advance(now)
        return max(engine.kv_use() for engine in self.engines)

    def take_num_preempted(self) -> int:
        """Sequences preempted since this was last asked."""
        taken, self._num_preempted = self._num_preempted, 0
        return taken

    def _restart(self, now: float) -> int:
        num_lost = sum(_forget(sequence) for sequence in self._line)
        for engine in self.engines:
            running = tuple(engine.running)
            for sequence in running:
                engine.stop(sequence, now)
                num_lost += _forget(sequence)
            for sequence in running:
                engine.start(sequence, now)
        return num_lost

    def _fill(self, now: float) -> None:
        while self._line:
            sequence = next(iter(self._line))
            for engine in sorted(self.engines, key=_num_running):
                if engine.has_room(sequence, now):
                    break
            else:
                return
            del self._line[sequence]
            engine.start(sequence, now)


def _next_at(engine: Engine) -> float:
    return engine.next_at


def _num_running(engine: Engine) -> int:
    return len(engine.running)


def _forget(sequence: Sequence) -> int:
    """The request begins again; the number of tokens lost."""
    num_lost = sum(tokens for _, tokens in sequence.runs)
    sequence.context -= num_lost
    sequence.left += num_lost
    sequence.runs.clear()
    sequence.first = None
    return num_lost
