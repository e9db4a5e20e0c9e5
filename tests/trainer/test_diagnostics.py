"""A step told apart by task, age and length: numbers derived by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from connectors.records import Group, Origin, Prompt, Segment, Trajectory, Version
from trainer.ages import ages_of, staleness
from trainer.diagnostics import Lengths, bucket, step_metrics

AT = Version(0, 20)


def row(
    name: str, reward: float, *segments: tuple[int, int, int], mask: Sequence[int], task: str = "a"
) -> Trajectory:
    """`segments`: start, end and the number of the version."""
    return Trajectory(
        trajectory_id=f"p/0/0/{name}",
        group_id="p/0/0",
        task=task,
        tokens=np.arange(len(mask), dtype=np.int32),
        loss_mask=np.array(mask, np.int8),
        logprobs=np.zeros(len(mask), np.float32),
        segments=tuple(Segment(start, end, 0, number) for start, end, number in segments),
        origin=Origin("p", 0, 0),
        reward=reward,
    )


def group(*rows: Trajectory) -> Group:
    return Group(group_id="p/0/0", prompt=Prompt(task="a", prompt="x"), trajectories=rows)


def told(*groups: Group, weights: dict[Version, float] | None = None) -> dict[str, float]:
    return step_metrics(groups, ages_of(groups, AT, {}), weights or {})[0]


def test_rewards_are_told_by_task_and_by_the_age_of_a_samples_oldest_trained_token() -> None:
    found = told(
        group(
            row("0", 1.0, (1, 2, 20), (2, 4, 18), mask=[0, 1, 1, 1]),  # ages 0, 2, 2
            row("1", 0.0, (1, 3, 18), mask=[0, 1, 1, 0]),  # 2, 2
            row("2", 4.0, (1, 3, 13), mask=[0, 1, 0, 0]),  # 7, and 7 untrained
        ),
        group(
            row("0", 2.0, (1, 2, 21), mask=[0, 1], task="b"),  # -1
            row("1", 3.0, mask=[0, 0], task="b"),  # nothing sampled
        ),
    )
    assert found == {
        "reward/task/a": pytest.approx(5 / 3),
        "reward/task/b": 2.5,
        "reward/staleness/2": 0.5,
        "reward/staleness/5-8": 4.0,
        "reward/staleness/ahead": 2.0,
        "tokens/age/0": 1,
        "tokens/age/2": 4,
        "tokens/age/5-8": 1,
        "tokens/age/ahead": 1,
        "tokens/generated": 8,
        "length/generated": (3 + 2 + 2 + 1) / 4,
        "length/trained": (3 + 2 + 1 + 1 + 0) / 5,
    }


def test_branches_are_one_sample_whose_oldest_token_is_any_branchs() -> None:
    found = told(
        group(
            row("0", 1.0, (1, 3, 20), mask=[0, 1, 1]),
            row("0/1", 1.0, (2, 3, 17), mask=[0, 0, 1]),
            row("1", 4.0, (1, 2, 20), mask=[0, 1]),
        )
    )
    assert (found["reward/task/a"], found["length/trained"], found["length/generated"]) == (
        2.5, 2.0, 2.0,
    )  # fmt: skip
    assert (found["reward/staleness/3"], found["reward/staleness/0"]) == (1.0, 4.0)


def test_tokens_that_are_masked_or_that_no_version_wrote_have_no_age() -> None:
    """Version 17 weighs nothing in the step, and token 3 was written by none; it is trained."""
    found = told(
        group(row("0", 1.0, (1, 2, 17), (2, 3, 19), mask=[1, 1, 1, 1])),
        weights={Version(0, 17): 0.0, Version(0, 19): 0.5},
    )
    assert found == {
        "reward/task/a": 1.0,
        "reward/staleness/1": 1.0,
        "tokens/age/1": 1,
        "tokens/generated": 2,
        "length/generated": 2,
        "length/trained": 2,  # token 0 has nothing before it, token 1 is masked
    }


def test_a_first_token_counts_nowhere_and_a_manifests_staleness_is_of_the_tokens_told() -> None:
    """Version 10 wrote the first token alone, which nothing predicts."""
    rows = (row("0", 1.0, (0, 1, 10), (1, 3, 19), mask=[1, 1, 1]),)
    found, tokens = step_metrics([group(*rows)], ages_of([group(*rows)], AT, {}), {})
    assert {k: v for k, v in found.items() if k.startswith("tokens/age/")} == {"tokens/age/1": 2}
    assert staleness(tokens) == {"mean": 1, "p99": 1, "max": 1}
    assert (found["length/trained"], found["length/generated"]) == (2, 3)


def test_text_is_trained_and_was_not_generated() -> None:
    text = row("1", 0.0, mask=[0, 1, 1, 1])
    assert told(group(text)) == {"reward/task/a": 0.0, "length/trained": 3}
    beside = told(group(row("0", 1.0, (1, 2, 20), mask=[0, 1]), text))
    assert (beside["length/generated"], beside["length/trained"]) == (1, 2)


def test_buckets_are_twice_as_wide_each_beyond_four() -> None:
    assert [bucket(age) for age in (-9, -1, 0, 1, 4)] == ["ahead", "ahead", "0", "1", "4"]
    edges = {5: "5-8", 8: "5-8", 9: "9-16", 16: "9-16", 17: "17-32", 33: "33-64", 64: "33-64"}
    assert {age: bucket(age) for age in edges} == edges


def test_lengths_add_up_over_groups_and_without_any_there_is_no_mean() -> None:
    lengths = Lengths()
    assert lengths.mean() is None
    lengths.add(
        group(row("0", 0.0, (0, 3, 1), mask=[0, 0, 0]), row("0/1", 0.0, (3, 4, 1), mask=[0]))
    )
    lengths.add(group(row("0", 0.0, (0, 2, 1), mask=[0, 0])))
    assert (lengths.num_tokens, lengths.mean()) == (6, 3.0)
    assert told() == {}
