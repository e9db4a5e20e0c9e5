"""The staleness policy a configuration means, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from connectors.config import Config, ConfigError, parse
from operators.staleness.deadline import Deadline
from trainer.staleness import (
    bound_of,
    configured_policy,
    lookahead_of,
    policy_settings,
    shape_of,
)


def configured(urls: Sequence[str] = (), **staleness: Any) -> Config:
    """Of 6 groups a step and groups of 8 and 4."""
    tasks = {"a": {"reward": "exact_match"}, "b": {"reward": "exact_match", "group_size": 4}}
    table = {
        "model": {"path": "m"},
        "tasks": tasks,
        "engine": {"count": 2, "max_running": 32, "urls": list(urls)},
        "trainer": {"groups_per_step": 6},
        "staleness": staleness,
    }
    return parse(table, base_dir="/")


def test_a_run_shapes_its_policy_by_its_batch_its_largest_groups_and_its_engines() -> None:
    shape = shape_of(configured())
    assert (shape.batch_size, shape.group_size) == (6, 8)
    assert (shape.num_slots, shape.num_engines) == (64, 2)
    elsewhere = shape_of(configured(["http://a:1", "http://b:1", "http://c:1"]))
    assert (elsewhere.num_slots, elsewhere.num_engines) == (96, 3)


@pytest.mark.parametrize(
    ("staleness", "bound", "lookahead", "at_deadline"),
    [
        ({}, 4, 2, "wait"),
        ({"bound": 1}, 1, 1, "wait"),
        ({"bound": 0}, 0, 0, "wait"),
        ({"bound": 8, "lookahead": 5}, 8, 5, "wait"),
        ({"parameters": {"bound": 1}}, 1, 1, "wait"),
        ({"bound": 3, "parameters": {"bound": 3, "lookahead": 1}}, 3, 1, "wait"),
        ({"lookahead": "auto", "at_deadline": "mask"}, 4, "auto", "mask"),
        ({"at_deadline": "reweight", "parameters": {"decay": 0.5}}, None, 2, "reweight"),
    ],
)
def test_deadline_is_the_default_and_its_fields_are_its_parameters(
    staleness: dict[str, Any], bound: int | None, lookahead: Any, at_deadline: str
) -> None:
    policy = configured_policy(configured(**staleness))
    assert isinstance(policy, Deadline)
    assert (policy.bound, policy.lookahead, policy.at_deadline) == (bound, lookahead, at_deadline)
    assert lookahead_of(policy) == lookahead


@pytest.mark.parametrize(
    ("staleness", "bound", "lookahead"),
    [
        ({"policy": "sync"}, 0, 0),
        ({"policy": "one-step-off", "bound": 1}, 1, 1),
        ({"policy": "n-step-off", "lookahead": 3}, 3, 3),
        ({"policy": "n-step-off", "lookahead": 2, "parameters": {"n": 2}}, 2, 2),
        ({"policy": "areal", "parameters": {"max_head_offpolicyness": 2}}, None, None),
        ({"policy": "verl-drop", "bound": 7}, 7, None),
    ],
)
def test_other_policies_take_their_own_parameters(
    staleness: dict[str, Any], bound: int | None, lookahead: int | None
) -> None:
    policy = configured_policy(configured(**staleness))
    assert (policy.bound, lookahead_of(policy)) == (bound, lookahead)


@pytest.mark.parametrize(
    ("staleness", "message"),
    [
        ({"policy": "nstep-off"}, "did you mean 'n-step-off'"),
        ({"parameters": {"eta": 3}}, "deadline: unknown parameter 'eta'"),
        ({"bound": 2, "lookahead": 3}, "lookahead must be at most the bound, got lookahead 3"),
        ({"lookahead": -1}, "lookahead must be .* got -1"),
        ({"bound": 2, "parameters": {"bound": 3}}, r"staleness\.bound: is given twice, as 2 and"),
        ({"policy": "n-step-off"}, "^staleness: n-step-off needs lookahead"),
        ({"policy": "n-step-off", "lookahead": "auto"}, "n must be an integer"),
        (
            {"policy": "n-step-off", "lookahead": 1, "parameters": {"n": 2}},
            r"staleness\.lookahead: is the n of n-step-off, got 1 and parameters\.n = 2",
        ),
        ({"policy": "areal", "lookahead": 1}, r"^staleness\.lookahead: areal has none, got 1"),
        ({"policy": "sync", "at_deadline": "drop"}, "at_deadline: sync has none, got 'drop'"),
        ({"policy": "one-step-off", "bound": 2}, "one-step-off bounds every token at 1, got 2"),
        ({"policy": "slime", "bound": 2}, r"staleness\.bound: slime bounds nothing, got 2"),
        (
            {"policy": "areal", "parameters": {"consumer_batch_size": 4}},
            "consumer_batch_size is 6 in this run, got 4",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_rule_and_the_value(
    staleness: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        configured_policy(configured(**staleness))


def test_a_manifest_says_the_bound_it_was_trained_under() -> None:
    strict = configured_policy(configured(bound=3))
    loose = configured_policy(configured(policy="slime"))
    assert policy_settings(strict) == {"staleness_policy": "deadline", "staleness_bound": 3}
    assert bound_of(policy_settings(strict), loose) == 3
    assert bound_of(policy_settings(loose), strict) is None
    assert bound_of({"learning_rate": 1e-3}, strict) == 3, "where it does not say, the run's"
