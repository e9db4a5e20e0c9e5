"""Several optimizer steps a step, and the policies its losses measure from, against a plain torch
loop; bit for bit over restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models import tiny_model
from tests.trainer.training import PlainLoop, advantages_of, cut, open_engine, random_rows, step
from trainer.batches import Rows
from trainer.engine import TrainingEngine

HALVES = (list(range(8)), list(range(8, 16)))  # rows of two mini-batches of two groups each
TWICE: dict[str, Any] = {"num_minibatches": 2, "proximal": "recompute"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(model: Path) -> Iterator[TrainingEngine]:
    engine = open_engine(model)
    yield engine
    engine.close()


def four_groups(seed: int = 0) -> Rows:
    """Their tokens of age 0 to 4."""
    rows = random_rows(seed, num_groups=4)
    rng = np.random.default_rng(seed)
    ages = tuple(rng.integers(0, 5, len(t)).astype(np.int32) for t in rows.tokens)
    return replace(rows, ages=ages)


def only(rows: Rows, chosen: list[int]) -> Rows:
    """As `rows`, but those not chosen have no trained token."""
    masks = (m if i in chosen else np.zeros_like(m) for i, m in enumerate(rows.masks))
    return replace(rows, masks=tuple(masks))


def proximal_of(kind: str, rows: Rows, start: PlainLoop) -> Callable[[int, Tensor], Tensor]:
    def found(i: int, current: Tensor) -> Tensor:
        trained = rows.masks[i]
        behaviour = torch.from_numpy(rows.logprobs[i][trained])
        assert rows.ages is not None
        age = torch.from_numpy(rows.ages[i][trained]).double()
        match kind:
            case "recompute":
                return torch.from_numpy(start.logprobs(rows, [i]))
            case "behaviour":
                return behaviour
        sampled, start_of_step, end_of_step = -age, 0.0, 1.0  # versions on one line
        share = ((start_of_step - sampled) / (end_of_step - sampled)).clamp(min=0.0)
        return behaviour + share * (current - behaviour)

    return found


def assert_moved_alike(engine: TrainingEngine, plain: PlainLoop, start: PlainLoop) -> None:
    """Element by element they may differ: Adam's step does not shrink with a gradient that is all
    rounding."""
    theirs, before = (dict(p.model.named_parameters()) for p in (plain, start))
    for name, parameter in engine.named_parameters():
        moved = theirs[name] - before[name]
        assert (parameter - theirs[name]).norm() < 0.01 * moved.norm()


@pytest.mark.parametrize("kind", ["recompute", "loglinear", "behaviour"])
def test_two_mini_batches_are_two_steps_of_a_plain_optimizer(model: Path, kind: str) -> None:
    rows, plain, start = four_groups(), PlainLoop(model), PlainLoop(model)
    prox = proximal_of(kind, rows, start)
    losses = [plain.step(rows, advantages_of(rows), chosen=half, prox=prox) for half in HALVES]
    engine = open_engine(model)
    done = step(engine, rows, num_minibatches=2, proximal=kind)
    assert_moved_alike(engine, plain, start)
    engine.close()
    assert done.skipped is None
    assert done.metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert done.metrics["minibatches/skipped"] == 0


def test_the_kl_to_the_initial_model_pulls_as_in_a_plain_loop(model: Path) -> None:
    plain, start = PlainLoop(model), PlainLoop(model)
    engine = open_engine(model)  # without a coefficient of its own, as one that replays may be
    found = []
    for seed in range(3):
        rows = four_groups(seed)
        expected = plain.step(rows, advantages_of(rows), reference=start, kl_coefficient=5.0)
        done = step(engine, rows, kl_coefficient=5.0)
        assert done.metrics["loss"] == pytest.approx(expected, abs=1e-4)
        found.append(done.metrics["kl/reference"])
    assert_moved_alike(engine, plain, start)
    assert found[0] == 0
    assert found[2] > 0.003
    assert "kl/reference" not in step(engine, four_groups()).metrics
    engine.close()


def test_with_one_mini_batch_to_recompute_is_to_reuse_bit_for_bit(model: Path) -> None:
    digests = set()
    for kind in ("recompute", "reuse"):
        engine = open_engine(model)
        for seed in range(2):
            step(engine, four_groups(seed), proximal=kind)
        digests.add(engine.digest())
        engine.close()
    assert len(digests) == 1


def test_recomputed_log_probs_are_those_of_the_forward_that_carries_the_gradient(
    engine: TrainingEngine,
) -> None:
    metrics = step(engine, four_groups(), learning_rate=0.0, **TWICE).metrics
    assert metrics["loss/ratio_mean"] == 1.0


def test_the_clip_measures_from_the_step_s_start(engine: TrainingEngine) -> None:
    moved = step(engine, four_groups(), learning_rate=0.05, **TWICE).metrics
    assert moved["loss/ratio_mean"] != pytest.approx(1.0, abs=1e-3)
    assert moved["loss/clipped_share"] > 0


def test_a_mini_batch_without_a_trained_token_makes_no_optimizer_step(model: Path) -> None:
    """Neither Adam's moments nor its count move: the next step is as after the first half alone."""
    digests = set()
    for settings in ({"num_minibatches": 1}, TWICE, {**TWICE, "num_minibatches": 4}):
        engine = open_engine(model)
        step(engine, only(four_groups(), HALVES[1][:4]), **settings)
        step(engine, four_groups(1))
        digests.add(engine.digest())
        engine.close()
    assert len(digests) == 1


