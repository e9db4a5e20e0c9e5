"""Log-probs of chosen tokens: hidden states enter, float32 numbers leave, full logits never exist.

`chosen_logprobs` computes log-softmax(hidden @ weight.T / temperature)[token] a chunk of rows at a
time and recomputes each chunk in the backward pass: its extra memory is a few chunks, not `N x V`,
its extra time one product of four. On CUDA the passes over a chunk are Liger's kernel where that
is installed (`trainer.fused`).

Legend: N picked positions, R rows of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor

from trainer import fused

CHUNK_BYTES: Final = 28 * 2**20
"""Fewer rows (149 of 49,152 scores) slow a CPU's products down, and from 32 MiB on malloc hands
memory back and faults it in again, chunk by chunk."""


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
        ctx.temperature, ctx.chunk_bytes = temperature, chunk_bytes
        ctx.entropy_gradient = entropy_gradient
        num_rows = hidden_NH.shape[0]
        logprobs_N = torch.empty(num_rows, dtype=torch.float32, device=hidden_NH.device)
        normalizer_N, entropy_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        for rows in _chunks(num_rows, 4 * weight_VH.shape[0], chunk_bytes):
            logprobs_N[rows], normalizer_N[rows], entropy_N[rows] = _summary(
                _scores(hidden_NH[rows], weight_VH, temperature, ctx.is_fused),
                tokens_N[rows],
                ctx.is_fused,
            )
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
        for rows in _chunks(hidden_NH.shape[0], 4 * weight_VH.shape[0], ctx.chunk_bytes):
            scores_RV = _scores(hidden_NH[rows], weight_VH, ctx.temperature, ctx.is_fused)
            if ctx.is_fused:
                slope_RV = fused.cross_entropy_slope(scores_RV, tokens_N[rows])
                slope_RV.mul_(-grad_N[rows, None])
            else:
                slope_RV = _slope(
                    scores_RV.sub_(normalizer_N[rows, None]),
                    tokens_N[rows],
                    grad_N[rows, None],
                    entropy_N[rows, None],
                    entropy_grad_N[rows, None] if ctx.entropy_gradient else None,
                ).to(weight_VH.dtype)
            del scores_RV
            grad_hidden_NH[rows] = slope_RV @ weight_VH
            _add_product(grad_weight_VH, slope_RV.t(), hidden_NH[rows])
        return grad_hidden_NH, grad_weight_VH.to(weight_VH.dtype), None, None, None, None


def _chunks(num_rows: int, row_bytes: int, chunk_bytes: int) -> Iterator[slice]:
    """Of about equal size: a short last one would read the whole weight for a few rows."""
    num_chunks = max(1, ceil(num_rows * row_bytes / chunk_bytes))
    size = max(1, ceil(num_rows / num_chunks))
    return (slice(start, start + size) for start in range(0, num_rows, size))


def _scores(hidden_RH: Tensor, weight_VH: Tensor, temperature: float, is_fused: bool) -> Tensor:
    if is_fused:  # the kernel reads the product as it is: the temperature goes before it
        return (hidden_RH / temperature) @ weight_VH.t()
    # float() of a float32 product is the product itself, so dividing in place touches no input.
    return (hidden_RH @ weight_VH.t()).float().div_(temperature)


def _summary(scores_RV: Tensor, tokens_R: Tensor, is_fused: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: the token's log-prob, the log of the normalizer, the entropy."""
    chosen_R = scores_RV.gather(1, tokens_R[:, None])[:, 0]
    if is_fused:
        loss_R = fused.cross_entropy(scores_RV, tokens_R)
        normalizer_R = chosen_R + loss_R
        logp_RV = scores_RV - normalizer_R[:, None]
        return -loss_R, normalizer_R, -logp_RV.exp().mul_(logp_RV).sum(-1)
    # One exp for normalizer and entropy; the scores are shifted where they lie.
    peak_R1 = scores_RV.amax(-1, keepdim=True)
    probs_RV = scores_RV.sub_(peak_R1).exp()
    total_R = probs_RV.sum(-1)
    log_total_R = total_R.log()
    normalizer_R = peak_R1[:, 0] + log_total_R
    entropy_R = log_total_R - probs_RV.mul_(scores_RV).sum(-1) / total_R
    return chosen_R - normalizer_R, normalizer_R, entropy_R


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


class PolicyModel(torch.nn.Module):
    """A Hugging Face causal language model whose forward answers with log-probs of its input
    tokens."""

    def __init__(self, model: Any, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(
        self,
        tokens_BT: Tensor,
        position_ids_BT: Tensor,
        mask_BT: Tensor,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(log-probs [B, T], entropies [B, T]), float32; the entropies carry a gradient if asked.

        Column t is of tokens[:, t] given the tokens before it; 0 where the mask is False. `mask_BT`
        must be False in column 0: nothing predicts the first token. Padding stands on the right,
        where causal attention keeps it from every real token, so no attention mask is needed.
        """
        hidden_BTH = self.model.base_model(
            input_ids=tokens_BT, position_ids=position_ids_BT, use_cache=False
        ).last_hidden_state
        predicted = mask_BT[:, 1:]
        logprobs_N, entropy_N = chosen_logprobs(
            hidden_BTH[:, :-1][predicted],
            self.model.get_output_embeddings().weight,
            tokens_BT[:, 1:][predicted],
            self.temperature,
            entropy_gradient=entropy_gradient,
        )
        empty_BT = torch.zeros(mask_BT.shape, dtype=torch.float32, device=mask_BT.device)
        return (
            empty_BT.masked_scatter(mask_BT, logprobs_N),
            empty_BT.masked_scatter(mask_BT, entropy_N),
        )

    @torch.no_grad()
    def check_head(self) -> None:
        """ValueError if the model's logits are more than its output embedding times its last hidden
        state (a bias, a soft cap, a scale): its log-probs would be wrong without a sound."""
        weight = self.model.get_output_embeddings().weight
        tokens_BT = torch.arange(8, device=weight.device)[None] % weight.shape[0]
        positions_BT = torch.arange(8, device=weight.device)[None]
        mask_BT = positions_BT > 0
        ours_BT, _ = self(tokens_BT, positions_BT, mask_BT)
        logits = self.model(input_ids=tokens_BT, use_cache=False).logits.float() / self.temperature
        theirs = torch.log_softmax(logits, -1)[:, :-1].gather(2, tokens_BT[:, 1:, None])[..., 0]
        gap = (ours_BT[:, 1:] - theirs).abs().max().item()
        if not gap <= (1e-3 if weight.dtype == torch.float32 else 0.25):
            raise ValueError(
                f"{type(self.model).__name__}: log-probs computed from the output embedding differ "
                f"from the model's own by {gap:.3g}; heads with a bias, scale or soft cap are not "
                "supported"
            )


def load_policy(path: Path, dtype: torch.dtype, temperature: float) -> PolicyModel:
    """That of a Hugging Face folder, without dropout: its log-probs must be those of the policy
    that samples."""
    transformers.utils.logging.disable_progress_bar()
    settings = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    for key, value in vars(settings).items():
        if key.endswith(("dropout", "pdrop")) and isinstance(value, float):
            setattr(settings, key, 0.0)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, config=settings, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    return PolicyModel(model, temperature)
