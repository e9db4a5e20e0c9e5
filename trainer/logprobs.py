"""Log-probs of chosen tokens: hidden states enter, float32 numbers leave, full logits never exist.

`chosen_logprobs` computes log-softmax(hidden @ weight.T / temperature)[token] a chunk of rows at a
time and recomputes each chunk in the backward pass: its extra memory is two chunks, not `N x V`,
its extra time one product of four. On CUDA the passes over a chunk are Liger's kernel where that
is installed (`trainer.fused`).

Legend: N picked positions, R rows of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any, Final

import torch
from torch import Tensor

from trainer import fused

CHUNK_BYTES: Final = 28 * 2**20
"""149 rows of 49,152 scores: with fewer a CPU's products slow down."""


def chosen_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    tokens_N: Tensor,
    temperature: float = 1.0,
    chunk_bytes: int | None = None,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """(log-probs [N], entropies [N]) of softmax(hidden @ weight.T / temperature), both float32.

    `tokens_N` int64. The matrix products run in the inputs' dtype, everything between them and the
    sum of the weight's gradient in float32. Differentiable in `hidden_NH` and `weight_VH` through
    the log-probs and, with `entropy_gradient`, which costs the backward pass one more chunk,
    through the entropies.

    `chunk_bytes`: what the scores of a chunk may take in float32; a chunk has a row at least. By
    default CHUNK_BYTES, or what the hidden states take where that is more: an accelerator needs
    large chunks, and has room for one where it has room for those.
    """
    logprobs_N, entropy_N = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH,
        weight_VH,
        tokens_N,
        temperature,
        chunk_bytes or max(CHUNK_BYTES, 4 * hidden_NH.numel()),
        entropy_gradient,
    )
    return logprobs_N, entropy_N


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        tokens_N: Tensor,
        temperature: float,
        chunk_bytes: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        kernel = fused.kernel_for(hidden_NH.device, entropy_gradient=entropy_gradient)
        ctx.is_fused = kernel != fused.TORCH
        ctx.temperature, ctx.entropy_gradient = temperature, entropy_gradient
        num_rows = hidden_NH.shape[0]
        logprobs_N = torch.empty(num_rows, dtype=torch.float32, device=hidden_NH.device)
        normalizer_N, entropy_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        ctx.chunk_rows = _chunk_rows(num_rows, 4 * weight_VH.shape[0], chunk_bytes)
        room = () if ctx.is_fused else _room(2, ctx.chunk_rows, weight_VH)
        for rows in _chunks(num_rows, ctx.chunk_rows):
            hidden_RH, tokens_R = hidden_NH[rows], tokens_N[rows]
            if ctx.is_fused:
                found = _fused_summary(_product(hidden_RH, weight_VH, temperature), tokens_R)
            else:
                scores_RV, probs_RV = (chunk_RV[: len(tokens_R)] for chunk_RV in room)
                _scores(hidden_RH, weight_VH, temperature, scores_RV)
                found = _summary(scores_RV, tokens_R, probs_RV)
            logprobs_N[rows], normalizer_N[rows], entropy_N[rows] = found
        ctx.save_for_backward(hidden_NH, weight_VH, tokens_N, normalizer_N, entropy_N)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden_NH, weight_VH, tokens_N, normalizer_N, entropy_N = ctx.saved_tensors
        grad_N, entropy_grad_N = (grad / ctx.temperature for grad in grads)
        grad_hidden_NH = torch.empty_like(hidden_NH)
        # Chunks add up in float32: in bfloat16 the later ones would vanish.
        grad_weight_VH = torch.zeros(weight_VH.shape, dtype=torch.float32, device=weight_VH.device)
        room = () if ctx.is_fused else _room(1, ctx.chunk_rows, weight_VH)
        for rows in _chunks(hidden_NH.shape[0], ctx.chunk_rows):
            hidden_RH, tokens_R = hidden_NH[rows], tokens_N[rows]
            if ctx.is_fused:
                slope_RV = fused.cross_entropy_slope(
                    _product(hidden_RH, weight_VH, ctx.temperature), tokens_R
                ).mul_(-grad_N[rows, None])
            else:
                scores_RV = room[0][: len(tokens_R)]
                _scores(hidden_RH, weight_VH, ctx.temperature, scores_RV)
                slope_RV = _slope(
                    scores_RV.sub_(normalizer_N[rows, None]),
                    tokens_R,
                    grad_N[rows, None],
                    entropy_N[rows, None],
                    entropy_grad_N[rows, None] if ctx.entropy_gradient else None,
                ).to(weight_VH.dtype)
            grad_hidden_NH[rows] = slope_RV @ weight_VH
            _add_product(grad_weight_VH, slope_RV.t(), hidden_RH)
        return grad_hidden_NH, grad_weight_VH.to(weight_VH.dtype), None, None, None, None


