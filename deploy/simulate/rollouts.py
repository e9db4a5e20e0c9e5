"""Groups in generation: from a prompt to a scored group, request by request.

Prompts never run out. Their lengths, turns and failures are drawn in the order of the prompts, each
from a stream of its own, so that every policy is shown the same prompts whatever it does.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from deploy.simulate.clock import Action, Clock
from deploy.simulate.engines import Sequence
from deploy.simulate.fleet import Fleet
from deploy.simulate.workload import Workload

DRAWN_AT_ONCE: Final = 256
"""Prompts."""
UNBORN: Final = sys.maxsize
"""Version of what has not begun."""


class Request(NamedTuple):
    """Turns up to the next tool call, or a slice of them; then a pause away from the engine."""

    tokens: int
    pause_s: float


class Prompt(NamedTuple):
    """trajectories  what each of the group asks of engines, in order
    slow             how many times as long its tokens take
    """

    trajectories: tuple[tuple[Request, ...], ...]
    slow: float
    fails: bool


def prompts(workload: Workload, seed: int) -> Iterator[Prompt]:
    streams = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(3))
    length_rng, pause_rng, failure_rng = streams
    n, number = workload.group_size, 0
    while True:
        lengths = workload.lengths.sample(length_rng, n * DRAWN_AT_ONCE).tolist()
        failures = (failure_rng.random(DRAWN_AT_ONCE) < workload.failure_rate).tolist()
        for at, fails in enumerate(failures):
            group = lengths[at * n : at * n + n]
            trajectories = tuple(_requests(workload, length, pause_rng) for length in group)
            yield Prompt(trajectories, _slowness(workload, number), fails)
            number += 1


def _slowness(workload: Workload, number: int) -> float:
    cohorts = workload.cohorts
    if cohorts is None or not cohorts.slows(number // workload.batch_size):
        return 1.0
    return cohorts.factor


def _requests(workload: Workload, length: int, rng: np.random.Generator) -> tuple[Request, ...]:
    tools = workload.tools
    if tools is None:
        return _sliced(workload, length, 0.0)
    found: list[Request] = []
    begin = 0
    for end in range(tools.turn_tokens, length, tools.turn_tokens):
        if rng.random() < tools.chance:
            found += _sliced(workload, end - begin, float(rng.exponential(tools.pause_s)))
            begin = end
    return (*found, *_sliced(workload, length - begin, 0.0))


def _sliced(workload: Workload, length: int, pause_s: float) -> tuple[Request, ...]:
    if workload.inflight != "slices" or length <= workload.slice_tokens:
        return (Request(length, pause_s),)
    num_whole, rest = divmod(length - 1, workload.slice_tokens)
    return (Request(workload.slice_tokens, 0.0),) * num_whole + (Request(rest + 1, pause_s),)


@dataclass(slots=True, eq=False)
class Rollout:
    """A group on its way.

    num_left  trajectories that are not through
    oldest    version at the first prefill of any
    tokens    number by version, of requests that are through
    over      it ended or was given up: what is still due of it is void
    """

    group_id: str
    prompt: Prompt
    num_left: int
    oldest: int = UNBORN
    tokens: Counter[int] = field(default_factory=Counter)
    trajectories: list[Trajectory] = field(default_factory=list)
    over: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Trajectory(Sequence):
    """`pause_s`: after the request at hand; `rest`: those after it."""

    rollout: Rollout
    pause_s: float
    rest: Iterator[Request]


class Rollouts:
    """`scored` is called with each group that came through, `capped` with each that ran into the
    time cap."""

    def __init__(
        self,
        workload: Workload,
        clock: Clock,
        *,
        scored: Callable[[Rollout], None],
        capped: Callable[[Rollout], None],
    ) -> None:
        self.fleet = Fleet(workload, clock, self._request_ended)
        self._workload = workload
        self._clock = clock
        self._scored = scored
        self._capped = capped

    def start(self, group_id: str, prompt: Prompt) -> Rollout:
        rollout = Rollout(group_id, prompt, len(prompt.trajectories))
        for requests in prompt.trajectories:
            rest = iter(requests)
            first = next(rest)
            trajectory = Trajectory(
                context=self._workload.prompt_tokens,
                left=first.tokens,
                slow=prompt.slow,
                rollout=rollout,
                pause_s=first.pause_s,
                rest=rest,
            )
            rollout.trajectories.append(trajectory)
            self.fleet.submit(trajectory)
        cap_s = self._workload.time_cap_s
        if cap_s is not None:
            self._clock.later(cap_s, lambda: self._cap(rollout))
        return rollout

    def stop(self, rollout: Rollout) -> int:
        """Gives it up, generated or not; the number of tokens it had."""
        rollout.over = True
        if rollout.num_left:
            for trajectory in rollout.trajectories:
                self.fleet.withdraw(trajectory)
                _count(trajectory)
        return rollout.tokens.total()

    def _request_ended(self, trajectory: Sequence) -> bool:
        """False if the group is not through and nothing is due of this trajectory."""
        assert isinstance(trajectory, Trajectory)
        _count(trajectory)
        rollout = trajectory.rollout
        request = next(trajectory.rest, None)
        if request is not None:
            pause_s, trajectory.pause_s = trajectory.pause_s, request.pause_s
            trajectory.left = request.tokens
            self._after(rollout, pause_s, lambda: self.fleet.submit(trajectory))
            return True
        rollout.num_left -= 1
        if rollout.num_left:
            return False
        self._after(rollout, self._workload.reward_s, lambda: self._scored(rollout))
        return True

    def _after(self, rollout: Rollout, seconds: float, action: Action) -> None:
        """Unless the group is over by then."""
        self._clock.after(seconds, lambda: None if rollout.over else action())

    def _cap(self, rollout: Rollout) -> None:
        if rollout.num_left and not rollout.over:
            self._capped(rollout)


def _count(trajectory: Trajectory) -> None:
    """What its request decoded is the group's."""
    rollout = trajectory.rollout
    for version, num_tokens in trajectory.runs:
        rollout.tokens[version] += num_tokens
    if trajectory.first is not None and trajectory.first < rollout.oldest:
        rollout.oldest = trajectory.first
    trajectory.runs.clear()
    trajectory.first = None
