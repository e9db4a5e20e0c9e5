"""Log-probs by Liger's kernel, on a GPU where there is one and by Triton's interpreter elsewhere,
against torch in float64 and against our own operators."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from trainer import fused
from trainer.logprobs import chosen_logprobs


class Found(NamedTuple):
    logprobs: Tensor
    entropies: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor

    def gap(self, other: Found) -> float:
        """The largest, relative to the size of what it is a gap of."""
        return max(
            float((a.double() - b.double()).norm() / b.double().norm())
            for a, b in zip(self, other, strict=True)
        )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when the kernel is imported
    pytest.importorskip("triton")
    pytest.importorskip("liger_kernel")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(29, 24, generator=generator).to(device, dtype)
    weight = torch.randn(301, 24, generator=generator).mul_(0.5).to(device, dtype)
    tokens = torch.randint(0, 301, (29,), generator=generator).to(device)
    return hidden, weight, tokens, torch.randn(29, generator=generator).to(device)


def by_chunks(
    hidden: Tensor, weight: Tensor, tokens: Tensor, outer: Tensor, temperature: float
) -> Found:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs, entropies = chosen_logprobs(hidden, weight, tokens, temperature, 4 * 301 * 4)
    return Found(
        logprobs.detach(), entropies, *torch.autograd.grad(logprobs @ outer, (hidden, weight))
    )


def in_float64(
    hidden: Tensor, weight: Tensor, tokens: Tensor, outer: Tensor, temperature: float
) -> Found:
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logp = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    chosen = logp.gather(1, tokens[:, None])[:, 0]
    return Found(
        chosen.detach(),
        -(logp.exp() * logp).sum(-1).detach(),
        *torch.autograd.grad(chosen @ outer.double(), (hidden, weight)),
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"]
)
def test_the_kernels_values_and_gradients_are_those_of_torch(
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = inputs(device, dtype)
    assert fused.kernel_for(device).startswith("liger ")
    by_kernel = by_chunks(*given, temperature)
    monkeypatch.setattr(fused, "kernel_for", lambda *_, **__: fused.TORCH)
    assert by_kernel.gap(in_float64(*given, temperature)) < tolerance
    assert by_kernel.gap(by_chunks(*given, temperature)) < tolerance


def test_in_bfloat16_the_kernels_log_probs_are_float32(device: torch.device) -> None:
    hidden, weight, tokens, _ = inputs(device, torch.bfloat16)
    ours, _ = chosen_logprobs(hidden, weight, tokens)
    logits = (hidden @ weight.t()).float()
    exact = torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(ours, exact, rtol=0, atol=1e-5)


def test_an_entropys_gradient_is_left_to_torch(device: torch.device) -> None:
    assert fused.kernel_for(device, entropy_gradient=True) == fused.TORCH


def test_the_cpu_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert fused.kernel_for(torch.device("cpu")) == fused.TORCH
