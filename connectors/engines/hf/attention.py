"""Attention over a packed batch, one sequence at a time: what continuous batching runs on CPU.

The stock `sdpa` path of transformers attends over all sequences' keys at once under one dense mask
[batch tokens, cached tokens]: its work grows with the square of the number of sequences and a row's
result depends, in its last bits, on its neighbours. Here each sequence attends over its own keys
only. Flash attention does the same on GPUs, so this is used on CPU alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "headwater_segments"


def register() -> str:
    """Makes the attention known to transformers; returns the name to set on a model."""
    AttentionInterface.register(NAME, segment_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    return NAME


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def segment_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, dim], key and value [1, KV heads, tokens, dim] of the packed new
    tokens; the paged cache adds the earlier ones. Returns [1, tokens, heads, dim]."""
    key, value = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        kwargs=kwargs,
    )
    lengths_q = kwargs["cu_seq_lens_q"].diff().tolist()
    lengths_k = kwargs["cu_seq_lens_k"].diff().tolist()
    segments = zip(
        query.split_with_sizes(lengths_q, 2),
        key.split_with_sizes(lengths_k, 2),
        value.split_with_sizes(lengths_k, 2),
        strict=True,
    )
    grouped = query.shape[1] != key.shape[1]
    outs = []
    for q, k, v in segments:
        num_q, num_k = q.shape[2], k.shape[2]
        mask = None
        if 1 < num_q < num_k:  # the rest of a prompt whose first part is in the cache
            mask = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device).tril(num_k - num_q)
        causal = num_q > 1 and num_q == num_k
        outs.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=scaling, is_causal=causal, enable_gqa=grouped
            )
        )
    return torch.cat(outs, dim=2).transpose(1, 2).contiguous(), None
