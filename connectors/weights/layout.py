"""What is published: a model's parameters laid out in buckets, and their digest.

The same plan lies on both sides, so a bucket travels as one flat tensor with no header. Names are
those of `named_parameters()`; a parameter under two names (tied) is laid out once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, lru_cache
from typing import Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from connectors.weights import adapters as low_rank
from connectors.weights.adapters import Adapters

Named = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""`model.named_parameters()`, `model.state_dict()`, or any pairs of name and tensor."""

Gather = Callable[[Sequence[Tensor]], AbstractContextManager[object]]
"""Inside its context the parameters it is given are whole. Where they are cut over ranks, all ranks
call it with the same ones."""

BUCKET_BYTES: Final = 64 << 20


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """One parameter: elements [offset, offset + numel) of its bucket."""

    name: str
    shape: tuple[int, ...]
    numel: int
    offset: int


class Plan(msgspec.Struct, frozen=True, dict=True, omit_defaults=True):
    """`dtype` is torch's name of it ("float32", "bfloat16"); buckets, slots: in publish order.
    `adapters` says that these are adapters of the model's parameters, and not those themselves."""

    dtype: str
    buckets: tuple[tuple[Slot, ...], ...]
    adapters: Adapters | None = None

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        kind = getattr(torch, self.dtype, None)
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"the plan's dtype is no torch dtype: {self.dtype!r}")
        return kind

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each bucket."""
        return tuple(bucket[-1].offset + bucket[-1].numel for bucket in self.buckets)

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes) * self.torch_dtype.itemsize

    def slots(self) -> Iterator[Slot]:
        """Every parameter, in publish order."""
        for bucket in self.buckets:
            yield from bucket

    def problem(self, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> str | None:
        """Why it does not lay out the parameters `shapes`, or adapters of some of them, one after
        another; None when it does. Nothing else of a plan that came from elsewhere may be used
        before."""
        kind = getattr(torch, self.dtype, None)
        if not (isinstance(kind, torch.dtype) and kind.is_floating_point):
            return f"the plan's dtype is no floating-point dtype of torch: {self.dtype!r}"
        slots = [(slot.name, slot.shape) for slot in self.slots()]
        if self.adapters is not None:
            if (why := low_rank.problem(self.adapters, slots, dict(shapes))) is not None:
                return why
        elif slots != list(shapes):
            return "the engine's model has other parameters than the trainer's"
        for index, bucket in enumerate(self.buckets):
            if not bucket:
                return f"bucket {index} of the plan is empty"
            end = 0
            for slot in bucket:
                if (slot.offset, slot.numel) != (end, math.prod(slot.shape)):
                    return (
                        f"the plan has {slot.name!r} at [{slot.offset}, "
                        f"{slot.offset + slot.numel}) of bucket {index}, which is no place for "
                        f"{list(slot.shape)} from {end} on"
                    )
                end += slot.numel
        return None

    def empty(self, device: torch.device | str = "cpu") -> list[Tensor]:
        """Fresh buckets, flat [size], uninitialised."""
        return [torch.empty(n, dtype=self.torch_dtype, device=device) for n in self.sizes]


def shapes_of(named: Named) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of each parameter, tied ones once; of a ZeRO-3 partition its full shape."""
    seen: set[int] = set()
    shapes = []
    for name, tensor in dict(named).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            shapes.append((name, _shape(tensor)))
    return shapes


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Of a partition (DeepSpeed's ZeRO-3), that of the whole."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def plan(
    named_shapes: Iterable[tuple[str, Sequence[int]]],
    dtype: torch.dtype | str,
    bucket_bytes: int = BUCKET_BYTES,
    adapters: Adapters | None = None,
) -> Plan:
    """Lays the parameters out in the order given. A bucket holds at most `bucket_bytes`, or one
    parameter that alone is larger. ValueError when a name comes twice or there is no parameter."""
    kind = str(dtype).removeprefix("torch.")
    limit = max(1, bucket_bytes // Plan(dtype=kind, buckets=()).torch_dtype.itemsize)
    buckets: list[list[Slot]] = []
    names: set[str] = set()
    offset = 0
    for name, shape in named_shapes:
        if name in names:
            raise ValueError(f"parameter {name!r} comes twice")
        names.add(name)
        numel = math.prod(shape)
        if not buckets or offset + numel > limit:
            buckets.append([])
            offset = 0
        buckets[-1].append(Slot(name, tuple(shape), numel, offset))
        offset += numel
    if not buckets:
        raise ValueError("there are no parameters to publish")
    laid_out = tuple(tuple(bucket) for bucket in buckets)
    return Plan(dtype=kind, buckets=laid_out, adapters=adapters)


# ---------------------------------------------------------------------------------------- digest
# Element i contributes its bits times an odd 64-bit weight of i, summed modulo 2**64. Odd weights:
# no single flipped bit is lost. Weights that differ modulo 2**33: no swap of two elements is lost
# (the difference of two words has at most 31 factors of two), up to 2**32 elements. High bits
# random: no regular pattern of changes cancels out. The weight of i is that of its column, i mod
# SHARD, times that of its row, i div SHARD: the low bits (2j + 1)(1 + s * 2 * SHARD) are distinct
# for all j and s below 2**16.
SHARD: Final = 1 << 16
_M64: Final = (1 << 64) - 1
_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def mix64(x: int) -> int:
    """splitmix64's finaliser: a bijection of 64-bit integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)


def _weight(low: int, salt: int) -> int:
    """An int64 with `low` as its low 33 bits and pseudo-random high ones."""
    bits = (mix64(salt) << 33 | (low & ((1 << 33) - 1))) & _M64
    return bits - (1 << 64) if bits >> 63 else bits


@lru_cache(maxsize=8)
def _columns(device: torch.device) -> Tensor:
    weights = [_weight(2 * j + 1, 0x9E3779B97F4A7C15 + j) for j in range(SHARD)]
    return torch.from_numpy(np.array(weights, np.int64)).to(device)


class Digester:
    """Folds tensors, given in publish order, into one digest. Work is done on `device`, with
    temporaries of one block; nothing is read back before `hex`.

    A block is `rows` shards: on CPU 4, so that its products stay in the cache; on an accelerator
    64, so that launches do not dominate. The digest does not depend on it. Several may share the
    work: one that begins at element `start` is added to the one before.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device | str,
        rows: int | None = None,
        start: int = 0,
    ) -> None:
        self._dtype = dtype
        self._device = torch.device(device)
        self._rows = rows or (4 if self._device.type == "cpu" else 64)
        self._columns = _columns(self._device)
        self._products = torch.empty((self._rows, SHARD), dtype=torch.int64, device=self._device)
        self._total = torch.zeros((), dtype=torch.int64, device=self._device)
        self._start = self._position = start

    def update(self, tensor: Tensor) -> None:
        """The next elements; converted to the published dtype if they are of another."""
        flat = tensor.detach().reshape(-1)
        at = 0
        while at < flat.numel():
            shard, column = divmod(self._position, SHARD)
            left = flat.numel() - at
            rows = min(self._rows, left // SHARD) if column == 0 else 0
            count = rows * SHARD if rows else min(left, SHARD - column)
            words = flat[at : at + count].to(self._device, self._dtype)
            self._fold(words.view(_WORDS[self._dtype.itemsize]), shard, column, max(rows, 1))
            at += count
            self._position += count

    def _fold(self, words: Tensor, shard: int, column: int, rows: int) -> None:
        width = words.numel() // rows
        products = self._products[:rows, :width]
        weights = self._columns[column : column + width]
        torch.mul(words.view(rows, width), weights, out=products)
        scale = [
            _weight(1 + s * 2 * SHARD, 0xD1B54A32D192ED03 + s) for s in range(shard, shard + rows)
        ]
        if rows == 1:
            self._total += products.sum() * scale[0]
        else:
            row_weights = torch.tensor(scale, dtype=torch.int64, device=self._device)
            self._total += (products.sum(dim=1) * row_weights).sum()

    def add(self, following: Digester) -> None:
        """Takes over what was folded from where this one ended. ValueError when it is not that."""
        if following._start != self._position:
            raise ValueError(f"begins at {following._start}, not at {self._position}")
        self._total += following._total
        self._position = following._position

    def hex(self) -> str:
        """16 hex digits of everything so far."""
        total = int(self._total.item()) & _M64
        shape = mix64(self._position * 16 + self._dtype.itemsize)
        return f"{mix64(total ^ shape):016x}"


def digest(named: Named, layout: Plan, gather: Gather = nullcontext) -> str:
    """16 hex digits of the bytes that publishing `named` by `layout` would send: of every element's
    bits and position, the same on every device. `gather` and errors as `gathered`."""
    fold: Digester | None = None
    for bucket in gathered(named, layout, gather):
        for _, tensor in bucket:
            fold = fold or Digester(layout.torch_dtype, tensor.device)
            fold.update(tensor)
    assert fold is not None  # a plan has parameters
    return fold.hex()


def gathered(
    named: Named, layout: Plan, gather: Gather = nullcontext
) -> Iterator[Sequence[tuple[Slot, Tensor]]]:
    """The parameters, bucket by bucket in publish order. Those of one bucket are held whole, by
    `gather`, while it is looked at and not longer. ValueError as `matching`."""
    tensors = matching(named, layout)
    for slots in layout.buckets:
        bucket = [tensors[slot.name] for slot in slots]
        with gather(bucket):
            yield list(zip(slots, bucket, strict=True))


def take_part(named: Named, layout: Plan, gather: Gather) -> None:
    """What the other ranks do while one takes a snapshot or digest."""
    for _ in gathered(named, layout, gather):
        pass


def matching(named: Named, layout: Plan) -> dict[str, Tensor]:
    """The tensors by name. ValueError when one of the plan is missing or has another shape."""
    tensors = dict(named)
    for slot in layout.slots():
        if slot.name not in tensors:
            raise ValueError(f"parameter {slot.name!r} of the plan is missing")
        if (shape := _shape(tensors[slot.name])) != slot.shape:
            raise ValueError(
                f"parameter {slot.name!r} has shape {list(shape)}, the plan says {list(slot.shape)}"
            )
    return tensors
