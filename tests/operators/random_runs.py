"""Random runs of a named policy: many closed loops over drawn parameters and circumstances, or one
run of random acts, to hold each state of it against a literal reading of its rule."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from operators.staleness import policy
from operators.staleness.types import StalenessPolicy
from tests.operators.policy_run import LoopResult, Run, closed_loop

Draw = Callable[[random.Random, int], dict[str, Any]]
"""Parameters, from chance and the batch size."""


def random_loops(
    name: str, draw: Draw, *, num_runs: int = 200
) -> Iterator[tuple[StalenessPolicy[Any], LoopResult]]:
    """Cold starts with slow groups, failures, late publishing: each in some of the runs."""
    for seed in range(num_runs):
        chance = random.Random(seed)
        batch_size = chance.randint(1, 3)
        subject = policy(name, **draw(chance, batch_size))
        yield (
            subject,
            closed_loop(
                subject,
                chance,
                batch_size=batch_size,
                group_size=chance.randint(1, 3),
                num_steps=8,
                num_slow=chance.choice([0, batch_size, 2 * batch_size]),
                slowness=4,
                failures=chance.choice([0.0, 0.0, 0.1]),
                publish_lag=chance.choice([0.0, 0.5, 0.95]),
            ),
        )


def random_acts(run: Run, chance: random.Random, *, failures: bool = True) -> Iterator[Run]:
    """The run before each of many acts: one group or all that may be is granted, one arrives or
    fails, a step is filled (at most two ahead, as the feed does), a version is published."""
    run.publish(0)
    for _ in range(150):
        yield run
        running = [g.group_id for g in run.open.values() if g.state == "running"]
        act = chance.choice(["grant", "arrive", "arrive", "close", "choose", "publish"])
        if act == "grant":
            run.grant_all()
        elif act == "arrive" and running:
            run.arrive(chance.choice(running))
        elif act == "close" and running and failures and chance.random() < 0.5:
            run.close(chance.choice(running))
        elif act == "choose" and run.version - run.published < 2:
            run.choose()
        elif act == "publish" and run.published < run.version:
            run.publish(run.published + 1)
