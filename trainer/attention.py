"""Attention over packed rows: a token sees the earlier tokens of its own row and nothing else.

    q, k, v of the packed positions --> of the tokens of each row --> causal attention, row by row
    --> the output of each packed position

An attention function of transformers by the name NAME: a model's forward is given
`packed_rows=PackedRows.of(pack)` among its keyword arguments and hands it down. Memory is O(T): no
mask exists. Half precision on CUDA is one call of flash attention for all rows; elsewhere torch's
attention runs on each row alone, so that what a row gets is the same, bit for bit, in whatever pack
and place it stands.

Legend: P packed positions, E tokens of all rows one after another, T tokens of one row, R rows,
H query heads, K key and value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from connectors.config import ConfigError
from trainer.packing import Pack
from trainer.sequence_parallel import on_all_positions

NAME: Final = "headwater_packed_rows"
BAND: Final = 256
"""Queries of a sliding window computed at once; their mask takes BAND x (BAND + window) bytes."""
NO_MATTER: Final = frozenset(
    {"cache_position", "position_embeddings", "position_ids", "use_cache"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict"}
)
"""What models hand down that says nothing about which token sees which, or how."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRows:
    """What attention must know of a pack.

    starts    R + 1 bounds of the rows in E
    starts_R  the same, int32, on the model's device
    expand_E  int64, the place in P of each token; None: nothing is shared, each is at its own
    first_P   int64, the first place in E of each packed position; None with `expand_E`
    group     ranks that each hold a slice of P; None: this one holds it all
    """

    starts: tuple[int, ...]
    starts_R: Tensor
    expand_E: Tensor | None
    first_P: Tensor | None
    group: ProcessGroup | None

    @classmethod
    def of(cls, pack: Pack, group: ProcessGroup | None = None) -> PackedRows:
        device, first_P = pack.tokens_P.device, None
        if pack.expand_E is not None:
            places_E = torch.arange(len(pack.expand_E), device=device)
            first_P = torch.full_like(pack.tokens_P, len(places_E))
            first_P.scatter_reduce_(0, pack.expand_E, places_E, "amin")
        return cls(
            starts=pack.starts,
            starts_R=torch.tensor(pack.starts, dtype=torch.int32, device=device),
            expand_E=pack.expand_E,
            first_P=first_P,
            group=group,
        )

    @property
    def lengths(self) -> list[int]:
        return [end - start for start, end in pairwise(self.starts)]

    @property
    def num_positions(self) -> int:
        """P."""
        return self.starts[-1] if self.first_P is None else len(self.first_P)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_rows: PackedRows | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: `query` [1, H, P, D], `key` and `value` [1, K, P, D] -> output
    [1, P, H, D]. With `sliding_window` a token sees that many, itself among them.

    ConfigError for what would make it another attention than this (a mask, dropout, a soft cap,
    sinks, whatever it does not know), and when the model did not hand the rows down."""
    name = type(module).__name__
    refused = _refused(module, {"attention_mask": attention_mask, **others})
    if refused:
        raise ConfigError(f"{name}: attention of packed rows knows no {', '.join(refused)}")
    if packed_rows is None:
        raise ConfigError(f"{name}: the model does not hand packed_rows down to its attention")
    rows = packed_rows

    def attend(query_PHD: Tensor, key_PKD: Tensor, value_PKD: Tensor) -> Tensor:
        return _attend(query_PHD, key_PKD, value_PKD, rows, scaling, sliding_window)

    packed = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    if rows.group is None:
        output_PHD = attend(*packed)
    else:
        output_PHD = on_all_positions(attend, *packed, rows.num_positions, rows.group)
    return output_PHD[None], None


AttentionInterface.register(NAME, packed_attention)  # without a mask function: no mask is built


def _refused(module: torch.nn.Module, asked: dict[str, Any]) -> list[str]:
    """Names of what `asked` for that is set and would go unheeded."""
    is_causal = asked.pop("is_causal", None)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    found = [] if is_causal else ["is_causal=False"]
    return found + [
        name
        for name, value in asked.items()
        if name not in NO_MATTER and value is not None and (isinstance(value, Tensor) or value)
    ]


def _attend(
    query_PHD: Tensor,
    key_PKD: Tensor,
    value_PKD: Tensor,
    rows: PackedRows,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """The output [P, H, D] of all packed positions."""
    if rows.expand_E is None or rows.first_P is None:
        return _attend_rows(query_PHD, key_PKD, value_PKD, rows, scaling, window)
    query_EHD = query_PHD.index_select(0, rows.expand_E)
    key_EKD = key_PKD.index_select(0, rows.expand_E)
    value_EKD = value_PKD.index_select(0, rows.expand_E)
    output_EHD = _attend_rows(query_EHD, key_EKD, value_EKD, rows, scaling, window)
    return output_EHD.index_select(0, rows.first_P)


def _attend_rows(
    query_EHD: Tensor,
    key_EKD: Tensor,
    value_EKD: Tensor,
    rows: PackedRows,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    value_size, size = value_EKD.shape[-1], query_EHD.shape[-1]
    if value_size < size:  # kernels that take O(T) memory want one head size for all three
        value_EKD = pad(value_EKD, (0, size - value_size))
    if query_EHD.is_cuda and query_EHD.dtype != torch.float32:
        output_EHD = _flash(query_EHD, key_EKD, value_EKD, rows, scaling, window)
    else:
        # `split` goes back by one concatenation, a slice by filling a whole tensor with zeros.
        queries, keys, values = (
            torch.split(part, rows.lengths) for part in (query_EHD, key_EKD, value_EKD)
        )
        each_row = zip(queries, keys, values, strict=True)
        output_EHD = torch.cat([_attend_row(q, k, v, scaling, window) for q, k, v in each_row])
    return output_EHD[..., :value_size]


def _flash(
    query_EHD: Tensor,
    key_EKD: Tensor,
    value_EKD: Tensor,
    rows: PackedRows,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """All rows at once."""
    longest = max(rows.lengths)
    output_EHD = varlen_attn(
        query_EHD,
        key_EKD,
        value_EKD,
        rows.starts_R,
        rows.starts_R,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),  # tokens before and after itself
        enable_gqa=key_EKD.shape[1] != query_EHD.shape[1],
    )
    assert isinstance(output_EHD, Tensor)
    return output_EHD


def _attend_row(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    query, key, value = (part.transpose(0, 1)[None] for part in (query_THD, key_TKD, value_TKD))
    if not query.is_cuda:  # the kernel for float32 on CUDA that takes O(T) memory has no GQA
        grouped = key.shape[1] != query.shape[1]
    else:
        num_each, grouped = query.shape[1] // key.shape[1], False
        key, value = (part.repeat_interleave(num_each, 1) for part in (key, value))
    if window is None or len(query_THD) <= window:
        output = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
        )
    else:
        output = _banded(query, key, value, scaling, window, grouped)
    return output[0].transpose(0, 1)


def _banded(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int, grouped: bool
) -> Tensor:
    """[1, H, T, D]: BAND queries at a time, over the keys that any of them sees."""
    num_tokens = query.shape[2]
    place_T = torch.arange(num_tokens, device=query.device)
    outputs = []
    for start in range(0, num_tokens, BAND):
        end, first = min(start + BAND, num_tokens), max(0, start - window + 1)
        before = place_T[start:end, None] - place_T[first:end]
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, start:end],
                key[:, :, first:end],
                value[:, :, first:end],
                attn_mask=(before >= 0) & (before < window),
                scale=scaling,
                enable_gqa=grouped,
            )
        )
    return torch.cat(outputs, 2)
