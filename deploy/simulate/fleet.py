"""All engines of a run, and the one line before them: what finds no slot, or no room for its
context, waits there."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from deploy.simulate.clock import Clock
from deploy.simulate.engines import Engine, Request, Runs
from deploy.simulate.workload import Workload


class Fleet:
    """`ended` is called with each sample that comes to its end, by its request, and with what it
    decoded; it says whether that concerns anybody but engines."""

    def __init__(
        self, workload: Workload, clock: Clock, ended: Callable[[Request, Runs], bool]
    ) -> None:
        self.versions: list[int] = []
        stays = itertools.count()
        self.engines = [Engine(workload, self.versions, stays) for _ in range(workload.num_engines)]
        self._clock = clock
        self._ended = ended
        self._line: OrderedDict[Request, None] = OrderedDict()
        self._restarts = workload.inflight == "restart"
        self._num_preempted = 0
        self.used: list[tuple[float, int]] = []  # second, samples that run from then on
        self.notes_use = True

    @property
    def num_running(self) -> int:
        return sum(engine.num_running for engine in self.engines)

    @property
    def num_queued(self) -> int:
        return sum(len(request.lefts) for request in self._line)

    def busy_s(self) -> float:
        """Seconds that slots ran a sample, all slots together."""
        for engine in self.engines:
            engine.advance(self._clock.now)
        return sum(engine.busy_s for engine in self.engines)

    def kv_use(self) -> float:
        """Share of its KV cache that the fullest engine uses."""
        return max(engine.kv_use(self._clock.now) for engine in self.engines)

    def note_use(self) -> None:
        """Into `used`, if it `notes_use`."""
        if not self.notes_use:
            return
        now, num_running = self._clock.now, self.num_running
        if self.used and self.used[-1][0] == now:
            self.used[-1] = now, num_running
        elif not self.used or self.used[-1][1] != num_running:
            self.used.append((now, num_running))

    def take_num_preempted(self) -> int:
        """Samples preempted since this was last asked."""
        taken, self._num_preempted = self._num_preempted, 0
        return taken

    def submit(self, request: Request) -> None:
        if self._line or not self._start(request):
            self._line[request] = None

    def withdraw(self, group: Any) -> list[Request]:
        """Takes all requests of the group off their engines and out of the line."""
        found = [request for request in self._line if request.group is group]
        for request in found:
            del self._line[request]
        for engine in self.engines:
            for request in [request for request in engine.running if request.group is group]:
                engine.stop(request, self._clock.now)
                found.append(request)
        self._fill()
        return found

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
            request, runs = engine.finish(self._clock.now)
            if self._line:
                self._fill()
            self.note_use()
            if self._ended(request, runs):
                break
        return happened

    def _soonest(self) -> Engine:
        found = self.engines[0]
        for engine in self.engines:
            if engine.next_at < found.next_at:
                found = engine
        return found

    def _preempt(self, engine: Engine) -> None:
        """What it takes off waits first in line."""
        request = engine.preempt(self._clock.now)
        self._num_preempted += 1
        self._line[request] = None
        self._line.move_to_end(request, last=False)
        self._fill()

    def _restart(self) -> int:
        now = self._clock.now
        num_lost = sum(request.forget() for request in self._line)
        for engine in self.engines:
            running = tuple(engine.running)
            for request in running:
                engine.stop(request, now)
                num_lost += request.forget()
            for request in running:
                engine.start(request, now)
        return num_lost

    def _fill(self) -> None:
        """Starts the line in order."""
        while self._line and self._start(first := next(iter(self._line))):
            del self._line[first]

    def _start(self, request: Request) -> bool:
        """Whether all its samples found room: on the engine that runs least of those that have
        some, the rest on the next one."""
        while True:
            found = None
            for engine in self.engines:
                less = found is None or engine.num_running < found.num_running
                if less and (fitting := engine.num_fitting(request.context, self._clock.now)):
                    found, num_samples = engine, fitting
            if found is None:
                return False
            if num_samples >= len(request.lefts):
                found.start(request, self._clock.now)
                return True
            found.start(request.split(num_samples), self._clock.now)
