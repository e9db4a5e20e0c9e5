"""Long rows over several ranks (DeepSpeed Ulysses): each of k ranks computes a slice of a pack.

    own slice of P --embedding, norms, MLPs--> q, k, v of the slice, all heads
    --all to all--> of all P, H / k heads --attention--> --all to all--> of the slice, all heads
    --> own log-probs --all reduce--> those of all N

The k ranks of a group are given the same pack and end with the same log-probs, so the loss is the
same on each. A rank's gradients are those through its own slice: their sum over the k ranks is the
gradient of that one loss.

Jacobs et al., "DeepSpeed Ulysses" (2023).

Legend: P packed positions, S = ceil(P / k) of a slice, N trained tokens, H query heads, K key and
value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from connectors.config import ConfigError


def own_slice(values_P: Tensor, group: ProcessGroup) -> Tensor:
    """[S], this rank's; zeros stand beyond the end."""
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    size = -(-len(values_P) // num_ranks)
    return pad(values_P, (0, size * num_ranks - len(values_P)))[rank * size : (rank + 1) * size]


def own_places(places_N: Tensor, num_positions: int, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """(which of the places in P lie in this rank's slice: bool [N], those within the slice)."""
    size = -(-num_positions // dist.get_world_size(group))
    within_N = places_N - dist.get_rank(group) * size
    own_N = (within_N >= 0) & (within_N < size)
    return own_N, within_N[own_N]


def on_all_positions(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query_SHD: Tensor,
    key_SKD: Tensor,
    value_SKD: Tensor,
    num_positions: int,
    group: ProcessGroup,
) -> Tensor:
    """The slice [S, H, D] of what `attend` gives for all P positions and this rank's share of the
    heads. Where the k ranks cannot share the key and value heads evenly, those are repeated.
    ConfigError when H is not a multiple of k."""
    from deepspeed.sequence.layer import DistributedAttention

    num_ranks, num_heads, num_kv = dist.get_world_size(group), query_SHD.shape[1], key_SKD.shape[1]
    if num_heads % num_ranks:
        raise ConfigError(
            f"trainer.sequence_parallel: {num_heads} attention heads do not divide among "
            f"{num_ranks} ranks"
        )
    repeats = lcm(num_kv, num_ranks) // num_kv
    key_SKD, value_SKD = (part.repeat_interleave(repeats, 1) for part in (key_SKD, value_SKD))

    def local(*parts: Tensor) -> Tensor:
        output_PHD = attend(*(part[0, :num_positions] for part in parts))
        return pad(output_PHD, (0, 0, 0, 0, 0, parts[0].shape[1] - num_positions))[None]

    distributed = DistributedAttention(local, group, scatter_idx=2, gather_idx=1)
    output: Tensor = distributed(query_SHD[None], key_SKD[None], value_SKD[None], 0)
    return output[0]


def gathered(own_n: Tensor, own_N: Tensor, group: ProcessGroup) -> Tensor:
    """[N], on every rank, from each rank's values of the places where its `own_N` is True. The
    gradient of a rank's own values goes to it alone."""
    values_N: Tensor = _Gathered.apply(own_n, own_N, group)  # type: ignore[no-untyped-call]
    return values_N


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_n: Tensor, own_N: Tensor, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(own_N)
        values_N = own_n.new_zeros(len(own_N)).masked_scatter_(own_N, own_n)
        dist.all_reduce(values_N, group=group)
        return values_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        (own_N,) = ctx.saved_tensors
        return grad_N[own_N], None, None
