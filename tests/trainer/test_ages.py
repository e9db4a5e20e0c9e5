"""How old a step's tokens are, and that a manifest keeps it."""

from __future__ import annotations

import numpy as np

from connectors.records import Fork, Group, Prompt, Segment, Trajectory, Version, parse_group_id
from trainer.ages import (
    UNKNOWN,
    ages_of,
    histogram,
    recorded,
    recorded_ages,
    row_ages,
    staleness,
)

V0, V3, V4, V6 = (Version(0, n) for n in (0, 3, 4, 6))


def group() -> Group:
    """Ids 2 to 4 are trained: by versions 4, 6 and 6. Id 1 is version 0's and carries no loss."""
    row = Trajectory(
        trajectory_id="p/0/3/0",
        group_id="p/0/3",
        task="a",
        tokens=np.arange(6, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1, 1, 0], np.int8),
        logprobs=np.full(6, -1, np.float32),
        segments=(Segment(1, 2, 0, 0), Segment(2, 3, 0, 4), Segment(3, 5, 0, 6)),
        origin=parse_group_id("p/0/3"),
    )
    return Group(group_id="p/0/3", prompt=Prompt(task="a", prompt="x"), trajectories=(row,))


def test_a_version_is_as_old_as_it_lies_behind() -> None:
    assert ages_of([group()], Version(0, 7), {}) == {V0: 7, V4: 3, V6: 1}
    assert ages_of([group()], Version(0, 5), {}) == {V0: 5, V4: 1, V6: -1}


def test_a_version_that_a_rollback_gave_up_is_as_far_away_as_there_and_back() -> None:
    # Forked at 4: from 1.7 back to 4 is 3, forth to 0.6 is 2; 0.4 is 3 behind.
    lineage = {1: Fork(parent=0, number=4, reason="rollback")}
    assert ages_of([group()], Version(1, 7), lineage) == {V0: 7, V4: 3, V6: 5}


def test_a_token_is_as_old_as_its_version() -> None:
    (row,) = group().trajectories
    assert row_ages(row, {V0: 7, V4: 3, V6: 1}).tolist() == [UNKNOWN, 7, 3, 1, 1, UNKNOWN]


def test_staleness_is_that_of_the_tokens_a_step_trains() -> None:
    ages = {V0: 7, V4: 3, V6: 1}
    assert histogram(group().trajectories, ages, {}) == {1: 2, 3: 1}
    assert histogram(group().trajectories, ages, {V4: 0.0, V6: 0.5}) == {1: 2}
    assert staleness({1: 2, 3: 1}) == {"mean": 5 / 3, "p99": 3.0, "max": 3.0}
    assert staleness({1: 99, 3: 1}) == {"mean": 1.02, "p99": 1.0, "max": 3.0}
    assert histogram(group().trajectories, ages, {V4: 0.0, V6: 0.0}) == {}
    assert staleness({}) == {}


def test_a_manifest_gives_back_the_very_same_ages() -> None:
    ages = {V3: 0, V4: -2, Version(12, 345): 10_000}
    assert recorded_ages({"loss": "ppo", **recorded(ages)}) == ages
    assert recorded_ages({"loss": "ppo", **recorded({})}) == {}
    assert recorded_ages({"loss": "ppo"}) == {}
