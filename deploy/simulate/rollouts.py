"""Groups in generation: from a prompt to a scored group, request by request.

Prompts never run out. Their lengths, turns, failures and scoring times are drawn in the order of
the prompts, each from a stream of its own, so that every policy is shown the same prompts whatever
it does.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from deploy.simulate.clock import Action, Clock
from deploy.simulate.engines import Request, Runs
from deploy.simulate.fleet import Fleet
from deploy.simulate.workload import Workload

DRAWN_AT_ONCE: Final = 256
"""Prompts."""
UNBORN: Final = sys.maxsize
"""Version of what has not begun."""


class Turn(NamedTuple):
    """What an engine is asked for at once, up to the next tool call or the end of a slice; then a
    pause away from it."""

    tokens: int
    pause_s: float


class Prompt(NamedTuple):
    """trajectories  the turns of each
    slow             how many times as long its tokens take
    reward_s         until it is scored
    """

    trajectories: tuple[tuple[Turn, ...], ...]
    slow: float
    fails: bool
    reward_s: float


def prompts(workload: Workload, seed: int) -> Iterator[Prompt]:
    streams = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(4))
    length_rng, pause_rng, failure_rng, reward_rng = streams
    rewards_s = np.atleast_1d(workload.reward_s)
    n, number = workload.group_size, 0
    while True:
        lengths = workload.lengths.sample(length_rng, n * DRAWN_AT_ONCE).tolist()
        failures = (failure_rng.random(DRAWN_AT_ONCE) < workload.failure_rate).tolist()
        scoring = reward_rng.choice(rewards_s, DRAWN_AT_ONCE).tolist()
        for at, (fails, reward_s) in enumerate(zip(failures, scoring, strict=True)):
            group = lengths[at * n : at * n + n]
            trajectories = tuple(_turns(workload, length, pause_rng) for length in group)
            yield Prompt(trajectories, _slowness(workload, number), fails, reward_s)
            number += 1


def _slowness(workload: Workload, number: int) -> float:
    cohorts = workload.cohorts
    if cohorts is None or not cohorts.slows(number // workload.batch_size):
        return 1.0
    return cohorts.factor


def _turns(workload: Workload, length: int, rng: np.random.Generator) -> tuple[Turn, ...]:
    tools = workload.tools
    if tools is None:
        return _sliced(workload, length, 0.0)
    found: list[Turn] = []
    begin = 0
    for end in range(tools.turn_tokens, length, tools.turn_tokens):
        if rng.random() < tools.chance:
            found += _sliced(workload, end - begin, float(rng.exponential(tools.pause_s)))
            begin = end
    return (*found, *_sliced(workload, length - begin, 0.0))


def _sliced(workload: Workload, length: int, pause_s: float) -> tuple[Turn, ...]:
    if workload.inflight != "slices" or length <= workload.slice_tokens:
        return (Turn(length, pause_s),)
    num_whole, rest = divmod(length - 1, workload.slice_tokens)
    return (Turn(workload.slice_tokens, 0.0),) * num_whole + (Turn(rest + 1, pause_s),)


@dataclass(slots=True, eq=False)
class Rollout:
    """A group on its way.

    num_left  trajectories that are not through
    oldest    version at the first prefill of any
    tokens    number by version, of turns that are through
    over      it ended or was given up: what is still due of it is void
    """

    group_id: str
    prompt: Prompt
    num_left: int
    oldest: int = UNBORN
    tokens: Counter[int] = field(default_factory=Counter)
    over: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class TurnRequest(Request):
    """`ends_at`: the context at its end; `pause_s`: after it; `rest`: turns after that."""

    ends_at: int
    pause_s: float
    rest: tuple[Turn, ...]


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
        self.fleet = Fleet(workload, clock, self._ended)
        self._workload = workload
        self._clock = clock
        self._scored = scored
        self._capped = capped

    def start(self, group_id: str, prompt: Prompt) -> Rollout:
        rollout = Rollout(group_id, prompt, len(prompt.trajectories))
        context, turns = self._workload.prompt_tokens, prompt.trajectories
        if all(len(of_one) == 1 for of_one in turns):
            lengths = [only.tokens for (only,) in turns]
            self.fleet.submit(
                Request(group=rollout, context=context, lefts=lengths, slow=prompt.slow)
            )
        else:
            for of_one in turns:
                self._ask(rollout, context, of_one)
        cap_s = self._workload.time_cap_s
        if cap_s is not None:
            self._clock.later(cap_s, lambda: self._cap(rollout))
        return rollout

    def stop(self, rollout: Rollout) -> int:
        """Gives it up, generated or not; the number of tokens it had."""
        rollout.over = True
        if rollout.num_left:
            for request in self.fleet.withdraw(rollout):
                for version, num_tokens in request.runs:
                    rollout.tokens[version] += num_tokens * len(request.lefts)
        return rollout.tokens.total()

    def _ask(self, rollout: Rollout, context: int, turns: tuple[Turn, ...]) -> None:
        """For the first of the turns."""
        (tokens, pause_s), *rest = turns
        self.fleet.submit(
            TurnRequest(
                group=rollout,
                context=context,
                lefts=[tokens],
                slow=rollout.prompt.slow,
                ends_at=context + tokens,
                pause_s=pause_s,
                rest=tuple(rest),
            )
        )

    def _ended(self, request: Request, runs: Runs) -> bool:
        """False if there is more of the group and nothing follows on this sample's end."""
        rollout: Rollout = request.group
        for version, num_tokens in runs:
            rollout.tokens[version] += num_tokens
        if request.first is not None and request.first < rollout.oldest:
            rollout.oldest = request.first
        if isinstance(request, TurnRequest) and request.rest:
            context, rest = request.ends_at, request.rest
            self._after(rollout, request.pause_s, lambda: self._ask(rollout, context, rest))
            return True
        rollout.num_left -= 1
        if rollout.num_left:
            return False
        self._after(rollout, rollout.prompt.reward_s, lambda: self._scored(rollout))
        return True

    def _after(self, rollout: Rollout, seconds: float, action: Action) -> None:
        """Unless the group is over by then."""
        self._clock.after(seconds, lambda: None if rollout.over else action())

    def _cap(self, rollout: Rollout) -> None:
        if rollout.num_left and not rollout.over:
            self._capped(rollout)
