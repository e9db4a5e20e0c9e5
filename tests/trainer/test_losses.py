"""The policy loss against a float64 reference, hand-derived values and finite differences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from trainer.losses import policy_loss, units

NAN = float("nan")


def reference(
    logprobs: Any, prox: Any, behaviour: Any, advantages: Any, mask: Any,
    low: float = 0.2, high: float = 0.2, cap: float | None = 2.0,
) -> float:  # fmt: skip
    """One token after the other, in Python floats."""
    total, count = 0.0, 0
    for index in np.ndindex(mask.shape):
        if not mask[index]:
            continue
        ratio = math.exp(float(logprobs[index]) - float(prox[index]))
        clipped = min(max(ratio, 1 - low), 1 + high)
        gain = min(advantages[index] * ratio, advantages[index] * clipped)
        weight = 1.0
        if cap is not None:
            weight = min(math.exp(float(prox[index]) - float(behaviour[index])), cap)
        total -= weight * gain
        count += 1
    return total / count


def sample(seed: int, shape: tuple[int, int] = (5, 9)) -> dict[str, Any]:
    """Log-probs of three policies close enough that some tokens are clipped and some are not."""
    rng = np.random.default_rng(seed)
    prox = -rng.exponential(size=shape)
    return {
        "logprobs": prox + rng.normal(scale=0.3, size=shape),
        "prox_logprobs": prox,
        "behaviour_logprobs": prox + rng.normal(scale=0.7, size=shape),
        "advantages": rng.normal(size=shape),
        "mask": rng.integers(0, 2, shape),
    }


def tensors(given: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    return {
        name: torch.from_numpy(a) if name == "mask" else torch.tensor(a, dtype=dtype)
        for name, a in given.items()
    }


def test_one_token_by_hand() -> None:
    # r = e^0.5 = 1.6487, clipped to 1.2; w = e^(ln 1.5) = 1.5; loss = -1.5 * 1.2 * 2 = -3.6
    def one(value: float) -> Any:
        return np.array([[value]])

    loss, metrics = policy_loss(
        "ppo", one(-0.5), one(-1.0), one(-1.0 - math.log(1.5)), one(2.0), one(1)
    )
    assert loss == pytest.approx(-3.6, rel=1e-12)
    assert metrics == {
        "num_tokens": 1, "num_clipped": 1, "num_clamped": 0, "num_capped": 0,
        "sum_weight": pytest.approx(1.5),
    }  # fmt: skip
    # A negative advantage takes the worse of the two, the unclipped one: 1.5 * 1.6487 * 2
    loss, metrics = policy_loss(
        "ppo", one(-0.5), one(-1.0), one(-1.0 - math.log(1.5)), one(-2.0), one(1)
    )
    assert loss == pytest.approx(3 * math.exp(0.5), rel=1e-12)
    assert metrics["num_clipped"] == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("parameters", "plain"),
    [
        ({}, {}),
        ({"clip_low": 0.1, "clip_high": 0.4}, {"low": 0.1, "high": 0.4}),
        ({"correction_cap": 1.1}, {"cap": 1.1}),
        ({"correction": "none"}, {"cap": None}),
    ],
)
def test_it_equals_the_reference(
    seed: int, parameters: dict[str, Any], plain: dict[str, Any]
) -> None:
    given = sample(seed)
    loss, _ = policy_loss("ppo", **given, **parameters)
    assert loss == pytest.approx(reference(*given.values(), **plain), rel=1e-12)
    as_torch, _ = policy_loss("ppo", **tensors(given), **parameters)
    assert as_torch.item() == pytest.approx(loss, rel=1e-14)


@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_equals_finite_differences(seed: int) -> None:
    given = sample(seed, (3, 4))
    inputs = tensors(given)
    inputs["logprobs"].requires_grad_()
    policy_loss("ppo", **inputs)[0].backward()
    step = 1e-6
    for index in np.ndindex(given["mask"].shape):
        around = []
        for shift in (step, -step):
            moved = given["logprobs"].copy()
            moved[index] += shift
            around.append(reference(moved, *list(given.values())[1:]))
        slope = (around[0] - around[1]) / (2 * step)
        assert inputs["logprobs"].grad[index].item() == pytest.approx(slope, abs=1e-8)


def test_neither_the_proximal_policy_nor_the_weight_carries_gradient() -> None:
    inputs = tensors(sample(0))
    for name in ("logprobs", "prox_logprobs", "behaviour_logprobs"):
        inputs[name].requires_grad_()
    policy_loss("ppo", **inputs)[0].backward()
    assert inputs["logprobs"].grad is not None
    assert inputs["prox_logprobs"].grad is None
    assert inputs["behaviour_logprobs"].grad is None


def test_on_policy_the_gradient_is_that_of_the_weighted_log_probs() -> None:
    given = tensors(sample(1))
    given["prox_logprobs"] = given["logprobs"].clone()
    given["logprobs"].requires_grad_()
    policy_loss("ppo", **given)[0].backward()
    weight = (given["prox_logprobs"] - given["behaviour_logprobs"]).exp().clamp(max=2)
    expected = -given["advantages"] * weight * given["mask"] / given["mask"].sum()
    torch.testing.assert_close(given["logprobs"].grad, expected)


def test_what_the_mask_hides_reaches_neither_loss_nor_gradient() -> None:
    given = sample(2)
    loss, metrics = policy_loss("ppo", **given)
    hidden = {
        name: array if name == "mask" else np.where(given["mask"], array, NAN)
        for name, array in given.items()
    }
    inputs = tensors(hidden)
    inputs["logprobs"].requires_grad_()
    with_nan, same = policy_loss("ppo", **inputs)
    with_nan.backward()
    assert with_nan.item() == pytest.approx(loss, rel=1e-14)
    assert same == pytest.approx(metrics)
    assert torch.isfinite(inputs["logprobs"].grad).all()
    assert (inputs["logprobs"].grad[given["mask"] == 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_log_ratios_of_any_size_stay_finite_and_are_counted(
    dtype: torch.dtype, advantage: float
) -> None:
    sizes = [-1e4, -500, -21, -19, 0, 19, 21, 500, 1e4]
    gaps = torch.tensor([sizes], dtype=dtype)
    zeros = torch.zeros_like(gaps)
    # Far from the proximal policy, then far from the sampling one.
    for logprobs, prox, behaviour in ((gaps, zeros, zeros), (zeros, zeros, -gaps)):
        current = logprobs.clone().requires_grad_()
        loss, metrics = policy_loss(
            "ppo", current, prox, behaviour, torch.full_like(gaps, advantage), gaps == gaps
        )
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(current.grad).all()
        assert all(math.isfinite(v) for v in metrics.values())
        if logprobs is gaps:
            assert metrics["num_clamped"] == 6
            assert metrics["num_capped"] == 0
        else:
            assert metrics["num_clamped"] == 0
            assert metrics["num_capped"] == 4
            # e^-1e4, e^-500 and e^-21 vanish beside 1 + 4 caps of 2
            assert metrics["sum_weight"] == pytest.approx(9, abs=1e-6)


def test_micro_batches_with_the_steps_denominator_add_up_to_one_batch() -> None:
    given = sample(3, (10, 7))
    whole = tensors(given)
    whole["logprobs"].requires_grad_()
    loss, metrics = policy_loss("ppo", **whole)
    loss.backward()
    for cuts in ([3, 10], [1, 2, 4, 5, 6, 9, 10]):
        parts = tensors(given)
        leaf = parts["logprobs"].requires_grad_()
        total, sums = 0.0, dict.fromkeys(metrics, 0.0)
        for start, end in zip([0, *cuts], cuts, strict=False):
            piece = {name: array[start:end] for name, array in parts.items()}
            part, some = policy_loss("ppo", **piece, denominator=units(given["mask"]))
            part.backward()
            total += part.item()
            sums = {name: value + some[name] for name, value in sums.items()}
        assert total == pytest.approx(loss.item(), rel=1e-12)
        assert sums == pytest.approx(metrics)
        torch.testing.assert_close(leaf.grad, whole["logprobs"].grad, rtol=1e-12, atol=1e-15)


def test_a_fully_masked_micro_batch_adds_nothing_and_a_fully_masked_step_is_refused() -> None:
    given = tensors(sample(4)) | {"mask": torch.zeros(5, 9)}
    given["logprobs"].requires_grad_()
    loss, metrics = policy_loss("ppo", **given, denominator=17)
    loss.backward()
    assert loss.item() == 0
    assert metrics["num_tokens"] == 0
    assert (given["logprobs"].grad == 0).all()
    with pytest.raises(ValueError, match="all tokens are masked"):
        policy_loss("ppo", **given)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("advantages", r"advantage of trained token \(1, 2\) is nan"),
        ("behaviour_logprobs", r"behaviour log-prob of trained token \(1, 2\) is nan"),
    ],
)
def test_a_trained_token_that_is_not_finite_is_named(name: str, message: str) -> None:
    given = sample(5) | {"mask": np.ones((5, 9))}
    given[name][1, 2] = NAN
    with pytest.raises(ValueError, match=message):
        policy_loss("ppo", **given)


def test_without_correction_behaviour_log_probs_are_not_needed() -> None:
    given = sample(6)
    expected = reference(*given.values(), cap=None)
    given["behaviour_logprobs"][:] = NAN
    loss, _ = policy_loss("ppo", **given, correction="none")
    assert loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pppo", {}, "unknown loss 'pppo'; known: .*ppo"),
        ("ppo", {"aggregation": "mean"}, "unknown aggregation 'mean'; known: .*token-mean"),
        ("ppo", {"correction": "is"}, "unknown correction 'is'; known: none, tis"),
    ],
)
def test_an_unknown_name_is_answered_with_the_known_ones(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        policy_loss(name, **sample(0), **options)
