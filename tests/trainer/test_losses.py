"""The policy losses against a float64 reference, values derived by hand and finite differences."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors import algorithms
from connectors.config import Trainer
from connectors.parameters import OneOf
from tests.trainer import loss_reference as reference
from tests.trainer.loss_reference import sample
from trainer.aggregation import AGGREGATIONS
from trainer.corrections import CORRECTIONS, LEVELS, PROXIMALS, REJECTIONS, proximal
from trainer.losses import policy_loss
from trainer.regularisers import KLS
from trainer.surrogates import DIVERGENCES, LOSSES

NAN = float("nan")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"correction": "none"},
    {"correction_cap": 1.1},
    {"correction": "icepop", "correction_low": 0.8, "correction_cap": 1.3},
    {"correction": "icepop", "correction_level": "sequence"},
    {"correction": "mis", "correction_level": "geometric", "correction_low": 0.9},
    {"correction_level": "sequence", "rejection": "k1", "rejection_level": "geometric"},
    {"rejection": "k2", "rejection_level": "token", "rejection_high": 0.05},
    {"rejection": "k3", "rejection_level": "sequence", "rejection_high": 0.5},
]
LOSS_PARAMETERS: list[tuple[str, dict[str, Any]]] = [
    ("ppo", {}),
    ("ppo", {"clip_low": 0.1, "clip_high": 0.4}),
    ("ppo", {"dual_clip": 1.3}),
    ("gspo", {"clip_low": 0.05, "clip_high": 0.1}),
    ("cispo", {}),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.1}),
    ("dppo", {"limit_low": 0.02, "limit_high": 0.01}),
    ("dppo", {"divergence": "kl", "limit_low": 1e-3, "limit_high": 2e-3}),
    ("dppo", {"limit_high": 1.0, "ratio_cap": 1.2}),
    ("reinforce", {}),
]


def tensors(given: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    return {
        name: torch.from_numpy(a) if name == "mask" else torch.tensor(a, dtype=dtype)
        for name, a in given.items()
    }


def one(value: float) -> Any:
    return np.array([[value]])


def gradient(name: str, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
    leaf = inputs["logprobs"] = inputs["logprobs"].detach().requires_grad_()
    policy_loss(name, **inputs, **options)[0].backward()
    assert leaf.grad is not None
    return leaf.grad


# ------------------------------------------------------------------------------------- by hand
def test_one_token_by_hand() -> None:
    # r = e^0.5 = 1.6487, clipped to 1.2; w = e^(ln 1.5) = 1.5; loss = -1.5 * 1.2 * 2 = -3.6
    loss, metrics = policy_loss(
        "ppo", one(-0.5), one(-1.0), one(-1.0 - math.log(1.5)), one(2.0), one(1)
    )
    assert loss == pytest.approx(-3.6, rel=1e-12)
    assert metrics == pytest.approx(
        {
            "num_tokens": 1, "num_clipped": 1, "num_clamped": 0, "num_capped": 0, "num_masked": 0,
            "num_rejected": 0, "sum_weight": 1.5, "sum_weight_squared": 2.25,
            "sum_ratio": math.exp(0.5), "num_behaviour": 1,
            "sum_kl_behaviour": 0.5 - math.log(1.5),
        }
    )  # fmt: skip
    # A negative advantage takes the worse of the two, the unclipped one: 1.5 * 1.6487 * 2
    loss, metrics = policy_loss(
        "ppo", one(-0.5), one(-1.0), one(-1.0 - math.log(1.5)), one(-2.0), one(1)
    )
    assert loss == pytest.approx(3 * math.exp(0.5), rel=1e-12)
    assert metrics["num_clipped"] == 0


def test_the_dual_clip_holds_a_bad_token_that_became_far_likelier() -> None:
    # r = e^2 = 7.39 and A = -2: plain PPO loses 14.78, the dual clip at 3 holds it at 6.
    numbers = one(-0.5), one(-2.5), one(-2.5), one(-2.0), one(1)
    assert policy_loss("ppo", *numbers)[0] == pytest.approx(2 * math.exp(2))
    loss, metrics = policy_loss("ppo", *numbers, dual_clip=3.0)
    assert (loss, metrics["num_clipped"]) == (pytest.approx(6.0), 1)
    # A positive advantage does not know it.
    good = one(-0.5), one(-0.6), one(-0.6), one(2.0), one(1)
    assert policy_loss("ppo", *good, dual_clip=3.0)[0] == policy_loss("ppo", *good)[0]


def test_gspo_gives_each_token_the_ratio_of_its_row() -> None:
    # Log-ratios 0.3 and 0.1 over two trained tokens around a hole: s = e^0.2; the row's loss is
    # the mean, -s A = -1.2214 A, and each token's gradient is s A / 2.
    inputs = {
        "logprobs": torch.tensor([[-0.7, -9.0, -0.9]], dtype=torch.float64),
        "prox_logprobs": torch.tensor([[-1.0, NAN, -1.0]], dtype=torch.float64),
        "behaviour_logprobs": torch.tensor([[-1.0, NAN, -1.0]], dtype=torch.float64),
        "advantages": torch.tensor([[0.5, NAN, 0.5]], dtype=torch.float64),
        "mask": torch.tensor([[1, 0, 1]]),
    }
    wide = {"clip_low": 0.5, "clip_high": 0.5, "aggregation": "seq-mean-token-mean"}
    loss, metrics = policy_loss("gspo", **inputs, **wide)
    assert loss.item() == pytest.approx(-0.5 * math.exp(0.2), rel=1e-12)
    assert metrics["sum_ratio"] == pytest.approx(2 * math.exp(0.2))
    expected = [[-math.exp(0.2) * 0.25, 0.0, -math.exp(0.2) * 0.25]]
    assert gradient("gspo", inputs, **wide).tolist() == [pytest.approx(expected[0], rel=1e-12)]
    # At the paper's bounds the whole row is clipped.
    assert policy_loss("gspo", **inputs)[1]["num_clipped"] == 2
    assert (gradient("gspo", inputs) == 0).all()


def test_cispo_clips_the_weight_and_keeps_every_tokens_gradient() -> None:
    # r = e^2 = 7.39, clipped to 5: the gradient of -5 A log p is -5 A.
    inputs = tensors(
        dict(zip(sample(0), (one(-0.5), one(-2.5), one(-2.5), one(2.0), one(1)), strict=True))
    )
    assert gradient("cispo", inputs).item() == pytest.approx(-10.0)
    loss, metrics = policy_loss("cispo", **inputs)
    assert loss.item() == pytest.approx(-5 * 2 * -0.5)
    assert metrics["num_clipped"] == 1
    assert gradient("ppo", inputs).item() == 0


@pytest.mark.parametrize(
    ("now", "was", "advantage", "kept"),
    [
        (0.7, 0.4, 1.0, False),  # up by 0.3 and pushed up further
        (0.7, 0.4, -1.0, True),  # pushed back
        (0.5, 0.4, 1.0, True),  # only 0.1 away
        (0.1, 0.4, -1.0, False),
        (0.1, 0.4, 1.0, True),
        (1e-6, 1e-9, 1.0, True),  # a thousand times likelier, and still as good as never
    ],
)
def test_dppo_masks_what_leads_out_of_the_trust_region(
    now: float, was: float, advantage: float, kept: bool
) -> None:
    p, q = one(math.log(now)), one(math.log(was))
    loss, metrics = policy_loss("dppo", p, q, q, one(advantage), one(1))
    assert metrics["num_clipped"] == (not kept)
    expected = -advantage * min(now / was, 20.0) * math.log(now) if kept else 0.0
    assert loss == pytest.approx(expected, rel=1e-9)


def test_imitation_with_advantage_one_is_the_cross_entropy_and_knows_no_sampler() -> None:
    found = tensors(sample(7))
    found["behaviour_logprobs"][:] = NAN
    found["advantages"] = torch.ones_like(found["advantages"])
    loss, metrics = policy_loss("imitation", **found, correction="none")
    trained = found["mask"] != 0
    assert loss.item() == pytest.approx(-found["logprobs"][trained].mean().item(), rel=1e-12)
    assert (metrics["num_behaviour"], metrics["sum_kl_behaviour"]) == (0, 0)
    found["behaviour_logprobs"] = None
    assert policy_loss("imitation", **found, correction="none")[0].item() == loss.item()
    for options in ({}, {"correction": "none", "rejection": "k1"}):
        with pytest.raises(ValueError, match="takes correction and rejection 'none'"):
            policy_loss("imitation", **found, **options)


# ------------------------------------------------------------------------------- the reference
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("name", "parameters"), LOSS_PARAMETERS)
def test_it_equals_the_reference(
    seed: int, options: dict[str, Any], name: str, parameters: dict[str, Any]
) -> None:
    found, all_options = sample(seed), options | parameters
    loss, _ = policy_loss(name, **found, **all_options)
    assert isinstance(loss, np.float64)
    expected = reference.policy_loss(name, found, **all_options)
    assert loss == pytest.approx(expected, rel=1e-11, abs=1e-13)
    as_torch, _ = policy_loss(name, **tensors(found), **all_options)
    assert as_torch.item() == pytest.approx(loss, rel=1e-13)


@pytest.mark.parametrize("kl", sorted(KLS))
def test_regularisers_are_not_corrected_but_leave_with_a_rejected_token(kl: str) -> None:
    found, rng = sample(3), np.random.default_rng(0)
    options: dict[str, Any] = {
        "reference_logprobs": found["prox_logprobs"] + rng.normal(size=(5, 9)),
        "kl": kl, "kl_coefficient": 0.3,
        "entropy": rng.random((5, 9)), "entropy_coefficient": 0.2,
        "rejection": "k1", "rejection_level": "token",
    }  # fmt: skip
    loss, metrics = policy_loss("ppo", **found, **options)
    assert loss == pytest.approx(reference.policy_loss("ppo", found, **options), rel=1e-12)
    assert 0 < metrics["num_rejected"] < metrics["num_tokens"]
    trained = found["mask"] != 0
    assert metrics["sum_entropy"] == pytest.approx(options["entropy"][trained].sum())
    gaps = (found["logprobs"] - options["reference_logprobs"])[trained]
    assert metrics["sum_kl_reference"] == pytest.approx(
        sum(reference.kl_value(kl, d) for d in gaps)
    )
    # Without a coefficient they are measured and not trained.
    plain = {**options, "kl_coefficient": 0.0, "entropy_coefficient": 0.0}
    loss, same = policy_loss("ppo", **found, **plain)
    assert loss == pytest.approx(reference.policy_loss("ppo", found, **plain), rel=1e-12)
    assert same["sum_kl_reference"] == metrics["sum_kl_reference"]


@pytest.mark.parametrize(("name", "parameters"), [*LOSS_PARAMETERS, ("imitation", {})])
def test_the_gradient_equals_finite_differences(name: str, parameters: dict[str, Any]) -> None:
    """Of the reference; where a factor carries no gradient it is held at its value."""
    found = sample(1, (3, 5))
    found["advantages"][:] = found["advantages"][:, :1]  # GSPO is derived for one a row
    rng = np.random.default_rng(2)
    options: dict[str, Any] = {
        "aggregation": "seq-mean-token-mean", "kl": "k3", "kl_coefficient": 0.1,
        "reference_logprobs": found["prox_logprobs"] + rng.normal(scale=0.5, size=(3, 5)),
        "correction": "none" if name == "imitation" else "tis",
    }  # fmt: skip
    as_torch = options | {"reference_logprobs": torch.tensor(options["reference_logprobs"])}
    got = gradient(name, tensors(found), **as_torch, **parameters)
    held = name in ("cispo", "dppo")
    factor = _held_factor(name, found, parameters) if held else None
    step = 1e-6
    for index in np.ndindex(found["mask"].shape):
        around = []
        for shift in (step, -step):
            logprobs = found["logprobs"].copy()
            logprobs[index] += shift
            moved = found | {"logprobs": logprobs}
            if held:  # -A factor log p is the loss of reinforce with advantage A factor
                moved["advantages"] = found["advantages"] * factor
                around.append(reference.policy_loss("reinforce", moved, **options))
            else:
                around.append(reference.policy_loss(name, moved, **options, **parameters))
        slope = (around[0] - around[1]) / (2 * step)
        assert got[index].item() == pytest.approx(slope, abs=1e-8)


def _held_factor(name: str, found: dict[str, Any], parameters: dict[str, Any]) -> Any:
    factor = np.zeros(found["mask"].shape)
    for index in np.ndindex(factor.shape):
        c, q, a = (float(found[k][index]) for k in ("logprobs", "prox_logprobs", "advantages"))
        factor[index] = reference.surrogate(name, [c], [q], [a], **parameters)[0] / (-a * c)
    return factor


@pytest.mark.parametrize(("kl", "slope"), [("k1", 1.0), ("k2", 0.7), ("k3", 1 - math.exp(-0.7))])
def test_the_gradient_of_a_kl_is_what_its_page_says(kl: str, slope: float) -> None:
    inputs = tensors(
        dict(zip(sample(0), (one(-0.5), one(-0.5), one(-0.5), one(0.0), one(1)), strict=True))
    )
    options = {"reference_logprobs": torch.tensor([[-1.2]]).double(), "kl_coefficient": 1.0}
    assert gradient("ppo", inputs, **options, kl=kl).item() == pytest.approx(slope, rel=1e-6)
    assert gradient("ppo", inputs, **options, kl="low-variance").item() == pytest.approx(
        1 - math.exp(-0.7), rel=1e-6
    )


def test_over_the_policys_own_tokens_k1_pulls_nowhere_k2_as_the_kl_and_k3_as_its_reverse() -> None:
    """Three tokens, exact expectations: sum_a p(a) d/ds of each estimator at a."""
    scores = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    log_q = torch.log_softmax(torch.tensor([-0.5, 0.4, 0.1], dtype=torch.float64), 0)

    def pull(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, scores)[0]

    log_p = torch.log_softmax(scores, 0)
    p = log_p.exp()
    forward = pull((log_q.exp() * (log_q - torch.log_softmax(scores, 0))).sum())
    backward = pull((p * (log_p - log_q)).sum())
    expected = {"k1": torch.zeros(3).double(), "k2": backward, "k3": forward}
    for kl, pulled in expected.items():
        values = KLS[kl](torch.log_softmax(scores, 0) - log_q)[0]
        torch.testing.assert_close(pull((p.detach() * values).sum()), pulled)


# ------------------------------------------------------------------------------ what it promises
def test_neither_the_proximal_policy_nor_the_weight_carries_gradient() -> None:
    for name in sorted(set(LOSSES) - {"imitation"}):
        inputs = tensors(sample(0))
        for key in ("logprobs", "prox_logprobs", "behaviour_logprobs"):
            inputs[key].requires_grad_()
        policy_loss(name, **inputs, rejection="k3")[0].backward()
        assert inputs["logprobs"].grad is not None
        assert inputs["prox_logprobs"].grad is None
        assert inputs["behaviour_logprobs"].grad is None


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"imitation"}))
def test_on_policy_every_loss_has_the_gradient_of_the_weighted_log_probs(name: str) -> None:
    found = tensors(sample(1))
    found["prox_logprobs"] = found["logprobs"].clone()
    weight = (found["prox_logprobs"] - found["behaviour_logprobs"]).exp().clamp(max=2)
    expected = -found["advantages"] * weight * found["mask"] / found["mask"].sum()
    torch.testing.assert_close(gradient(name, found), expected)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_what_the_mask_hides_reaches_neither_loss_nor_gradient(name: str) -> None:
    found, options = sample(2), {"rejection": "k2", "correction": "mis"}
    if name == "imitation":
        options = {"correction": "none"}
    loss, metrics = policy_loss(name, **found, **options)
    hidden = {
        key: array if key == "mask" else np.where(found["mask"], array, NAN)
        for key, array in found.items()
    }
    inputs = tensors(hidden)
    inputs["logprobs"].requires_grad_()
    with_nan, same = policy_loss(name, **inputs, **options)
    with_nan.backward()
    assert with_nan.item() == pytest.approx(loss, rel=1e-13)
    assert same == pytest.approx(metrics)
    assert torch.isfinite(inputs["logprobs"].grad).all()
    assert (inputs["logprobs"].grad[found["mask"] == 0] == 0).all()


SIZES = [-1e4, -500, -21, -19, 0, 19, 21, 500, 1e4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_clamped_and_capped_tokens_are_counted(dtype: torch.dtype, advantage: float) -> None:
    gaps = torch.tensor([SIZES], dtype=dtype)
    zeros, every = torch.zeros_like(gaps), torch.ones_like(gaps)
    far = policy_loss("ppo", gaps, zeros, zeros, advantage * every, every)[1]
    assert (far["num_clamped"], far["num_capped"]) == (6, 0)
    old = policy_loss("ppo", zeros, zeros, -gaps, advantage * every, every)[1]
    assert (old["num_clamped"], old["num_capped"]) == (0, 4)
    # e^-1e4 ... e^-19 vanish beside 1 + 4 caps of 2
    assert old["sum_weight"] == pytest.approx(9, abs=1e-6)
    assert old["sum_weight_squared"] == pytest.approx(17, abs=1e-6)
    # The row's mean is 0: it stays, and six of its tokens' own ratios are clamped.
    kept = policy_loss(
        "ppo", zeros, zeros, -gaps, every, every, correction="mis", correction_level="geometric"
    )[1]
    assert (kept["num_clamped"], kept["num_masked"]) == (6, 0)
    # k3 is clamped where the reference is far likelier, low-variance on both sides and above 10:
    # at +-19 it is 18 and e^19.
    for kl, count in (("k1", 0), ("k2", 0), ("k3", 3), ("low-variance", 8)):
        options = {"reference_logprobs": -gaps, "kl": kl, "kl_coefficient": 0.1}
        assert (
            policy_loss("ppo", zeros, zeros, zeros, every, every, **options)[1]["num_clamped"]
            == count
        )


extreme = st.one_of(st.sampled_from(SIZES), st.floats(-1e4, 1e4, width=32))


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(LOSSES)),
    correction=st.sampled_from(CORRECTIONS),
    correction_level=st.sampled_from(sorted(LEVELS)),
    rejection=st.sampled_from(REJECTIONS),
    rejection_level=st.sampled_from(sorted(LEVELS)),
    kl=st.sampled_from(sorted(KLS)),
    divergence=st.sampled_from(["tv", "kl"]),
    rows=st.lists(
        st.lists(st.tuples(extreme, extreme, extreme), min_size=4, max_size=4),
        min_size=1, max_size=3,
    ),
    advantage=st.sampled_from([-1.5, 0.0, 2.0]),
)  # fmt: skip
def test_log_ratios_of_any_size_stay_finite_in_value_and_gradient(
    name: str, rows: Any, advantage: float, divergence: str, **options: Any
) -> None:
    if name == "imitation":
        options |= {"correction": "none", "rejection": "none"}
    if name == "dppo":
        options["divergence"] = divergence
    gaps = torch.tensor(rows, dtype=torch.float32)  # of prox, behaviour, reference
    current = torch.full(gaps.shape[:2], -1.0, requires_grad=True)
    prox, behaviour, base = (-1.0 + gaps[..., i] for i in range(3))
    loss, metrics = policy_loss(
        name, current, prox, behaviour, torch.full_like(prox, advantage), torch.ones_like(prox),
        reference_logprobs=base, kl_coefficient=0.1, **options,
    )  # fmt: skip
    loss.backward()
    assert torch.isfinite(loss)
    assert current.grad is not None
    assert torch.isfinite(current.grad).all()
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(0 <= metrics[k] <= gaps.shape[0] * 4 for k in metrics if k.startswith("num_"))


def test_a_fully_masked_micro_batch_adds_nothing_and_a_fully_masked_step_is_refused() -> None:
    found = tensors(sample(4)) | {"mask": torch.zeros(5, 9)}
    found["logprobs"].requires_grad_()
    for name in sorted(LOSSES):
        loss, metrics = policy_loss(name, **found, row_weights=np.ones(5), correction="none")
        loss.backward()
        assert loss.item() == 0
        assert metrics["num_tokens"] == 0
        assert (found["logprobs"].grad == 0).all()
    with pytest.raises(ValueError, match="all tokens are masked"):
        policy_loss("ppo", **found)


def test_a_rejected_token_does_not_make_the_others_weigh_more() -> None:
    # Two tokens of loss -1 each; the second is rejected: -1/2, not -1.
    zeros, ones = np.zeros((1, 2)), np.ones((1, 2))
    far = np.array([[0.0, -3.0]])
    loss, metrics = policy_loss(
        "ppo", zeros, zeros, far, ones, ones,
        correction="none", rejection="k1", rejection_level="token",
    )  # fmt: skip
    assert (loss, metrics["num_rejected"], metrics["sum_weight"]) == (-0.5, 1, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("advantages", r"advantage of trained token \(1, 2\) is nan"),
        ("behaviour_logprobs", r"behaviour log-prob of trained token \(1, 2\) is nan"),
    ],
)
def test_a_trained_token_that_is_not_finite_is_named(name: str, message: str) -> None:
    found = sample(5) | {"mask": np.ones((5, 9))}
    found[name][1, 2] = NAN
    with pytest.raises(ValueError, match=message):
        policy_loss("ppo", **found)
    if name == "behaviour_logprobs":
        with pytest.raises(ValueError, match=message):
            policy_loss("ppo", **found, correction="none", rejection="k2")


def test_without_correction_behaviour_log_probs_are_not_needed() -> None:
    found = sample(6)
    expected = reference.policy_loss("ppo", found, correction="none")
    found["behaviour_logprobs"][0] = NAN
    loss, metrics = policy_loss("ppo", **found, correction="none")
    assert loss == pytest.approx(expected, rel=1e-12)
    assert metrics["num_behaviour"] == found["mask"][1:].sum()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pppo", {}, "unknown loss 'pppo'; known: .*ppo"),
        ("ppo", {"aggregation": "mean"}, "unknown aggregation 'mean'; known: .*token-mean"),
        ("ppo", {"correction": "is"}, "unknown correction 'is'; known: icepop, mis, none, tis"),
        ("ppo", {"correction_level": "row"}, "unknown correction level 'row'"),
        ("ppo", {"rejection": "k4"}, "unknown rejection 'k4'; known: k1, k2, k3, none"),
        ("ppo", {"rejection_level": "row"}, "unknown rejection level 'row'"),
        ("ppo", {"kl": "k4"}, "unknown kl 'k4'"),
        ("ppo", {"kl_coefficient": 0.1}, "kl_coefficient is 0.1: reference log-probs are missing"),
        ("ppo", {"entropy_coefficient": 0.1}, "entropy_coefficient is 0.1: entropies are missing"),
        ("ppo", {"correction_cap": 0.0}, "band of ratios"),
        ("ppo", {"correction": "icepop", "correction_low": 3.0}, r"got \[3.0, 2.0\]"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        policy_loss(name, **sample(0), **options)


# ---------------------------------------------------------------------- the torch-free declaration
def test_the_table_of_losses_declares_what_the_functions_take() -> None:
    assert algorithms.LOSSES.keys() == LOSSES.keys()
    for name, function in LOSSES.items():
        own = list(inspect.signature(function).parameters.values())[4:]
        assert all(p.kind is p.KEYWORD_ONLY for p in own)
        declared = {key: p.default for key, p in algorithms.LOSSES[name].parameters.items()}
        assert {p.name: p.default for p in own} == declared, name
    for kinds, known in (
        (algorithms.Aggregation, AGGREGATIONS),
        (algorithms.Correction, CORRECTIONS),
        (algorithms.Rejection, REJECTIONS),
        (algorithms.Level, LEVELS),
        (algorithms.Proximal, PROXIMALS),
        (algorithms.KL, KLS),
    ):
        assert set(get_args(kinds)) == set(known)
    divergence = algorithms.LOSSES["dppo"].parameters["divergence"]
    assert divergence == OneOf(tuple(DIVERGENCES), "tv")


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("kind", PROXIMALS)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("rejection", ["none", "k2"])
def test_needs_behaviour_says_whether_a_loss_without_them_is_finite(
    name: str, kind: str, correction: str, rejection: str
) -> None:
    if name == "imitation" and (correction, rejection) != ("none", "none"):
        return
    inputs = tensors(sample(8))
    inputs["behaviour_logprobs"][:] = NAN
    inputs["prox_logprobs"] = proximal(
        kind, inputs["logprobs"], inputs["behaviour_logprobs"], recomputed=inputs["prox_logprobs"],
        ages=torch.full((5, 9), 3),
    )  # fmt: skip
    needed = algorithms.needs_behaviour(
        loss=name, proximal=kind, correction=correction, rejection=rejection
    )
    try:
        loss, _ = policy_loss(name, **inputs, correction=correction, rejection=rejection)
        found = bool(torch.isfinite(loss))
    except ValueError:
        found = False
    assert found == (needed is None)


def test_needs_behaviour_names_what_reads_them() -> None:
    assert algorithms.needs_behaviour(loss="ppo") == "correction 'tis'"
    assert (
        algorithms.needs_behaviour(loss="ppo", correction="none", rejection="k3")
        == "rejection 'k3'"
    )
    assert (
        algorithms.needs_behaviour(loss="gspo", correction="none", proximal="behaviour")
        == "proximal policy 'behaviour' of loss 'gspo'"
    )


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("gspoo", {}, "unknown loss 'gspoo', did you mean 'gspo'?"),
        ("ppo", {"clip_hi": 0.3}, "ppo: unknown parameter 'clip_hi', did you mean 'clip_high'?"),
        ("ppo", {"clip_low": 1.5}, "clip_low must be a number above 0 and at most 1"),
        ("ppo", {"dual_clip": 1}, "dual_clip must be a finite number above 1, got 1"),
        ("dppo", {"divergence": "js"}, "divergence must be one of 'tv', 'kl', got 'js'"),
        ("reinforce", {"clip_low": 0.2}, "unknown parameter 'clip_low': it takes none"),
    ],
)
def test_a_wrong_parameter_is_answered_with_the_rule(
    name: str, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        algorithms.policy_loss(name, parameters)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"loss_parameters": {"clip": 0.1}}, "loss_parameters: ppo: unknown parameter 'clip'"),
        ({"loss": "imitation"}, "correction: imitation takes only 'none', got 'tis'"),
        (
            {"loss": "imitation", "correction": "none", "rejection": "k1"},
            "rejection: imitation takes only 'none', got 'k1'",
        ),
        (
            {"correction": "mis", "correction_low": 3.0},
            "correction_low: must be at most correction_cap (2.0), got 3.0",
        ),
        (
            {"rejection": "k1", "rejection_high": 0.1},
            "rejection_low: must be at most rejection_high (0.1), got 0.5",
        ),
        ({"loss": "imitation", "correction": "none"}, None),
        ({"correction_cap": 0.1, "rejection": "k3", "rejection_high": 0.1}, None),
    ],
)
def test_the_configuration_says_what_does_not_go_together(
    trainer: dict[str, Any], message: str | None
) -> None:
    found = Trainer(**trainer).problem()
    assert found == message if message is None else found and message in found
