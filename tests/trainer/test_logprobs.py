"""Chosen-token log-probs against float64 numpy and finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.logprobs import chosen_logprobs


def reference(hidden: Any, weight: Any, tokens: Any, temperature: float) -> tuple[Any, Any]:
    """(log-probs, entropies) in float64 numpy."""
    scores = hidden.astype(np.float64) @ weight.astype(np.float64).T / temperature
    scores -= scores.max(1, keepdims=True)
    logp = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    return logp[np.arange(len(tokens)), tokens], -(np.exp(logp) * logp).sum(1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("chunk_rows", [1, 4, 256])
def test_values_equal_the_reference(temperature: float, chunk_rows: int) -> None:
    rng = np.random.default_rng(0)
    hidden, weight = rng.normal(size=(11, 6)), rng.normal(size=(30, 6))
    tokens = rng.integers(0, 30, 11)
    logprobs, entropy = chosen_logprobs(
        torch.tensor(hidden, dtype=torch.float32),
        torch.tensor(weight, dtype=torch.float32),
        torch.from_numpy(tokens),
        temperature,
        chunk_rows * 30 * 4,
    )
    expected = reference(hidden, weight, tokens, temperature)
    np.testing.assert_allclose(logprobs.numpy(), expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy.numpy(), expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_gradients_equal_finite_differences(entropy_gradient: bool) -> None:
    rng = np.random.default_rng(1)
    hidden, weight = rng.normal(size=(5, 3)), rng.normal(size=(7, 3))
    tokens, outer, bonus = np.array([0, 6, 3, 3, 1]), rng.normal(size=5), rng.normal(size=5)
    temperature, step = 1.3, 1e-5
    hidden_t = torch.tensor(hidden, dtype=torch.float32, requires_grad=True)
    weight_t = torch.tensor(weight, dtype=torch.float32, requires_grad=True)
    values, entropy = chosen_logprobs(
        hidden_t, weight_t, torch.from_numpy(tokens), temperature, chunk_bytes=2 * 7 * 4,
        entropy_gradient=entropy_gradient,
    )  # fmt: skip
    assert entropy.requires_grad == entropy_gradient
    total = (values * torch.tensor(outer)).sum() + (entropy * torch.tensor(bonus)).sum()
    total.backward()

    def moved(hidden: Any, weight: Any) -> float:
        logprobs, entropies = reference(hidden, weight, tokens, temperature)
        return float(outer @ logprobs + entropy_gradient * bonus @ entropies)

    for array, gradient in ((hidden, hidden_t.grad), (weight, weight_t.grad)):
        assert gradient is not None
        for index in np.ndindex(array.shape):
            kept = array[index]
            array[index] = kept + step
            above = moved(hidden, weight)
            array[index] = kept - step
            below = moved(hidden, weight)
            array[index] = kept
            assert gradient[index].item() == pytest.approx((above - below) / (2 * step), abs=1e-4)


def test_the_entropys_gradient_alone_is_that_of_torchs_own() -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(9, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    tokens = torch.randint(0, 6, (9,))
    ours = chosen_logprobs(hidden, weight, tokens, 0.7, 4 * 6 * 4, entropy_gradient=True)[1].sum()
    theirs = torch.distributions.Categorical(logits=hidden @ weight.t() / 0.7).entropy().sum()
    torch.testing.assert_close(ours, theirs)
    for got, expected in zip(
        torch.autograd.grad(ours, (hidden, weight)),
        torch.autograd.grad(theirs, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_the_inputs_are_left_alone() -> None:
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    before = hidden.detach().clone(), weight.detach().clone()
    chosen_logprobs(hidden, weight, torch.tensor([0, 1, 2, 3]), 0.5)[0].sum().backward()
    assert torch.equal(hidden, before[0])
    assert torch.equal(weight, before[1])


def test_in_bfloat16_the_weights_gradient_is_summed_in_float32() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(4096, 8).bfloat16()
    weight = torch.randn(16, 8).bfloat16().requires_grad_()
    tokens = torch.randint(0, 16, (4096,))
    chosen_logprobs(hidden, weight, tokens, chunk_bytes=1)[0].sum().backward()
    exact = weight.detach().float().requires_grad_()
    chosen_logprobs(hidden.float(), exact, tokens)[0].sum().backward()
    assert weight.grad is not None
    assert exact.grad is not None
    gap = (weight.grad.float() - exact.grad).norm() / exact.grad.norm()
    assert gap < 0.02  # added up in bfloat16 it is 0.3


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator returned."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        self.num_elements = max([self.num_elements, *sizes])
        return found


@pytest.mark.parametrize("vocabulary", [200, 3000])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_no_tensor_is_larger_than_a_chunk_whatever_the_vocabulary(
    vocabulary: int, entropy_gradient: bool
) -> None:
    hidden = torch.randn(1000, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    tokens = torch.randint(0, vocabulary, (1000,))
    with Largest() as largest:
        logprobs, entropies = chosen_logprobs(
            hidden, weight, tokens, 0.9, 4 * 20_000, entropy_gradient=entropy_gradient
        )
        (logprobs + entropies).sum().backward()
    assert 10_000 < largest.num_elements <= 20_000