@pytest.mark.parametrize("bad", [0, 1])
def test_a_mini_batch_that_is_not_finite_is_left_out_and_the_others_are_trained(
    model: Path, bad: int
) -> None:
    rows, good = four_groups(), HALVES[1 - bad]
    advantages = advantages_of(rows)
    huge = [np.full(len(a), 3e38) if i in HALVES[bad] else a for i, a in enumerate(advantages)]
    engine = open_engine(model)
    settings = engine._trainer.model_copy(update=TWICE)
    done = engine.step(rows, cut(rows, 120, 2), huge, 0, settings, measure_drift=True)
    step(engine, four_groups(1), **TWICE)
    digest = engine.digest()
    engine.close()
    assert (done.skipped, done.metrics["minibatches/skipped"]) == (None, 1)
    assert done.drift == done.metrics["kl/update"] > 0
    assert all(np.isfinite(value) for value in done.metrics.values())
    other = open_engine(model)
    left = only(rows, good)
    other.step(left, cut(left, 120, 2), advantages, 0, settings)
    step(other, four_groups(1), **TWICE)
    assert other.digest() == digest
    other.close()


def test_a_step_none_of_whose_mini_batches_is_finite_changes_nothing(
    engine: TrainingEngine,
) -> None:
    rows, digest = four_groups(), engine.digest()
    huge = [np.full(len(mask), 3e38) for mask in rows.masks]
    settings = engine._trainer.model_copy(update=TWICE)
    done = engine.step(rows, cut(rows, 120, 2), huge, 0, settings)
    assert (done.skipped, done.metrics["minibatches/skipped"]) == ("nan_gradient", 2)
    assert (engine.digest(), done.master_changed) == (digest, False)


def test_a_checkpoint_between_such_steps_goes_on_bit_for_bit(model: Path, tmp_path: Path) -> None:
    settings = {**TWICE, "kl_coefficient": 0.1}
    engine = open_engine(model)
    step(engine, four_groups(0), 0, **settings)
    engine.capture().write(tmp_path)
    digests = [engine.digest()]
    step(engine, four_groups(1), 1, **settings)
    digests.append(engine.digest())
    engine.close()
    again = open_engine(model)
    again.load(tmp_path)
    assert again.digest() == digests[0]
    step(again, four_groups(1), 1, **settings)
    assert again.digest() == digests[1]
    again.close()


def test_the_gap_is_of_tokens_whose_start_is_known(engine: TrainingEngine) -> None:
    """Without recomputing that is the first mini-batch; `fresh` are those of age 0."""
    rows = four_groups()
    assert rows.ages is not None
    fresh = [int((m & (a == 0)).sum()) for m, a in zip(rows.masks, rows.ages, strict=True)]
    alone = {"learning_rate": 0.0, "num_minibatches": 2}
    recomputed = step(engine, rows, **{**alone, "proximal": "recompute"}).metrics
    assert recomputed["gap/fresh/tokens"] == sum(fresh)
    first = step(engine, rows, **{**alone, "proximal": "behaviour"}).metrics
    assert first["gap/fresh/tokens"] == sum(fresh[i] for i in HALVES[0])
    whole = step(engine, rows, learning_rate=0.0).metrics
    names = [name for name in whole if name.startswith("gap/")]
    assert len(names) == 8
    assert {n: recomputed[n] for n in names} == pytest.approx({n: whole[n] for n in names})
