"""Sessions are foretold before they are learnt from, whatever the estimator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from connectors.config import Trainer
from connectors.records import Group, Version
from operators.tracker import Belief, TrackerState, ValueTracker
from tests.trainer.groups import trainable_group
from tests.trainer.session_groups import correction, session_group
from tests.trainer.training import open_engine
from trainer import prequential
from trainer.engine import TrainingEngine
from trainer.execute import execute

OPO = Trainer(advantage="opo", learning_rate=1e-3, num_threads=1)


@pytest.fixture
def engine(tiny_model_path: Path) -> Iterator[TrainingEngine]:
    with closing(open_engine(tiny_model_path)) as opened:
        yield opened


def session(offset: int, reward: float, number: int | None = 0, **more: Any) -> Group:
    version = None if number is None else Version(0, number)
    return session_group(f"calls/0/{offset}", version, seed=offset, reward=reward, **more)


def test_error_and_reward_are_summed_by_task_and_by_the_version_that_served() -> None:
    """The value of a/* is 3/4; that of what was never seen 1/2."""
    before = TrackerState(beliefs={"a/*": Belief(3.0, 1.0)})
    first = session(1, 1.0)
    groups = [
        first,
        session(2, 0.0),
        session(3, 1.0, 4),
        session(4, 0.25, None, task="b"),
        session(5, 1.0, label="provisional"),
        correction(first, "said/0/1", before="1.0", reward=0.0),
        trainable_group("p/0/0", Version(0, 0), seed=1),
    ]
    found = prequential.metrics(ValueTracker(), before, groups)
    assert found == {
        "traffic/groups": 6, "traffic/corrections": 1,
        "prequential/a/0.0/n": 2, "prequential/a/0.0/reward": 1.0,
        "prequential/a/0.0/squared": 0.25**2 + 0.75**2, "prequential/a/0.0/absolute": 1.0,
        "prequential/a/0.4/n": 1, "prequential/a/0.4/reward": 1.0,
        "prequential/a/0.4/squared": 0.25**2, "prequential/a/0.4/absolute": 0.25,
        "prequential/b/unknown/n": 1, "prequential/b/unknown/reward": 0.25,
        "prequential/b/unknown/squared": 0.25**2, "prequential/b/unknown/absolute": 0.25,
    }  # fmt: skip


def test_labels_of_other_bounds_are_mapped_and_cut_to_them() -> None:
    tracker = ValueTracker(low=-1.0, high=1.0)
    found = prequential.metrics(tracker, TrackerState(), [session(1, 1.0), session(2, -5.0)])
    assert found["prequential/a/0.0/reward"] == 1.0
    assert found["prequential/a/0.0/absolute"] == 1.0


def test_the_label_is_learnt_after_it_was_foretold_though_the_estimator_takes_no_values(
    engine: TrainingEngine,
) -> None:
    done = [
        execute(engine, [session(step, 1.0), session(9 + step, 1.0)], OPO, seed=1, labels=(0, 1))
        for step in range(3)
    ]
    errors = [step.metrics["prequential/a/0.0/absolute"] / 2 for step in done]
    assert errors[0] == 0.5, "of what was never seen"
    assert errors[0] > errors[1] > errors[2]
    assert "kl/update" not in done[0].metrics, "how far the policy moved is nobody's question"
    assert "value/brier" not in done[0].metrics
    assert set(engine.tracker.beliefs) == {"a/*"}
    assert engine.tracker.length == 0.0


def test_without_live_traffic_nothing_is_tracked_for_an_estimator_that_takes_none(
    engine: TrainingEngine,
) -> None:
    done = execute(engine, [session(1, 1.0)], OPO, seed=1)
    assert engine.tracker == TrackerState()
    assert not any(name.startswith(("prequential/", "traffic/")) for name in done.metrics)


def test_spo_takes_the_very_values_that_are_scored(engine: TrainingEngine) -> None:
    spo = OPO.model_copy(update={"advantage": "spo"})
    groups = [session(1, 1.0), session(2, 0.0)]
    done = execute(engine, groups, spo, seed=1, labels=(0.0, 1.0))
    assert done.metrics["prequential/a/0.0/squared"] / 2 == done.metrics["value/brier"]
    assert "kl/update" in done.metrics
