"""What is wrong with a run, from its metrics: said once when it begins and once when it ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connectors.config import Trainer
from connectors.kafka.client import Cluster
from connectors.records import Group, Trajectory, Version
from tests.trainer.groups import trainable_group
from tests.trainer.test_loop import played_manifests
from trainer import batches, credit
from trainer.alerts import AlertWatch, alerts, subject
from trainer.step_metrics import row_metrics

RIGHT = {
    "gap/share_above_10pct": 0.05, "gap/fresh/share_above_10pct": 0.01, "gap/fresh/tokens": 50.0,
    "advantage/zero_share": 0.5, "loss/effective_share": 0.9,
}  # fmt: skip


def only(**changes: float) -> str:
    (alert,) = alerts({**RIGHT, **{k.replace("__", "/"): v for k, v in changes.items()}}, 0.1)
    return alert


def test_a_right_step_and_one_without_metrics_raise_nothing() -> None:
    assert alerts(RIGHT, 0.1) == ()
    assert alerts({}, 0.1) == ()


def test_fresh_tokens_that_differ_mean_that_engine_and_trainer_compute_differently() -> None:
    alert = only(gap__fresh__share_above_10pct=0.25)
    assert alert.startswith("gap: 25% of the 50 tokens that the trained version itself sampled")
    causes = ["temperature or top-p", "dtype or attention", "quantised", "digests"]
    assert [alert.index(cause) for cause in causes] == sorted(map(alert.index, causes))
    assert "learning rate" not in alert


def test_older_tokens_alone_mean_that_the_policy_moved() -> None:
    older = {k: v for k, v in RIGHT.items() if "fresh" not in k} | {"gap/share_above_10pct": 0.3}
    (alert,) = alerts(older, 0.1)
    assert alert.startswith("gap: 30% of the tokens are more than 10% more or less")
    causes = ["staleness bound", "learning rate", "correction", "engine and trainer"]
    assert [alert.index(cause) for cause in causes] == sorted(map(alert.index, causes))
    assert alerts(older, 0.3) == ()


def test_where_fresh_tokens_agree_the_policy_alone_moved() -> None:
    (alert,) = alerts({**RIGHT, "gap/share_above_10pct": 0.3}, 0.1)
    assert "its own are not: the policy moved" in alert
    assert "engine and trainer" not in alert


def test_a_step_whose_advantages_are_all_0_has_no_signal() -> None:
    assert only(advantage__zero_share=1.0).startswith("signal: every advantage in the step is 0")


ALIKE = ((1.0, 1.0), (0.0, 0.0))
"""Rewards by group: each agrees, the two differ."""


@pytest.mark.parametrize(
    ("settings", "rewards", "is_silent"),
    [
        ({}, ALIKE, True),
        ({}, ((1.0, 1.0), (0.0, 1.0)), False),
        ({"advantage": "reinforce++"}, ALIKE, False),
        ({"advantage": "reinforce++"}, ((1.0, 1.0), (1.0, 1.0)), True),
        ({"advantage": "spo"}, ALIKE, False),
        ({"advantage": "grpo-passk"}, ((1.0, 1.0, 0.0), (0.0, 2.0, 2.0)), True),
        ({"credit": "turn"}, ALIKE, False),  # the first turn is worth more than the second
        ({"overlong": {"max_length": 4, "buffer": 2}}, ALIKE, False),  # lengths differ
    ],
)
def test_whether_a_step_teaches_nothing_is_told_by_its_advantages(
    settings: dict[str, Any], rewards: Sequence[Sequence[float]], is_silent: bool
) -> None:
    """Each sample has two turns, of one token and of 1 + its number; with credit by turns it earns
    its reward in the first."""
    trainer = Trainer(**settings)
    by_turns = trainer.credit == "turn"
    groups = [group(g, of_group, by_turns=by_turns) for g, of_group in enumerate(rewards)]
    rows = replace(batches.flatten(groups), samples=credit.samples_of(groups))
    advantages = credit.advantages(groups, rows, trainer, values=np.full(len(rows), 0.5))
    found = alerts(row_metrics(rows, advantages, 1), 0.1)
    assert [subject(alert) for alert in found] == ["signal"] * is_silent


def group(number: int, rewards: Sequence[float], *, by_turns: bool) -> Group:
    made = trainable_group(f"p/0/{number}", Version(0, 0), seed=0)

    def row(k: int, reward: float) -> Trajectory:
        mask = np.array([0, 1, 0, *[1] * (k + 1), *[0] * (4 - k)], np.int8)
        return replace(
            made.trajectories[0],
            trajectory_id=f"{made.group_id}/{k}",
            loss_mask=mask,
            reward=reward,
            rewards=((1, reward, "turn"),) if by_turns else (),
        )

    return replace(made, trajectories=tuple(row(k, r) for k, r in enumerate(rewards)))


def test_weights_that_leave_few_tokens_are_an_alert() -> None:
    assert only(loss__effective_share=0.04).startswith("weights: the loss rests on few tokens")
    assert alerts({**RIGHT, "loss/effective_share": 0.1}, 0.1) == ()


class Read(dict[str, float]):
    """Metrics, and which of them were asked for."""

    def __init__(self, metrics: dict[str, float]) -> None:
        super().__init__(metrics)
        self.asked: set[str] = set()

    def get(self, key: str, *default: Any) -> Any:
        self.asked.add(key)
        return super().get(key, *default)

    def __getitem__(self, key: str) -> float:
        self.asked.add(key)
        return super().__getitem__(key)


def test_all_that_is_watched_is_in_a_manifest(
    cluster: Cluster, tiny_model_path: Path, tmp_path: Path
) -> None:
    """So a metric that gets another name takes its alert along."""
    nothing, wrong = Read({}), Read({**RIGHT, "gap/fresh/share_above_10pct": 0.5})
    alerts(nothing, 0.1)
    alerts(wrong, 0.1)
    asked = nothing.asked | wrong.asked
    first = played_manifests(cluster, tiny_model_path, tmp_path)[0]
    assert len(asked) == 5
    assert asked <= first.metrics.keys()


def test_the_trainer_logs_an_alert_when_it_begins_and_when_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "trainer.alerts")
    watch = AlertWatch(0.1)
    for step, share in enumerate((0.9, 0.05, 0.04, 0.03, 0.5, 0.01)):
        watch.look(step, {**RIGHT, "loss/effective_share": share})
    said = [(r.levelname, *r.getMessage().split(":")[:3]) for r in caplog.records]
    assert said == [
        ("WARNING", "step 1", " ALERT", " weights"),
        ("INFO", "step 4", " the alert is over", " weights"),
        ("WARNING", "step 5", " ALERT", " weights"),
    ]
