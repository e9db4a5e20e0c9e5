"""The trainer and its publisher in virtual time."""

from __future__ import annotations

from collections.abc import Callable

from deploy.simulate.clock import Clock
from deploy.simulate.feed import Step
from deploy.simulate.outcome import StepTimes
from deploy.simulate.workload import Workload


class Trainer:
    """Trains one step at a time and goes on while its weights are published; of versions that wait
    for that, the newest one wins.

    take   the next full step, None while there is none
    train  counts what a step trains; the number of its tokens
    hold   engines hold that version
    """

    def __init__(
        self,
        workload: Workload,
        clock: Clock,
        *,
        take: Callable[[], Step | None],
        train: Callable[[Step], int],
        hold: Callable[[int], None],
    ) -> None:
        self.num_trained = 0
        self._workload = workload
        self._clock = clock
        self._take = take
        self._train = train
        self._hold = hold
        self._idle_from: float | None = 0.0  # None while it trains
        self._steps: list[StepTimes] = []  # without publish_to
        self._held: list[tuple[int, float]] = []  # version and when, ascending
        self._publishing = False
        self._newest = 0

    def begin(self) -> bool:
        """Whether it was idle and took a step."""
        if self._idle_from is None or (step := self._take()) is None:
            return False
        wait_from, train_from = self._idle_from, self._clock.now
        self._idle_from = None
        workload, num_tokens = self._workload, self._train(step)
        seconds = workload.train_s + workload.train_s_per_token * num_tokens
        times = StepTimes(step.version + 1, wait_from, train_from, train_from + seconds, None)
        self._clock.later(seconds, lambda: self._end(times))
        return True

    def _end(self, times: StepTimes) -> None:
        self.num_trained += 1
        self._steps.append(times)
        self._idle_from = self._clock.now
        self._newest = times.step
        if not self._publishing:
            self._publish()

    def _publish(self) -> None:
        version = self._newest
        self._publishing = True
        self._clock.after(self._workload.publish_s, lambda: self._published(version))

    def _published(self, version: int) -> None:
        self._publishing = False
        self._held.append((version, self._clock.now))
        self._hold(version)
        if self._newest > version:
            self._publish()

    def waited_s(self) -> float:
        waits = sum(times.train_from - times.wait_from for times in self._steps)
        return waits + (0.0 if self._idle_from is None else self._clock.now - self._idle_from)

    def steps(self) -> tuple[StepTimes, ...]:
        """Those that ended."""
        found, held = [], list(reversed(self._held))
        for times in self._steps:
            while held and held[-1][0] < times.step:
                held.pop()
            found.append(times._replace(publish_to=held[-1][1] if held else None))
        return tuple(found)
