"""A copy of the weights at one moment, for engines to take while training goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from connectors.weights.layout import Digester, Gather, Named, Plan, gathered
from connectors.weights.memory import Segment


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The published bytes, apart from the model: `buckets[i]` is flat [plan.sizes[i]]. Nobody
    writes to it until it is given back as `into`. `segment`: where other processes can read them,
    if they can."""

    plan: Plan
    buckets: Sequence[Tensor]
    digest: str
    segment: Segment | None = None

    @classmethod
    def take(
        cls,
        named: Named,
        layout: Plan,
        *,
        into: Snapshot | None = None,
        device: torch.device | str = "cpu",
        gather: Gather = nullcontext,
    ) -> Snapshot:
        """Copies the parameters now, converted to the plan's dtype, and digests the copy. `into`
        gives its buffers (it is void afterwards); otherwise fresh ones on `device`, those of a CPU
        in a segment. Where parameters are cut over ranks, `gather` makes a bucket's whole, while
        the other ranks `take_part`. ValueError as `matching`; RuntimeError while a process reads
        `into`."""
        segment, buckets = _fresh(layout, device) if into is None else _reused(into, layout)
        fold = Digester(layout.torch_dtype, buckets[0].device)
        with _writing(segment):
            for whole, bucket in zip(gathered(named, layout, gather), buckets, strict=True):
                for slot, tensor in whole:
                    piece = bucket[slot.offset : slot.offset + slot.numel]
                    piece.view(slot.shape).copy_(tensor.detach())
                fold.update(bucket)
        return cls(layout, buckets, fold.hex(), segment)

    def copied(self, into: Segment | None) -> Snapshot:
        """The same in a segment of the same plan, or else in this process's CPU memory alone."""
        copies = self.plan.empty() if into is None else into.buckets
        with _writing(into):
            for bucket, copy in zip(self.buckets, copies, strict=True):
                copy.copy_(bucket)
        return Snapshot(self.plan, copies, self.digest, into)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views into the buckets, in publish order."""
        for slots, bucket in zip(self.plan.buckets, self.buckets, strict=True):
            for slot in slots:
                piece = bucket[slot.offset : slot.offset + slot.numel]
                yield slot.name, piece.view(slot.shape)


class CpuCopies:
    """Snapshots where other processes, and gloo, can read them: those on a GPU are copied, each
    once. Only the last copy is good."""

    def __init__(self) -> None:
        self._last: tuple[Snapshot, Snapshot] | None = None

    def of(self, snapshot: Snapshot) -> Snapshot:
        if not snapshot.buckets[0].is_cuda:
            return snapshot
        if self._last is None or self._last[0] is not snapshot:
            self._last = snapshot, snapshot.copied(self._segment(snapshot.plan))
        return self._last[1]

    def _segment(self, layout: Plan) -> Segment | None:
        """That of the last copy, unless somebody still reads it."""
        if self._last is not None:
            _, copy = self._last
            if copy.plan == layout and copy.segment is not None and copy.segment.reserve():
                return copy.segment
        return Segment.create(layout)


Buffers = tuple[Segment | None, Sequence[Tensor]]


def _fresh(layout: Plan, device: torch.device | str) -> Buffers:
    segment = Segment.create(layout) if torch.device(device).type == "cpu" else None
    return segment, layout.empty(device) if segment is None else segment.buckets


def _reused(into: Snapshot, layout: Plan) -> Buffers:
    if into.plan != layout:
        raise ValueError("the buffers to reuse were laid out by another plan")
    return into.segment, into.buckets


@contextlib.contextmanager
def _writing(segment: Segment | None) -> Iterator[None]:
    """Inside, nobody reads."""
    if segment is not None and not segment.reserve():
        raise RuntimeError("the buffers to reuse are being read by another process")
    try:
        yield
    finally:
        if segment is not None:
            segment.share()
