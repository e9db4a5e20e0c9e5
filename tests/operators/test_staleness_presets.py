"""What all presets have in common: how they are asked for, and what is said of groups they hold."""

from __future__ import annotations

import re
from typing import Any

import pytest

from connectors.parameters import Count, CountOr, Number
from connectors.records import Coordinate
from operators.staleness import PRESETS, policy, policy_for
from operators.staleness.preset import MOST_COUNT, MOST_STEPS, RunShape
from operators.staleness.types import Choice
from tests.operators.policy_run import Run, v
from trainer.feed_state import fresh
from trainer.ledger import FeedCore

SHAPE = RunShape(batch_size=2, group_size=1, num_slots=16)


@pytest.mark.parametrize("key", ["name", "shape", "not a name"])
def test_no_parameter_is_taken_for_an_argument(key: str) -> None:
    said = re.escape(f"trl: unknown parameter {key!r}")
    with pytest.raises(ValueError, match=f"^{said}"):
        policy("trl", **{key: 1})
    with pytest.raises(ValueError, match=f"^{said}"):
        policy_for("trl", SHAPE, **{key: 1})


NUMBERS = [
    (name, key)
    for name, preset in PRESETS.items()
    for key, parameter in preset.parameters.items()
    if isinstance(parameter, Count | CountOr | Number) and key not in preset.fixed
]


@pytest.mark.parametrize(("name", "key"), NUMBERS)
@pytest.mark.parametrize(
    "value", [10**400, 10**30, MOST_COUNT + 1, 1e308, float("inf"), float("nan"), -1e308]
)
def test_a_number_that_no_run_comes_near_is_refused_with_the_rule(
    name: str, key: str, value: float
) -> None:
    with pytest.raises(
        ValueError, match=rf"^{name}: {key} must be .*, got {re.escape(repr(value))}$"
    ):
        policy_for(name, SHAPE, **{key: value})


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("areal", "max_head_offpolicyness"),
        ("deadline", "bound"),
        ("deadline", "lookahead"),
        ("n-step-off", "n"),
        ("nemo-in-order", "max_lookahead_versions"),
        ("openrlhf", "async_queue_size"),
        ("roll", "async_generation_ratio"),
        ("trl", "max_staleness"),
        ("verl-drop", "num_warmup_batches"),
        ("windowed-fifo", "target_offpolicy_steps"),
    ],
)
def test_nobody_is_ten_thousand_steps_ahead(name: str, key: str) -> None:
    with pytest.raises(ValueError, match=rf"{key} must be .*at most {MOST_STEPS}.*, got 10001$"):
        policy_for(name, SHAPE, **{key: MOST_STEPS + 1})


@pytest.mark.parametrize(
    ("name", "key", "most"),
    [
        ("slime", "fully_async_group_prefetch_factor", MOST_COUNT),
        ("slime", "sglang_server_concurrency", MOST_COUNT),
        ("roll", "async_generation_ratio", MOST_STEPS),
        ("dressage", "output_queue_size", MOST_COUNT),
    ],
)
def test_the_largest_number_there_may_be_overflows_nothing(name: str, key: str, most: int) -> None:
    run = Run(policy_for(name, SHAPE, **{key: most}), SHAPE.batch_size)
    run.publish(0)
    assert run.credits() > 0


# ------------------------------------------------------------------------------------------- held
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("n-step-off", {"n": 1}),
        ("nemo-in-order", {"max_lookahead_versions": 1}),
        ("nemo-windowed", {}),
        ("openrlhf", {"async_queue_size": 2}),
        ("windowed-fifo", {"target_offpolicy_steps": 1, "window_size": 1}),
        ("verl-drop", {}),
        ("verl-wait", {}),
        ("areal", {"max_head_offpolicyness": 1}),
        ("roll", {"async_generation_ratio": 1}),
        ("psrl-roc", {"staleness": 1}),
        ("dressage", {}),
    ],
)
def test_a_ready_group_that_a_policy_keeps_back_is_held(
    name: str, parameters: dict[str, Any]
) -> None:
    """Of the groups granted at once the last one is ready, and both places are free."""
    run = Run(policy_for(name, SHAPE, **parameters), SHAPE.batch_size)
    run.publish(0)
    *_, last = run.grant_all()
    run.arrive(last)
    assert run.choose() == Choice()
    assert run.ledger().held(Choice()) == (last,)


def test_what_is_committed_or_dropped_is_not_held() -> None:
    run = Run(policy_for("slime", SHAPE, sglang_server_concurrency=4), 3)
    run.publish(0)
    for group_id in run.grant_all():
        run.arrive(group_id)
    a, b, c, d = run.open
    ledger = run.ledger()
    assert ledger.held(Choice(commit=(a,), drop=(c,))) == (b, d)
    assert ledger.held(Choice(commit=(a, b, c))) == (), "there is no room for it"


def test_the_feed_counts_a_held_group_once_a_step() -> None:
    """n = 1, two groups a step: of four, the third waits for the second step."""
    core = FeedCore(policy("one-step-off"), fresh(1), prompts_topic="p", batch_size=2)
    due = core.propose([4], epoch=0, published=(v(0), "d"))
    assert due is not None
    core.apply_announcement(0, due)

    def arrive(offset: int) -> None:
        core.arrived(Coordinate(0, core.read[0], 7, f"p/0/{offset}"), v(0), v(0), 1)

    arrive(2)
    for _ in range(3):
        assert core.choose() is None
    arrive(0)
    assert core.choose() is None
    arrive(1)
    first = core.choose()
    assert core.choose() is None
    arrive(3)
    second = core.choose()
    assert first is not None
    assert second is not None
    assert (first.actions, second.actions) == ({"holds": 1}, {})
