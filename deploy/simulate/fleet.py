"""All engines of a run, and the one line before them: what finds no slot, or no room for its
context, waits there."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable

from deploy.simulate.clock import Clock
from deploy.simulate.engines import Engine, Sequence
from deploy.simulate.workload import Workload


class Fleet:
    """`ended` is called with each sequence that comes to its end; it says whether that concerns
    anybody but engines."""

    def __init__(self, workload: Workload, clock: Clock, ended: Callable[[Sequence], bool]) -> None:
        self.versions: list[int] = []
        stays = itertools.count()
        self.engines = [Engine(workload, self.versions, stays) for _ in range(workload.num_engines)]
        self._clock = clock
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

    def busy_s(self) -> float:
        """Seconds that slots ran a sequence, all slots together."""
        for engine in self.engines:
            engine.advance(self._clock.now)
        return sum(engine.busy_s for engine in self.engines)

    def kv_use(self) -> float:
        """Share of its KV cache that the fullest one uses."""
        for engine in self.engines:
            engine.advance(self._clock.now)
        return max(engine.kv_use() for engine in self.engines)

    def take_num_preempted(self) -> int:
        """Sequences preempted since this was last asked."""
        taken, self._num_preempted = self._num_preempted, 0
        return taken

    def submit(self, sequence: Sequence) -> None:
        self._line[sequence] = None
        self._fill()

    def withdraw(self, sequence: Sequence) -> None:
        """Off its engine or out of the line; its `runs` say what it decoded."""
        if sequence.engine is not None:
            sequence.engine.stop(sequence, self._clock.now)
            self._fill()
        else:
            self._line.pop(sequence, None)

    def hold(self, version: int) -> int:
        """All engines hold these weights. The number of tokens lost, where new weights restart
        what runs."""
        self.versions.append(version)
        for engine in self.engines:
            engine.mark(self._clock.now)
        return self._restart() if self._restarts else 0

    def run(self, until: float) -> bool:
        """To the next end that concerns somebody else; False, the clock untouched, when nothing
        happens on any engine before `until`."""
        happened = False
        while (engine := self._soonest()).next_at < until:
            self._clock.now = engine.next_at
            happened = True
            if engine.overflows:
                self._preempt(engine)
                continue
            sequence = engine.finish(engine.next_at)
            if self._line:
                self._fill()
            if self._ended(sequence):
                break
        return happened

    def _soonest(self) -> Engine:
        found = self.engines[0]
        for engine in self.engines:
            if engine.next_at < found.next_at:
                found = engine
        return found

    def _preempt(self, engine: Engine) -> None:
        """What started last waits, first in line."""
        sequence = next(reversed(engine.running))
        engine.stop(sequence, self._clock.now)
        self._num_preempted += 1
        self._line[sequence] = None
        self._line.move_to_end(sequence, last=False)
        self._fill()

    def _restart(self) -> int:
        now = self._clock.now
        num_lost = sum(sequence.forget() for sequence in self._line)
        for engine in self.engines:
            running = tuple(engine.running)
            for sequence in running:
                engine.stop(sequence, now)
                num_lost += sequence.forget()
            for sequence in running:
                engine.start(sequence, now)
        return num_lost

    def _fill(self) -> None:
        """Starts the line in order, each on the engine that runs least."""
        now = self._clock.now
        while self._line:
            sequence, found = next(iter(self._line)), None
            for engine in self.engines:
                less = found is None or len(engine.running) < len(found.running)
                if less and engine.has_room(sequence, now):
                    found = engine
            if found is None:
                return
            del self._line[sequence]
            found.start(sequence, now)