def _chunk_rows(num_rows: int, row_bytes: int, chunk_bytes: int) -> int:
    """At most what fits, and about as many in each: a short last chunk would read the whole weight
    for a few rows."""
    fitting = max(1, chunk_bytes // row_bytes)
    return ceil(num_rows / max(1, ceil(num_rows / fitting)))


def _chunks(num_rows: int, chunk_rows: int) -> Iterator[slice]:
    return (slice(start, start + chunk_rows) for start in range(0, num_rows, max(1, chunk_rows)))


def _room(num_chunks: int, chunk_rows: int, weight_VH: Tensor) -> tuple[Tensor, ...]:
    """Memory for float32 chunks, taken once: given back and faulted in again for each chunk, it
    would cost time, and more of it."""
    return tuple(
        torch.empty(chunk_rows, weight_VH.shape[0], dtype=torch.float32, device=weight_VH.device)
        for _ in range(num_chunks)
    )


def _scores(hidden_RH: Tensor, weight_VH: Tensor, temperature: float, scores_RV: Tensor) -> None:
    if hidden_RH.dtype == torch.float32:
        torch.mm(hidden_RH, weight_VH.t(), out=scores_RV)
    else:
        scores_RV.copy_(hidden_RH @ weight_VH.t())
    scores_RV.div_(temperature)


def _product(hidden_RH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    """The scores in the inputs' dtype, which is what the kernel reads: the temperature goes before
    the product."""
    return (hidden_RH / temperature) @ weight_VH.t()


def _summary(
    scores_RV: Tensor, tokens_R: Tensor, probs_RV: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: the token's log-prob, the log of the normalizer, the entropy. One exp serves
    all; overwrites the scores, and `probs_RV` with what they need."""
    chosen_R = scores_RV.gather(1, tokens_R[:, None])[:, 0]
    peak_R1 = scores_RV.amax(-1, keepdim=True)
    torch.exp(scores_RV.sub_(peak_R1), out=probs_RV)
    total_R = probs_RV.sum(-1)
    log_total_R = total_R.log()
    normalizer_R = peak_R1[:, 0] + log_total_R
    entropy_R = log_total_R - probs_RV.mul_(scores_RV).sum(-1) / total_R
    return chosen_R - normalizer_R, normalizer_R, entropy_R


def _fused_summary(scores_RV: Tensor, tokens_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    loss_R = fused.cross_entropy(scores_RV, tokens_R)
    normalizer_R = scores_RV.gather(1, tokens_R[:, None])[:, 0] + loss_R
    logp_RV = scores_RV - normalizer_R[:, None]
    return -loss_R, normalizer_R, -logp_RV.exp().mul_(logp_RV).sum(-1)


def _slope(
    logp_RV: Tensor,
    tokens_R: Tensor,
    grad_R1: Tensor,
    entropy_R1: Tensor,
    entropy_grad_R1: Tensor | None,
) -> Tensor:
    """d loss / d scores, in the memory of `logp_RV`. With p = softmax(scores):

    d log p(token) / d scores = onehot(token) - p
    d entropy / d scores      = -p (log p + entropy)
    """
    pull_RV = grad_R1
    if entropy_grad_R1 is not None:
        pull_RV = (logp_RV + entropy_R1).mul_(entropy_grad_R1).add_(grad_R1)
    slope_RV = logp_RV.exp_().mul_(pull_RV.neg())
    return slope_RV.scatter_add_(1, tokens_R[:, None], grad_R1)


def _add_product(sum_VH: Tensor, left_VR: Tensor, right_RH: Tensor) -> None:
    """sum += left @ right, added up in float32."""
    if sum_VH.is_cuda and left_VR.dtype != torch.float32:  # tensor cores, which the CPU has not
        torch.addmm(sum_VH, left_VR, right_RH, out_dtype=torch.float32, out=sum_VH)
    else:
        sum_VH.addmm_(left_VR.float(), right_RH.float())
