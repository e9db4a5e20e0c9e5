"""What does not go together with live traffic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from connectors.algorithms import Estimator

if TYPE_CHECKING:
    from connectors.config import Config


def problem(config: Config, chosen: Estimator) -> str | None:
    """Of a configuration whose advantage is `chosen`: the first there is, by key."""
    for name, task in config.tasks.items():
        if task.reward != "feedback":
            continue
        if config.nearline is None:
            return (
                f"tasks.{name}.reward: feedback is said about live traffic, so it needs a section "
                "[nearline]"
            )
        for key in ("prompts", "eval_prompts"):
            if getattr(task, key) is not None:
                return (
                    f"tasks.{name}.{key}: nobody says anything about a prompt's own rollouts, so "
                    "with reward = 'feedback' leave it out (or give the prompts another task)"
                )
    if config.nearline is None:
        return None
    num_groups = config.trainer.groups_per_step
    if config.nearline.places(num_groups) == num_groups:
        for name, task in config.tasks.items():
            if task.prompts is not None:
                return (
                    f"tasks.{name}.prompts: with nearline.share = {config.nearline.share:g} all "
                    f"{num_groups} groups of a step are live traffic's and no prompt is ever "
                    "granted: leave the prompts out, or lower the share"
                )
    if config.trainer.source is not None:
        return (
            "trainer.source: a shadow trains in the order of the grants, and live traffic has "
            "none: a run with [nearline] has no shadow"
        )
    if chosen.needs_group:
        return (
            f"trainer.advantage: {config.trainer.advantage} compares the trajectories of one "
            "prompt, and live traffic has one each: with [nearline] take spo, what compares over "
            "the step (reinforce++, reinforce++-baseline), or the rewards as they are (opo, gpg)"
        )
    return _out_of_bounds(config, chosen) if chosen.needs_value else None


def _out_of_bounds(config: Config, chosen: Estimator) -> str | None:
    """Labels that the estimator's values cannot hold."""
    given = config.trainer.advantage_parameters
    low, high = (given.get(key, chosen.tracker[key].default) for key in ("low", "high"))
    for name, task in config.tasks.items():
        label = task.feedback
        if task.reward == "feedback" and not low <= label.low <= label.high <= high:
            return (
                f"tasks.{name}.feedback: labels are between {label.low:g} and {label.high:g}, and "
                f"the values of {config.trainer.advantage} between {low:g} and {high:g}: give it "
                "low and high in trainer.advantage_parameters"
            )
    return None
