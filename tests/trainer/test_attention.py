"""Attention of packed rows against softmax written out, in float64, with a mask for each row."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode

from connectors.config import ConfigError
from tests.trainer.packs import pack_of, rows_of
from trainer import attention
from trainer.attention import BAND, PackedRows, packed_attention
from trainer.packing import Pack

SCALING = 0.3
HEADS = {"query": 4, "key": 2, "value": 2}
SIZES = {"query": 8, "key": 8, "value": 4}


class Layer(torch.nn.Module):
    """What stands for an attention layer: transformers hands the function its module."""

    is_causal = True


def packed(lengths: Sequence[int], shared: int = 0) -> Pack:
    return pack_of(rows_of(lengths, shared=shared))


def inputs(
    num_positions: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        name: torch.randn(1, HEADS[name], num_positions, SIZES[name], dtype=dtype).requires_grad_()
        for name in HEADS
    }


def attend(given: dict[str, Tensor], rows: PackedRows, window: int | None = None) -> Tensor:
    """[P, H, D]."""
    output, _ = packed_attention(
        Layer(), **given, attention_mask=None, packed_rows=rows, scaling=SCALING,
        sliding_window=window,
    )  # fmt: skip
    return output[0]


def written_out(given: dict[str, Tensor], one: Pack, window: int | None = None) -> Tensor:
    """[P, H, D], float64: each position as the last of what its row has up to it."""
    expand = range(one.starts[-1]) if one.expand_E is None else one.expand_E.tolist()
    query, key, value = (given[name][0].double() for name in HEADS)
    found: dict[int, Tensor] = {}
    for start, end in pairwise(one.starts):
        for e in range(start, end):
            first = start if window is None else max(start, e - window + 1)
            seen = torch.tensor(expand[first : e + 1])
            heads = torch.arange(HEADS["query"]) // (HEADS["query"] // HEADS["key"])
            scores = torch.einsum("hd,htd->ht", query[:, expand[e]], key[heads][:, seen]) * SCALING
            output = torch.einsum("ht,htd->hd", scores.softmax(-1), value[heads][:, seen])
            found.setdefault(expand[e], output)
    return torch.stack([found[p] for p in range(len(one.tokens_P))])


@pytest.mark.parametrize("window", [None, 1, 7, 500])
@pytest.mark.parametrize("shared", [0, 12])
def test_output_and_gradients_are_those_written_out(
    window: int | None, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "BAND", 10)  # rows of several bands
    one = packed((20, 1, 33, 9, 30), shared)
    assert (one.expand_E is not None) == bool(shared)
    given = inputs(len(one.tokens_P))
    ours, theirs = attend(given, PackedRows.of(one), window), written_out(given, one, window)
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-5)
    slope = torch.randn_like(ours)
    for got, expected in zip(
        torch.autograd.grad((ours * slope).sum(), list(given.values())),
        torch.autograd.grad((theirs * slope).sum(), list(given.values())),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 64])
def test_a_row_is_the_same_bit_for_bit_in_any_pack(dtype: torch.dtype, window: int | None) -> None:
    lengths = (80, 1, 400, 37)
    rows = [inputs(length, dtype, seed) for seed, length in enumerate(lengths)]
    alone = [attend(row, PackedRows.of(packed([row["query"].shape[2]])), window) for row in rows]
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        together = {name: torch.cat([rows[i][name] for i in order], 2) for name in HEADS}
        pack_of = packed([lengths[i] for i in order])
        assert torch.equal(
            attend(together, PackedRows.of(pack_of), window), torch.cat([alone[i] for i in order])
        )


@pytest.mark.parametrize("window", [None, 100])
def test_no_tensor_grows_with_the_square_of_a_row(window: int | None) -> None:
    num_tokens, largest = 2048, 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            found = result if isinstance(result, tuple | list) else (result,)
            largest = max([largest, *(x.numel() for x in found if isinstance(x, Tensor))])
            return result

    with Watch():
        output = attend(inputs(num_tokens), PackedRows.of(packed([num_tokens])), window)
        output.sum().backward()
    of_inputs = num_tokens * HEADS["query"] * SIZES["query"]
    assert largest <= max(of_inputs, 4 * BAND * (BAND + 100))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("softcap", 50.0),
        ("s_aux", torch.zeros(4)),
        ("dropout", 0.1),
        ("is_causal", False),
        ("position_bias", torch.zeros(1)),
        ("attention_mask", torch.ones(1, 1, 3, 3, dtype=torch.bool)),
        ("something_new", 1),
    ],
)
def test_what_it_does_not_honour_is_refused(name: str, value: Any) -> None:
    wanted = {"attention_mask": None, "packed_rows": PackedRows.of(packed([3])), name: value}
    with pytest.raises(ConfigError, match=f"Layer: attention of packed rows knows no {name}"):
        packed_attention(Layer(), **inputs(3), **wanted)


def test_what_says_nothing_about_attention_is_let_pass() -> None:
    rows = PackedRows.of(packed([3]))
    plain = attend(inputs(3), rows)
    output, _ = packed_attention(
        Layer(), **inputs(3), attention_mask=None, packed_rows=rows, scaling=SCALING,
        position_ids=torch.arange(3)[None], use_cache=False, softcap=None, dropout=0.0,
        output_router_logits=True, is_causal=True,
    )  # fmt: skip
    assert torch.equal(output[0], plain)


def test_a_layer_that_sees_both_ways_and_rows_that_never_came_are_refused() -> None:
    layer = Layer()
    with pytest.raises(ConfigError, match="Layer: the model does not hand packed_rows down"):
        packed_attention(layer, **inputs(3), attention_mask=None)
    layer.is_causal = False
    with pytest.raises(ConfigError, match="knows no is_causal=False"):
        packed_attention(
            layer, **inputs(3), attention_mask=None, packed_rows=PackedRows.of(packed([3]))
        )


@pytest.mark.parametrize("window", [None, 7])
def test_flash_attention_is_asked_for_the_same(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU it does not run: one by its documented contract takes its place."""
    one = packed((20, 1, 33, 9))
    given, rows = inputs(63), PackedRows.of(one)
    query, key, value = (given[name][0].transpose(0, 1) for name in HEADS)
    value = torch.nn.functional.pad(value, (0, SIZES["query"] - SIZES["value"]))
    monkeypatch.setattr(attention, "varlen_attn", by_contract)
    output = attention._flash(query, key, value, rows, SCALING, window)
    torch.testing.assert_close(
        output[..., :4].double(), written_out(given, one, window), rtol=0, atol=1e-5
    )


