"""Log-probs of chosen tokens: hidden states enter, float32 numbers leave, full logits never exist.

Legend: B sequences, T positions, N picked positions, H hidden size, V vocabulary.

`chosen_logprobs` computes log-softmax(hidden @ weight.T / temperature)[token] a chunk of rows at a
time and recomputes each chunk in the backward pass, so its extra memory is `chunk_rows x V`, not `N
x V`. `PolicyModel` applies it to the trained positions of a causal language model, which
`load_policy` reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor

CHUNK_ROWS: Final = 256


def chosen_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    tokens_N: Tensor,
    temperature: float = 1.0,
    chunk_rows: int = CHUNK_ROWS,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """(log-probs [N], entropies [N]) of softmax(hidden @ weight.T / temperature), both float32.

    `tokens_N` int64. The matrix product runs in the inputs' dtype, everything after it in float32.
    Differentiable in `hidden_NH` and `weight_VH` through the log-probs and, with
    `entropy_gradient`, which costs the backward pass two more chunks, through the entropies.
    """
    logprobs_N, entropy_N = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, tokens_N, temperature, chunk_rows, entropy_gradient
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
        chunk_rows: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        num_rows = hidden_NH.shape[0]
        logprobs_N = torch.empty(num_rows, dtype=torch.float32, device=hidden_NH.device)
        normalizer_N, entropy_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        for start in range(0, num_rows, chunk_rows):
            rows = slice(start, start + chunk_rows)
            scores = _scores(hidden_NH[rows], weight_VH, temperature)
            normalizer_N[rows] = torch.logsumexp(scores, -1)
            logprobs_N[rows] = scores.gather(1, tokens_N[rows, None])[:, 0] - normalizer_N[rows]
            probs = (scores - normalizer_N[rows, None]).exp_()
            entropy_N[rows] = normalizer_N[rows] - probs.mul_(scores).sum(-1)
        ctx.save_for_backward(hidden_NH, weight_VH, tokens_N, normalizer_N, entropy_N)
        ctx.temperature, ctx.chunk_rows = temperature, chunk_rows
        ctx.entropy_gradient = entropy_gradient
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
        for start in range(0, hidden_NH.shape[0], ctx.chunk_rows):
            rows = slice(start, start + ctx.chunk_rows)
            # With p = softmax(scores):
            #   d log p(token) / d scores = onehot(token) - p
            #   d entropy / d scores      = -p (log p + entropy)
            slope = _scores(hidden_NH[rows], weight_VH, ctx.temperature)
            slope.sub_(normalizer_N[rows, None])
            bend = None
            if ctx.entropy_gradient:
                bend = slope.exp().mul_(slope + entropy_N[rows, None])
                bend.mul_(entropy_grad_N[rows, None])
            slope.exp_().neg_()
            slope.scatter_add_(1, tokens_N[rows, None], torch.ones_like(slope[:, :1]))
            slope.mul_(grad_N[rows, None])
            if bend is not None:
                slope.sub_(bend)
            grad_hidden_NH[rows] = slope.to(weight_VH.dtype) @ weight_VH
            grad_weight_VH.addmm_(slope.t(), hidden_NH[rows].float())
        return grad_hidden_NH, grad_weight_VH.to(weight_VH.dtype), None, None, None, None


def _scores(hidden_NH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    # float() of a float32 product is the product itself, so dividing in place touches no input.
    return (hidden_NH @ weight_VH.t()).float().div_(temperature)


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
