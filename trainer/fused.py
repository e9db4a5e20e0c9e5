"""Liger's cross-entropy kernel: a chunk of logits enters, its losses or their slope leave.

`chosen_logprobs` runs on it where Triton can: on CUDA tensors when the extra `liger` is installed
(and, in tests, on any tensors under Triton's interpreter). Liger's ready-made linear layer with
cross-entropy (`LigerFusedLinearCrossEntropyFunction`) knows per-token gradients, but neither
entropies nor a temperature, so an entropy would cost one more product with the whole vocabulary;
its `LigerFusedLinearScaledCrossEntropyFunction` knows both, and adds up the gradient of a bfloat16
weight in bfloat16. Hence the kernel alone, a chunk at a time. It reads and writes logits in the
dtype of the product, where torch's operators pass over float32 ones several times.

Legend: R rows of a chunk, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from importlib import metadata
from typing import Final

import torch
from torch import Tensor

TORCH: Final = "torch"
_NO_TOKEN: Final = -100


def kernel_for(device: torch.device, *, entropy_gradient: bool = False) -> str:
    """ "liger" and its version, or "torch": what computes log-probs there, part of what must be
    equal for equal bits. Liger's kernel has no gradient of an entropy."""
    triton_runs = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return _installed() if triton_runs and not entropy_gradient else TORCH


@cache
def _installed() -> str:
    if any(importlib.util.find_spec(name) is None for name in ("liger_kernel", "triton")):
        return TORCH
    return f"liger {metadata.version('liger-kernel')}"


def cross_entropy(logits_RV: Tensor, tokens_R: Tensor) -> Tensor:
    """-log softmax(logits)[token], [R] float32."""
    return _launch(logits_RV, tokens_R, slope=False)


def cross_entropy_slope(logits_RV: Tensor, tokens_R: Tensor) -> Tensor:
    """softmax(logits) - onehot(token), in the memory of the logits."""
    _launch(logits_RV, tokens_R, slope=True)
    return logits_RV


def _launch(logits_RV: Tensor, tokens_R: Tensor, *, slope: bool) -> Tensor:
    from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel
    from liger_kernel.ops.utils import is_hip
    from triton import next_power_of_2

    num_rows, vocabulary = logits_RV.shape
    found_R = torch.empty(num_rows, dtype=torch.float32, device=logits_RV.device)
    # Not through `cross_entropy_forward`: it would round the log-probs to the dtype of the logits.
    liger_cross_entropy_kernel[(num_rows,)](
        X_ptr=logits_RV,
        X_stride=logits_RV.stride(0),
        Y_ptr=tokens_R.contiguous(),
        Y_stride=1,
        loss_ptr=found_R,
        loss_stride=1,
        n_cols=vocabulary,
        n_non_ignore=num_rows,
        ignore_index=_NO_TOKEN,
        reduction="none",
        HAS_GRADIENTS=slope,
        BLOCK_SIZE=min(MAX_FUSED_SIZE, next_power_of_2(vocabulary)),
        num_warps=16 if is_hip() else 32,
        # What this loss has none of.
        weight_ptr=None,
        sum_non_ignore_weight=num_rows,
        weight_sum=0.0,
        HAS_WEIGHT=False,
        z_loss_ptr=None,
        lse_square_scale=0.0,
        RETURN_Z_LOSS=False,
        token_accuracy_ptr=None,
        token_accuracy_stride=0,
        RETURN_TOKEN_ACCURACY=False,
        predicted_tokens_ptr=None,
        predicted_tokens_stride=0,
        RETURN_PREDICTED_TOKENS=False,
        label_smoothing=0.0,
        softcap=None,
        HAS_SOFTCAPPING=False,
    )
    return found_R
