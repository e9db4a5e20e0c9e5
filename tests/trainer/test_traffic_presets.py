"""Live traffic beside every staleness policy that goes with it: the same promises."""

from __future__ import annotations

import random

import pytest

from tests.trainer.presets import CASES, Case
from tests.trainer.traffic_world import TrafficWorld, traffic_act

WEIGHS = ("mask", "reweight")
"""Refused beside live traffic: trainer/staleness.py."""


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.parameters.get("at_deadline") not in WEIGHS], ids=str
)
@pytest.mark.parametrize("granted", [0, 2])
def test_under_every_policy_no_session_is_too_old_or_lost_and_the_run_goes_on(
    case: Case, granted: int
) -> None:
    chance = random.Random(granted)
    world = TrafficWorld(
        lambda: case.policy(max(1, granted)), granted, 2, num_places=2, bound=3, drops=True
    )
    for _ in range(250):
        traffic_act(world, chance, with_rollbacks=True)
        world.check()
    world.drain()
    assert world.chain.step > 0
