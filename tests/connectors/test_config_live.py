"""What a configuration of live traffic is refused for, in one line with the reason."""

from __future__ import annotations

import re
from typing import Any

import pytest

from connectors.config import Config, ConfigError, parse


def configured(
    *, task: dict[str, Any] | None = None, nearline: dict[str, Any] | None = None, **trainer: Any
) -> Config:
    table: dict[str, Any] = {
        "model": {"path": "m"},
        "tasks": {"chat": {"reward": "feedback", **(task or {})}},
        "trainer": {"advantage": "spo", **trainer},
        "nearline": nearline or {},
    }
    return parse(table, base_dir="/")


def refused(said: str, **changes: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        configured(**changes)


@pytest.mark.parametrize("name", ["spo", "opo", "gpg", "reinforce++", "reinforce++-baseline"])
def test_what_suits_single_rollouts_is_taken(name: str) -> None:
    assert configured(advantage=name).trainer.advantage == name


@pytest.mark.parametrize(
    "name", ["grpo", "dr-grpo", "grpo-passk", "rloo", "leave-one-out", "maxrl"]
)
def test_a_baseline_of_groups_is_refused_with_what_to_take(name: str) -> None:
    refused(
        f"trainer.advantage: {name} compares the trajectories of one prompt, and live traffic has "
        "one each: with [nearline] take spo",
        advantage=name,
    )


def test_feedback_needs_live_traffic_and_goes_with_no_prompts_of_its_own() -> None:
    table = {"model": {"path": "m"}, "tasks": {"chat": {"reward": "feedback"}}}
    said = "tasks.chat.reward: feedback is said about live traffic, so it needs a section"
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse(table, base_dir="/")
    for key in ("prompts", "eval_prompts"):
        refused(f"tasks.chat.{key}: nobody says anything", task={key: "file.jsonl"})


def test_prompts_that_no_step_has_room_for_are_refused() -> None:
    task = {"reward": "exact_match", "prompts": "file.jsonl"}
    refused("tasks.chat.prompts: with nearline.share = 1 all 8 groups of a step are", task=task)
    configured(task=task, nearline={"share": 0.9})
    refused("tasks.chat.prompts: ", task=task, nearline={"share": 0.95})


def test_a_shadow_of_live_traffic_is_refused() -> None:
    source = {"run": "r", "grants": "a", "namespace": "b", "starts": [0]}
    refused("trainer.source: a shadow trains in the order of the grants", source=source)


def test_labels_that_the_values_cannot_hold_are_refused_with_what_to_give() -> None:
    task = {"feedback": {"low": -1.0, "high": 1.0}}
    refused(
        "tasks.chat.feedback: labels are between -1 and 1, and the values of spo between 0 and 1: "
        "give it low and high in trainer.advantage_parameters",
        task=task,
    )
    configured(task=task, advantage_parameters={"low": -1.0})
    configured(task=task, advantage="opo")
    configured(task={**task, "reward": "exact_match"})
