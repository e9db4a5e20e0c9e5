"""Tokens over age: which they are, what a step makes of them, and that it can be done again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connectors.config import Trainer
from connectors.records import Group, Prompt, Segment, Trajectory, Version, parse_group_id
from operators.staleness import policy
from operators.tracker import TrackerState
from tests.trainer.training import SETTINGS, open_engine
from trainer.batches import Rows
from trainer.engine import StepResult
from trainer.execute import Execution, execute
from trainer.losses import policy_loss
from trainer.overdue import (
    Reweight,
    counts,
    masked_versions,
    recorded,
    reweight_of,
    row_weights,
    token_weights,
    weights_of,
)

V3, V5, V6 = (Version(0, n) for n in (3, 5, 6))
AT_7 = {V3: 4, V5: 2, V6: 1}


def group(*, versions: tuple[int, ...] = (3, 5, 6), number: int = 0) -> Group:
    """Two trajectories of a prompt of 2 tokens, then 2 tokens a version; rewards 0 and 1."""
    group_id = f"p/0/{number}"
    rng = np.random.default_rng(number)
    length = 2 + 2 * len(versions)
    segments = tuple(Segment(2 + 2 * i, 4 + 2 * i, 0, v) for i, v in enumerate(versions))
    rows = tuple(
        Trajectory(
            trajectory_id=f"{group_id}/{k}",
            group_id=group_id,
            task="a",
            tokens=rng.integers(4, 260, length).astype(np.int32),
            loss_mask=np.array([0, 0] + [1] * (length - 2), np.int8),
            logprobs=np.where(np.arange(length) < 2, np.nan, -5.0).astype(np.float32),
            segments=segments,
            origin=parse_group_id(group_id),
            reward=float(k),
        )
        for k in range(2)
    )
    return Group(group_id=group_id, prompt=Prompt(task="a", prompt="x"), trajectories=rows)


def test_versions_below_the_cut_are_masked() -> None:
    assert token_weights(AT_7, mask_before=V5) == {V3: 0.0}
    assert token_weights(AT_7, mask_before=Version(0, 2)) == {}
    assert token_weights(AT_7) == {}


def test_each_step_over_the_bound_is_another_factor() -> None:
    # At version 7, bound 1: 3 is 4 old, 3 over; 5 is 2 old, 1 over; 6 is 1 old.
    weights = token_weights(AT_7, reweight=Reweight(bound=1, decay=0.5))
    assert weights == {V3: 0.125, V5: 0.5}
    assert token_weights(AT_7, reweight=Reweight(bound=4, decay=0.5)) == {}


def test_a_row_weighs_each_token_as_its_version() -> None:
    row = group().trajectories[0]
    assert row_weights(row, {V3: 0.0, V5: 0.5}).tolist() == [1, 1, 0, 0, 0.5, 0.5, 1, 1]
    assert counts([group()], {V3: 0.0, V5: 0.5}) == {"tokens/masked": 4, "tokens/reweighted": 4}
    assert counts([group()], {}) == {}


def test_a_manifest_gives_back_the_very_same_weights() -> None:
    weights = {V3: 0.0, V5: 0.9**3, Version(12, 345): 0.1}
    assert weights_of({"loss": "ppo", **recorded(weights)}) == weights
    assert masked_versions(recorded(weights)) == {V3}
    assert weights_of({"loss": "ppo"}) == {}
    assert recorded({}) == {}


def test_only_a_policy_that_reweights_says_how() -> None:
    found = reweight_of(policy("deadline", bound=3, at_deadline="reweight", decay=0.8))
    assert found == Reweight(bound=3, decay=0.8)
    for other in (policy("deadline", at_deadline="mask"), policy("sync")):
        assert reweight_of(other) is None


# ------------------------------------------------------------------------------------- in a step
class WrittenDown:
    """In place of an engine: what it was to train."""

    tracker = TrackerState()
    max_tokens, num_shares = 1000, 1

    def step(
        self,
        rows: Rows,
        micro_batches: Any,
        advantages: Any,
        seed: int,
        trainer: Trainer,
        **named: Any,
    ) -> StepResult:
        self.rows, self.advantages = rows, [a.tolist() for a in advantages]
        return StepResult(metrics={}, skipped=None, seconds={}, master_changed=True)


def executed(groups: list[Group], weights: dict[Version, float]) -> tuple[WrittenDown, Execution]:
    engine = WrittenDown()
    return engine, execute(engine, groups, SETTINGS, 0, weights=weights)  # type: ignore[arg-type]


def test_a_masked_token_is_as_if_it_were_none_of_the_policys() -> None:
    masked, done = executed([group()], {V3: 0.0})
    rows = [
        replace(t, loss_mask=np.array([0, 0, 0, 0, 1, 1, 1, 1], np.int8))
        for t in group().trajectories
    ]
    plain, _ = executed([replace(group(), trajectories=tuple(rows))], {})
    assert [m.tolist() for m in masked.rows.masks] == [m.tolist() for m in plain.rows.masks]
    assert masked.advantages == plain.advantages
    assert done.metrics["tokens/masked"] == 4


def test_a_late_token_counts_less_by_its_weight() -> None:
    # GRPO of rewards 0 and 1: mean 1/2, and both are 1/2 away.
    plain, _ = executed([group()], {})
    low, high = (a[2] for a in plain.advantages)
    assert low == -high < 0
    weighed, done = executed([group()], {V3: 0.25, V5: 0.5})
    assert [m.tolist() for m in weighed.rows.masks] == [m.tolist() for m in plain.rows.masks]
    for row, advantage in zip(weighed.advantages, (low, high), strict=True):
        share = [advantage * w for w in (0.25, 0.25, 0.5, 0.5, 1, 1)]
        assert row[2:] == pytest.approx(share, rel=1e-6)
    assert done.metrics["tokens/reweighted"] == 8
    # So is the loss: at ratio 1 each token's is -advantage, and the mean is over all of them.
    zeros = np.zeros((1, 6))
    loss, _ = policy_loss(
        "ppo", zeros, zeros, zeros, np.array([weighed.advantages[1][2:]]), np.ones((1, 6))
    )
    assert loss == pytest.approx(-high * (2 * 0.25 + 2 * 0.5 + 2) / 6, rel=1e-6)


def test_a_step_over_age_is_executed_again_bit_for_bit_from_what_its_manifest_says(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    trainer = SETTINGS.model_copy(update={"learning_rate": 1e-2})
    groups = [group(number=n) for n in range(2)]
    engine = open_engine(tiny_model_path)
    start = tmp_path / "start"
    start.mkdir()
    engine.capture().write(start)
    digests = []
    for weights in ({}, {V3: 0.0}, {V3: 0.3, V5: 0.7}, weights_of(recorded({V3: 0.3, V5: 0.7}))):
        engine.load(start)
        execute(engine, groups, trainer, 7, weights=weights)
        digests.append(engine.digest())
    engine.load(start)
    done = execute(engine, groups, trainer, 7, weights={V3: 0.0, V5: 0.0, V6: 0.0})
    engine.close()
    assert len(set(digests[:3])) == 3
    assert digests[3] == digests[2]
    assert (done.skipped, done.micro_batches) == ("no_tokens", ())
