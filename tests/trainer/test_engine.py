"""The DeepSpeed engine: equal to a plain torch loop, bit-exact over restarts, unharmed by NaN."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from connectors.config import ConfigError, Model, Trainer
from operators.tracker import Belief, TrackerState
from tests.models import tiny_model
from tests.trainer.training import PlainLoop, advantages_of, cut, open_engine, random_rows, train
from trainer.batches import Rows
from trainer.checkpoint import CheckpointStore
from trainer.engine import TrainingEngine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(model: Path) -> Iterator[TrainingEngine]:
    engine = open_engine(model)
    yield engine
    engine.close()


def optimizer_state(engine: TrainingEngine) -> list[torch.Tensor]:
    """Copies of the optimizer's moments and of the float32 master weights."""
    optimizer = engine._engine.optimizer
    inner = optimizer.optimizer
    tensors = [t for group in inner.param_groups for t in group["params"]]
    for state in inner.state.values():
        tensors += [value for value in state.values() if torch.is_tensor(value)]
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("tied", [True, False], ids=["tied head", "own head"])
def test_losses_equal_a_plain_torch_loop(tmp_path: Path, tied: bool) -> None:
    model = tiny_model(tmp_path, tie=tied)
    engine, plain = open_engine(model), PlainLoop(model)
    for step in range(6):
        rows = random_rows(step)
        expected = plain.step(rows, advantages_of(rows))
        result = train(engine, step)
        assert result.metrics["loss"] == pytest.approx(expected, abs=1e-5)
    # Element by element they may differ: Adam's step does not shrink with a gradient that is all
    # rounding. The way both models moved must be the same.
    theirs = dict(plain.model.named_parameters())
    start = dict(PlainLoop(model).model.named_parameters())
    for name, parameter in engine.named_parameters():
        moved = theirs[name] - start[name]
        assert (parameter - theirs[name]).norm() < 0.01 * moved.norm()
    engine.close()


def test_micro_batches_give_the_gradient_of_one_big_batch(model: Path) -> None:
    rows = random_rows(0)
    results = []
    for budget in (100_000, 160, 40):
        engine = open_engine(model)
        micro_batches = cut(rows, budget)
        metrics = engine.step(rows, micro_batches, advantages_of(rows), 0).metrics
        results.append((len(micro_batches), metrics["loss"], metrics["grad_norm"]))
        engine.close()
    assert results[0][0] == 1
    assert 1 < results[1][0] < results[2][0]
    for _, loss, norm in results[1:]:
        assert loss == pytest.approx(results[0][1], rel=1e-5)
        assert norm == pytest.approx(results[0][2], rel=1e-5)


def test_the_same_step_gives_the_same_bits(model: Path) -> None:
    digests = []
    for _ in range(2):
        engine = open_engine(model)
        train(engine, 0)
        train(engine, 1)
        digests.append(engine.digest())
        engine.close()
    assert digests[0] == digests[1]