def by_contract(*args: Any, **kwargs: Any) -> Tensor:
    """What the documentation of `torch.nn.attention.varlen.varlen_attn` promises."""
    given = inspect.signature(varlen_attn).bind(*args, **kwargs)
    given.apply_defaults()
    asked = given.arguments
    q, k, v = asked["query"], asked["key"], asked["value"]
    left, right = asked["window_size"]
    assert q.ndim == k.ndim == v.ndim == 3
    assert q.shape[2] == k.shape[2] == v.shape[2]
    assert asked["enable_gqa"] or q.shape[1] == k.shape[1]
    assert asked["cu_seq_q"].dtype == asked["cu_seq_k"].dtype == torch.int32
    bounds = asked["cu_seq_q"].tolist()
    assert bounds == asked["cu_seq_k"].tolist()
    assert asked["max_q"] == asked["max_k"] == max(b - a for a, b in pairwise(bounds))
    scale = 1 / math.sqrt(q.shape[2]) if asked["scale"] is None else asked["scale"]
    each = q.shape[1] // k.shape[1]
    outputs = []
    for start, end in pairwise(bounds):
        place = torch.arange(end - start)
        after = place - place[:, None]  # of the key, against the query
        seen = (left < 0) | (after >= -left)
        seen &= (right < 0) | (after <= right)
        scores = torch.einsum("qhd,khd->hqk", q[start:end], k[start:end].repeat_interleave(each, 1))
        scores = (scores * scale).masked_fill(~seen, -torch.inf)
        outputs.append(
            torch.einsum(
                "hqk,khd->qhd", scores.softmax(-1), v[start:end].repeat_interleave(each, 1)
            )
        )
    return torch.cat(outputs)
