"""What `status.eval` says of evaluations of several tasks and versions."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.records import Estimate, Evaluation, Version
from deploy.fold import Fold
from deploy.held_out import curve, held_out
from deploy.history import Prompts


def evaluation(number: int, task: str, reward: float, **more: Any) -> Evaluation:
    version = Version(0, number)
    return Evaluation(
        version=version, versions=(version,), task=task, reward=reward, num_prompts=4, **more
    )


def folded(*evaluations: Evaluation) -> list[tuple[int, dict[str, Evaluation]]]:
    fold = Fold(Prompts("prompts", None))
    for one in evaluations:
        fold.evaluate(one)
    return fold.held_out()


def test_the_last_version_is_the_one_with_the_highest_number_with_all_its_tasks() -> None:
    passes = {4: Estimate(0.5, 0.1, 0.9)}
    found = held_out(
        folded(
            evaluation(0, "a", 0.0),
            evaluation(4, "a", 0.25, low=0.0, high=0.5, num_samples=4, pass_at=passes),
            evaluation(2, "a", 0.125),
            evaluation(4, "b", 0.75, low=0.5, high=1.0, pass_at={2: Estimate(1.0), **passes}),
        )
    )
    assert (found["first"], found["last"]) == (0.0, 0.5)
    assert (found["num_prompts"], found["num_samples"]) == (8, 4)
    assert found["high"] - 0.5 == pytest.approx(0.25 / 2**0.5)
    assert found["pass_at"].keys() == {"4"}  # what only one task has is no mean of them
    assert found["tasks"]["b"]["pass_at"].keys() == {"2", "4"}
    assert found["versions"] == ["0.4"]


def test_the_curve_averages_the_tasks_of_each_version() -> None:
    evaluations = folded(
        evaluation(2, "a", 0.5), evaluation(0, "a", 0.25), evaluation(0, "b", 0.75)
    )
    assert curve(evaluations) == [(0, 0.5), (2, 0.5)]


def test_before_the_first_evaluation_there_is_no_number() -> None:
    found = held_out([])
    assert {found[key] for key in ("first", "last", "low", "high")} == {None}
    assert (found["pass_at"], found["versions"], found["tasks"]) == ({}, [], {})
