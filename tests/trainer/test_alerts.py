"""What is wrong with a run, from its metrics: said once when it begins and once when it ends."""

from __future__ import annotations

import logging

import pytest

from trainer.alerts import AlertWatch, alerts, subject

RIGHT = {
    "gap/share_above_10pct": 0.05, "gap/fresh/share_above_10pct": 0.01, "gap/fresh/tokens": 50.0,
    "reward/homogeneous_share": 0.5, "loss/effective_share": 0.9,
    "rows/all": 8.0, "groups": 4.0,
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


def test_where_fresh_tokens_agree_older_ones_may_differ() -> None:
    assert alerts({**RIGHT, "gap/share_above_10pct": 0.3}, 0.1) == ()


def test_a_step_whose_groups_agree_has_no_signal_unless_each_is_one_sample() -> None:
    assert subject(only(reward__homogeneous_share=1.0)) == "signal"
    assert alerts({**RIGHT, "reward/homogeneous_share": 1.0, "rows/all": 4.0}, 0.1) == ()


def test_weights_that_leave_few_tokens_are_an_alert() -> None:
    assert only(loss__effective_share=0.04).startswith("weights: the loss rests on few tokens")
    assert alerts({**RIGHT, "loss/effective_share": 0.1}, 0.1) == ()


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
