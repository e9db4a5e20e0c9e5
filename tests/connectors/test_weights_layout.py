"""The plan, the digest and the snapshot: what is published, bit for bit."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from connectors.weights import Plan, Snapshot, digest, plan, shapes_of
from connectors.weights.layout import SHARD, Digester, _weight

WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
NUM = 2 * SHARD + 77  # two whole shards and a part


def one(tensor: Tensor) -> str:
    return digest([("w", tensor)], plan([("w", tuple(tensor.shape))], tensor.dtype))


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def weights(request: pytest.FixtureRequest) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(NUM, generator=generator).to(request.param)


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, NUM - 1), bit=st.integers(0, 31))
def test_one_flipped_bit_changes_the_digest(weights: Tensor, at: int, bit: int) -> None:
    words = weights.clone().view(WORDS[weights.dtype])
    mask = 1 << (bit % (8 * words.element_size()))
    words[at] ^= torch.tensor(mask, dtype=torch.int64).to(words.dtype)

    assert one(words.view(weights.dtype)) != one(weights)


@settings(max_examples=60, deadline=None)
@given(a=st.integers(0, NUM - 1), b=st.integers(0, NUM - 1), sign_only=st.booleans())
def test_two_swapped_elements_change_the_digest(
    weights: Tensor, a: int, b: int, sign_only: bool
) -> None:
    """Also two that differ only in their highest bit, where a plain weighted sum is weakest."""
    assume(a != b)
    before = weights.clone()
    if sign_only:
        before[a] = -before[b]
    after = before.clone()
    after[a], after[b] = before[b], before[a]
    assume(not torch.equal(before, after))

    assert one(after) != one(before)


def test_a_regular_pattern_of_changes_changes_the_digest() -> None:
    """+1, -2, +1 on neighbouring words cancels out of any sum weighted by position alone."""
    words = torch.arange(1000, dtype=torch.int32)
    changed = words.clone()
    changed[10:13] += torch.tensor([1, -2, 1], dtype=torch.int32)

    assert one(changed.view(torch.float32)) != one(words.view(torch.float32))


def test_the_folded_sum_is_the_formula_in_integers() -> None:
    words = torch.randint(-(2**31), 2**31, (SHARD + 500,), dtype=torch.int64)
    fold = Digester(torch.float32, "cpu")
    fold.update(words.to(torch.int32).view(torch.float32))

    expected = 0
    for i, word in enumerate(words.tolist()):
        shard, column = divmod(i, SHARD)
        row = _weight(1 + shard * 2 * SHARD, 0xD1B54A32D192ED03 + shard)
        expected += word * row * _weight(2 * column + 1, 0x9E3779B97F4A7C15 + column)
    assert int(fold._total) % 2**64 == expected % 2**64


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, 5 * SHARD + 9), max_size=6), rows=st.integers(1, 4))
def test_neither_blocks_nor_tensor_borders_change_the_digest(cuts: list[int], rows: int) -> None:
    """So a model, its buckets and an accelerator's larger blocks all give the same."""
    weights = torch.linspace(-1, 1, 5 * SHARD + 9)
    fold = Digester(torch.float32, "cpu", rows=rows)
    borders = [0, *sorted(cuts), len(weights)]
    for start, end in itertools.pairwise(borders):
        fold.update(weights[start:end])

    assert fold.hex() == one(weights)


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, 3 * SHARD + 9), min_size=1, max_size=4))
def test_parts_folded_apart_add_up_to_the_whole(cuts: list[int]) -> None:
    weights = torch.linspace(-1, 1, 3 * SHARD + 9)
    parts = []
    for start, end in itertools.pairwise([0, *sorted(cuts), len(weights)]):
        parts.append(Digester(torch.float32, "cpu", start=start))
        parts[-1].update(weights[start:end])
    whole, *following = parts
    for part in following:
        whole.add(part)

    assert whole.hex() == one(weights)


def test_a_part_that_does_not_follow_is_refused() -> None:
    first, third = (Digester(torch.float32, "cpu", start=start) for start in (0, 8))
    first.update(torch.ones(4))

    with pytest.raises(ValueError, match="begins at 8, not at 4"):
        first.add(third)


def test_the_digest_is_of_the_bytes_published_not_of_the_masters() -> None:
    masters = [("w", torch.randn(100))]
    layout = plan(shapes_of(masters), torch.bfloat16)

    assert digest(masters, layout) == one(masters[0][1].to(torch.bfloat16))
    assert digest(masters, layout) != one(masters[0][1])


