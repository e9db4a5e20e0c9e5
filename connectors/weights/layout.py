"""What is published: a model's parameters laid out in buckets, their digest, and a copy of them.

The same plan lies on both sides, so a bucket travels as one flat tensor with no header. Names are
those of `named_parameters()`; a parameter under two names (tied) is laid out once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

import msgspec
import numpy as np
import torch
from torch import Tensor

Named = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""`model.named_parameters()`, `model.state_dict()`, or any pairs of name and tensor."""

BUCKET_BYTES: Final = 64 << 20


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """One parameter: elements [offset, offset + numel) of its bucket."""

    name: str
    shape: tuple[int, ...]
    numel: int
    offset: int


class Plan(msgspec.Struct, frozen=True, dict=True):
    """`dtype` is torch's name of it ("float32", "bfloat16"); buckets, slots: in publish order."""

    dtype: str
    buckets: tuple[tuple[Slot, ...], ...]

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
            shapes.append((name, tuple(getattr(tensor, "ds_shape", tensor.shape))))
    return shapes


def plan(
    named_shapes: Iterable[tuple[str, Sequence[int]]],
    dtype: torch.dtype | str,
    bucket_bytes: int = BUCKET_BYTES,
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
    return Plan(dtype=kind, buckets=tuple(tuple(bucket) for bucket in buckets))


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
    64, so that launches do not dominate. The digest does not depend on it.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device | str, rows: int | None = None
    ) -> None:
        self._dtype = dtype
        self._device = torch.device(device)
        self._rows = rows or (4 if self._device.type == "cpu" else 64)
        self._columns = _columns(self._device)
        self._products = torch.empty((self._rows, SHARD), dtype=torch.int64, device=self._device)
        self._total = torch.zeros((), dtype=torch.int64, device=self._device)
        self._position = 0

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

    def hex(self) -> str:
        """16 hex digits of everything so far."""
        total = int(self._total.item()) & _M64
        shape = mix64(self._position * 16 + self._dtype.itemsize)
        return f"{mix64(total ^ shape):016x}"


def digest(named: Named, layout: Plan) -> str:
    """16 hex digits of the bytes that publishing `named` by `layout` would send: of every element's
    bits and position, the same on every device. ValueError when a parameter is missing or of
    another shape."""
    tensors = _matching(named, layout)
    first = next(iter(tensors.values()))
    fold = Digester(layout.torch_dtype, first.device)
    for slot in layout.slots():
        fold.update(tensors[slot.name])
    return fold.hex()


def _matching(named: Named, layout: Plan) -> dict[str, Tensor]:
    tensors = dict(named)
    for slot in layout.slots():
        if slot.name not in tensors:
            raise ValueError(f"parameter {slot.name!r} of the plan is missing")
        if tuple(tensors[slot.name].shape) != slot.shape:
            raise ValueError(
                f"parameter {slot.name!r} has shape {list(tensors[slot.name].shape)}, "
                f"the plan says {list(slot.shape)}"
            )
    return tensors


# -------------------------------------------------------------------------------------- snapshot
@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The published bytes at one moment, apart from the model: `buckets[i]` is flat
    [plan.sizes[i]]. Nobody writes to it until it is given back as `into`."""

    plan: Plan
    buckets: list[Tensor]
    digest: str

    @classmethod
    def take(
        cls,
        named: Named,
        layout: Plan,
        *,
        into: Snapshot | None = None,
        device: torch.device | str = "cpu",
    ) -> Snapshot:
        """Copies the parameters now, converted to the plan's dtype, and digests the copy. `into`
        gives its buffers (it is void afterwards); otherwise fresh ones on `device`: "cpu" for gloo,
        the parameters' own for NCCL. ValueError as `digest`."""
        tensors = _matching(named, layout)
        if into is not None and into.plan != layout:
            raise ValueError("the buffers to reuse were laid out by another plan")
        buckets = layout.empty(device) if into is None else into.buckets
        fold = Digester(layout.torch_dtype, buckets[0].device)
        for slots, bucket in zip(layout.buckets, buckets, strict=True):
            for slot in slots:
                piece = bucket[slot.offset : slot.offset + slot.numel]
                piece.view(slot.shape).copy_(tensors[slot.name].detach())
            fold.update(bucket)
        return cls(layout, buckets, fold.hex())

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views into the buckets, in publish order."""
        for slots, bucket in zip(self.plan.buckets, self.buckets, strict=True):
            for slot in slots:
                piece = bucket[slot.offset : slot.offset + slot.numel]
                yield slot.name, piece.view(slot.shape)