def test_train_six_is_train_three_restart_train_three_bit_for_bit(
    engine: TrainingEngine, model: Path, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        train(engine, step)
    CheckpointStore(tmp_path).save(3, engine.capture().write, b"")
    straight = []
    for step in (4, 5, 6):
        train(engine, step)
        straight.append(f"{step} {engine.digest()} {float(torch.rand(()))}")
    assert len(set(straight)) == 3

    restarted = subprocess.run(
        [sys.executable, "-m", "tests.trainer.training", str(model), str(tmp_path), "4", "6"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert restarted.returncode == 0, restarted.stderr
    assert restarted.stdout.splitlines() == straight


def test_a_checkpoint_brings_back_weights_optimizer_random_state_and_tracker(
    engine: TrainingEngine, tmp_path: Path
) -> None:
    train(engine, 0)
    assert engine.tracker == TrackerState()
    tracker = engine.tracker = TrackerState(beliefs={"a": Belief(0.1, 1 / 3)})
    engine.capture().write(tmp_path)
    digest, state, drawn = engine.digest(), optimizer_state(engine), torch.rand(3)
    train(engine, 1)
    engine.tracker = TrackerState()
    assert engine.digest() != digest
    engine.load(tmp_path)
    assert engine.digest() == digest
    assert all(map(torch.equal, optimizer_state(engine), state))
    assert torch.equal(torch.rand(3), drawn)
    assert engine.tracker == tracker
    assert not (tmp_path / "latest").exists()


def test_a_changed_learning_rate_takes_effect_on_resume(model: Path, tmp_path: Path) -> None:
    engine = open_engine(model)
    train(engine, 0)
    engine.capture().write(tmp_path)
    digest = engine.digest()
    engine.close()
    control = open_engine(model, learning_rate=0.0)
    control.load(tmp_path)
    assert control.digest() == digest
    assert train(control, 1).metrics["learning_rate"] == 0
    assert control.digest() == digest
    control.close()


def test_a_folder_without_a_checkpoint_is_refused(engine: TrainingEngine, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no checkpoint of this engine"):
        engine.load(tmp_path)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def undisturbed(model: Path, request: pytest.FixtureRequest) -> tuple[str, str]:
    """(dtype, the digest after steps 0 and 2)."""
    engine = open_engine(model, dtype=request.param)
    train(engine, 0)
    train(engine, 2)
    digest = engine.digest()
    engine.close()
    return request.param, digest


@pytest.mark.parametrize("cause", ["gradient", "loss"])
def test_a_step_that_is_not_finite_changes_nothing_and_the_next_is_as_if_it_had_not_been(
    model: Path, undisturbed: tuple[str, str], cause: str
) -> None:
    dtype, expected = undisturbed
    engine = open_engine(model, dtype=dtype)
    train(engine, 0)
    digest, state = engine.digest(), optimizer_state(engine)
    if cause == "gradient":
        _, parameter = engine.named_parameters()[3]
        hook = parameter.register_hook(lambda gradient: gradient * float("nan"))
        result = train(engine, 1)
        hook.remove()
    else:
        rows = random_rows(1)
        huge = [np.clip(a * 3e38, -3e38, 3e38) for a in advantages_of(rows)]
        result = engine.step(rows, cut(rows, 120), huge, 1)
    assert result.skipped == "nan_gradient"
    assert "grad_norm" not in result.metrics
    assert all(np.isfinite(value) for value in result.metrics.values())
    assert engine.digest() == digest
    assert all(map(torch.equal, optimizer_state(engine), state))
    assert train(engine, 2).skipped is None
    assert engine.digest() == expected
    engine.close()


def without_trained_tokens(rows: Rows) -> Rows:
    masks = tuple(np.zeros_like(mask) for mask in rows.masks)
    return Rows(ids=rows.ids, tokens=rows.tokens, masks=masks, logprobs=rows.logprobs,
                rewards=rows.rewards, groups=rows.groups)  # fmt: skip


def test_a_step_without_a_trained_token_is_skipped(engine: TrainingEngine) -> None:
    rows = without_trained_tokens(random_rows(0))
    digest = engine.digest()
    result = engine.step(rows, cut(rows, 100), advantages_of(rows), 0)
    assert result.skipped == "no_tokens"
    assert result.metrics["rows/untrained"] == len(rows)
    assert engine.digest() == digest


def test_the_drift_of_a_step_is_the_kl_of_the_policy_before_it_to_the_one_after(
    model: Path,
) -> None:
    rows, plain = random_rows(0), PlainLoop(model)
    micro_batches = cut(rows, 120)
    before = plain.logprobs(rows, micro_batches[0])
    plain.step(rows, advantages_of(rows))
    log_ratio = plain.logprobs(rows, micro_batches[0]) - before
    expected = float((np.exp(log_ratio) - 1 - log_ratio).mean())
    digests = []
    for measured in (True, True, False):
        engine = open_engine(model)
        done = engine.step(rows, micro_batches, advantages_of(rows), 0, measure_drift=measured)
        digests.append((engine.digest(), done.drift, done.metrics.get("kl/update")))
        engine.close()
    assert digests[0] == digests[1]
    assert digests[2] == (digests[0][0], None, None)
    assert digests[0][1] == digests[0][2] == pytest.approx(expected, rel=0.02)
    assert expected > 1e-6


def test_a_step_that_changes_nothing_has_no_drift(engine: TrainingEngine) -> None:
    rows = random_rows(0)
    nan = [np.full(len(mask), 3e38) for mask in rows.masks]
    done = engine.step(rows, cut(rows, 120), nan, 0, measure_drift=True)
    assert (done.skipped, done.drift) == ("nan_gradient", 0.0)
    rows = without_trained_tokens(rows)
    done = engine.step(rows, cut(rows, 120), nan, 0, measure_drift=True)
    assert (done.skipped, done.drift) == ("no_tokens", 0.0)


def test_the_gap_is_measured_on_the_tokens_that_were_sampled(model: Path) -> None:
    """Rows whose behaviour log-probs are the model's own, but for one token that is off by 0.25."""
    rows = random_rows(0)
    plain = PlainLoop(model)
    logprobs = []
    with torch.no_grad():
        for ids in rows.tokens:
            tokens = torch.from_numpy(ids.astype(np.int64))
            logits = plain.model(input_ids=tokens[None]).logits[0, :-1] / 0.9
            chosen = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
            logprobs.append(np.concatenate([[np.nan], chosen.numpy()]).astype(np.float32))
    moved = next(i for i in range(len(logprobs[0])) if rows.masks[0][i])
    logprobs[0][moved] -= 0.25
    exact = Rows(ids=rows.ids, tokens=rows.tokens, masks=rows.masks, logprobs=tuple(logprobs),
                 rewards=rows.rewards, groups=rows.groups)  # fmt: skip
    engine = open_engine(model)
    metrics = engine.step(exact, cut(exact, 120), advantages_of(exact), 0).metrics
    engine.close()
    assert metrics["gap/max"] == pytest.approx(0.25, abs=1e-4)
    assert metrics["gap/mean"] == pytest.approx(0.25 / exact.num_trained, abs=1e-5)
    assert metrics["gap/p99"] < 1e-4
    assert metrics["loss/capped_share"] == 0
    assert metrics["loss/clipped_share"] == 0
    assert metrics["tokens/trained"] == exact.num_trained
    assert metrics["reward/mean"] == pytest.approx(exact.rewards.mean())


def test_a_snapshot_is_apart_from_the_weights_it_was_taken_of(engine: TrainingEngine) -> None:
    before = engine.digest()
    snapshot = engine.snapshot()
    train(engine, 0)
    assert snapshot.digest == before != engine.digest()
    assert engine.snapshot(into=snapshot).digest == engine.digest()


def test_save_pretrained_leaves_a_folder_that_loads(engine: TrainingEngine, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    train(engine, 0)
    engine.save_pretrained(tmp_path / "out")
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    for name, parameter in engine.named_parameters():
        assert torch.equal(loaded[name], parameter)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("a")


def test_the_environment_says_what_bits_depend_on(engine: TrainingEngine) -> None:
    environment = engine.environment()
    assert environment["threads"] == "1"
    assert environment["ranks"] == "1"
    assert environment["torch"] == torch.__version__
    assert {"deepspeed", "transformers", "cpu_capability", "dtype"} <= environment.keys()
    assert all(isinstance(value, str) for value in environment.values())


def test_closing_ends_the_process_group_and_a_new_engine_can_start(model: Path) -> None:
    engine = open_engine(model)
    engine.close()
    engine.close()
    assert not dist.is_initialized()
    open_engine(model).close()


@pytest.mark.parametrize(
    ("settings", "folder", "error", "message"),
    [
        ({"num_ranks": 2}, None, ConfigError, "trainer.num_ranks: is 2, and this is one of 1"),
        ({}, "nowhere", FileNotFoundError, "nowhere holds no model"),
    ],
)
def test_what_cannot_run_is_refused_before_the_model_is_loaded(
    model: Path, settings: dict[str, Any], folder: str | None, error: type[Exception], message: str
) -> None:
    path = model if folder is None else model / folder
    with pytest.raises(error, match=message):
        TrainingEngine(path, Trainer(**settings), Model(path=str(path)), 1.0)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "gspo", "aggregation": "seq-mean-token-mean", "entropy_coefficient": 0.01},
        {"loss": "cispo", "aggregation": "prompt-mean", "correction": "mis",
         "correction_level": "geometric", "correction_low": 0.1, "correction_cap": 10.0},
        {"loss": "dppo", "loss_parameters": {"divergence": "kl"}, "proximal": "behaviour",
         "aggregation": "constant-norm", "aggregation_constant": 40.0, "rejection": "k3",
         "rejection_level": "token"},
    ],
    ids=lambda settings: settings["loss"],
)  # fmt: skip
def test_the_family_trains_through_the_engine_however_the_step_is_cut(
    model: Path, settings: dict[str, Any]
) -> None:
    rows = replace(random_rows(0), samples=np.tile([0, 0, 1, 2], 3))
    results = []
    for budget in (100_000, 160, 40):
        engine = open_engine(model, **settings)
        metrics = engine.step(rows, cut(rows, budget), advantages_of(rows), 0).metrics
        results.append((metrics["loss"], metrics["grad_norm"]))
        engine.close()
    for loss, norm in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-5)  # terms of size 6 cancel
        assert norm == pytest.approx(results[0][1], rel=1e-5)