def test_buckets_hold_whole_parameters_in_order_within_their_size() -> None:
    shapes = [("a", (10,)), ("b", (5, 2)), ("large", (40,)), ("c", ()), ("d", (3,))]
    layout = plan(shapes, "float32", bucket_bytes=4 * 20)

    assert [[slot.name for slot in bucket] for bucket in layout.buckets] == [
        ["a", "b"], ["large"], ["c", "d"],
    ]  # fmt: skip
    assert [(s.shape, s.offset) for s in layout.buckets[2]] == [((), 0), ((3,), 1)]
    assert layout.sizes == (20, 40, 4)
    assert layout.num_bytes == 4 * 64
    assert msgspec.json.decode(msgspec.json.encode(layout), type=Plan) == layout


def test_a_tied_parameter_is_laid_out_once() -> None:
    model = torch.nn.ModuleDict(
        {"embedding": torch.nn.Embedding(7, 3), "head": torch.nn.Linear(3, 7, bias=False)}
    )
    model["head"].weight = model["embedding"].weight

    assert shapes_of(model.named_parameters()) == [("embedding.weight", (7, 3))]
    assert shapes_of(model.named_parameters(remove_duplicate=False)) == [
        ("embedding.weight", (7, 3))
    ]


@pytest.mark.parametrize(
    ("shapes", "message"), [([], "no parameters"), ([("a", (1,)), ("a", (1,))], "twice")]
)
def test_a_layout_that_makes_no_sense_is_refused(
    shapes: list[tuple[str, tuple[int, ...]]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan(shapes, "float32")


SHAPES = [("a", (2, 3)), ("b", (4,)), ("c", ())]
GOOD = plan(SHAPES, "float32", bucket_bytes=40)


def with_slot(name: str, /, **changes: object) -> Plan:
    """GOOD, but for one slot."""
    return Plan(
        dtype=GOOD.dtype,
        buckets=tuple(
            tuple(replace(slot, **changes) if slot.name == name else slot for slot in bucket)
            for bucket in GOOD.buckets
        ),
    )


NO_PLANS = {
    "no dtype": (replace(GOOD, dtype="junk"), "no floating-point dtype of torch: 'junk'"),
    "whole numbers": (replace(GOOD, dtype="int32"), "no floating-point dtype"),
    "a function": (replace(GOOD, dtype="zeros"), "no floating-point dtype"),
    "empty": (replace(GOOD, buckets=()), "other parameters"),
    "an empty bucket": (
        replace(GOOD, buckets=(*GOOD.buckets, ())),
        "bucket 2 of the plan is empty",
    ),
    "another order": (replace(GOOD, buckets=GOOD.buckets[::-1]), "other parameters"),
    "another name": (with_slot("b", name="d"), "other parameters"),
    "another shape": (with_slot("a", shape=(3, 2)), "other parameters"),
    "the same place twice": (with_slot("b", offset=0), "'b' at [0, 4) of bucket 0"),
    "a gap": (with_slot("b", offset=7), "'b' at [7, 11) of bucket 0"),
    "not from the start": (with_slot("c", offset=1), "'c' at [1, 2) of bucket 1"),
    "before the start": (with_slot("a", offset=-1), "'a' at [-1, 5) of bucket 0"),
    "too few elements": (with_slot("c", numel=0), "'c' at [0, 0) of bucket 1"),
    "too many elements": (with_slot("b", numel=5), "'b' at [6, 11) of bucket 0"),
}


@pytest.mark.parametrize(("layout", "why"), NO_PLANS.values(), ids=NO_PLANS.keys())
def test_a_plan_that_puts_a_parameter_anywhere_but_behind_the_last_is_none(
    layout: Plan, why: str
) -> None:
    assert GOOD.problem(SHAPES) is None
    assert why in (layout.problem(SHAPES) or "")


def test_weights_that_do_not_fit_the_plan_are_refused() -> None:
    layout = plan([("a", (2, 3))], "float32")
    with pytest.raises(ValueError, match="'a' of the plan is missing"):
        digest([("b", torch.ones(2, 3))], layout)
    with pytest.raises(ValueError, match=r"has shape \[3, 2\], the plan says \[2, 3\]"):
        Snapshot.take([("a", torch.ones(3, 2))], layout)


def test_a_snapshot_keeps_the_bytes_of_its_moment_and_reuses_buffers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 10))
    layout = plan(shapes_of(model.named_parameters()), torch.float32, bucket_bytes=1000)
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    first = Snapshot.take(model.named_parameters(), layout)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1

    assert first.digest == digest(before, layout) == digest(first.named_tensors(), layout)
    assert all(torch.equal(tensor, before[name]) for name, tensor in first.named_tensors())

    second = Snapshot.take(model.named_parameters(), layout, into=first)
    assert [b.data_ptr() for b in second.buckets] == [b.data_ptr() for b in first.buckets]
    assert second.digest == digest(model.named_parameters(), layout) != first.digest
    with pytest.raises(ValueError, match="another plan"):
        Snapshot.take([("a", torch.ones(1))], plan([("a", (1,))], "float32"), into=second)
