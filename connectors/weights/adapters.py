"""Low-rank adapters (LoRA) as they are published: for each target W only A and B travel, and the
engine installs W0 + scale * B @ A, W0 being the weights that it started with.

Legend: O outputs, I inputs of a linear layer, R the adapter's rank.

Their names say which parameter they change: `model.layers.0.mlp.up_proj.weight.lora_A`, [R, I], and
right behind it `model.layers.0.mlp.up_proj.weight.lora_B`, [O, R].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
import torch
from torch import Tensor

A: Final = ".lora_A"
B: Final = ".lora_B"

Shape = tuple[int, ...]


class Adapters(msgspec.Struct, frozen=True):
    """What an engine must know of adapters besides their bytes. `base` is the digest of all of W0,
    in the dtype that the model is trained and served in."""

    scale: float
    base: str


def problem(
    adapters: Adapters, slots: Sequence[tuple[str, Shape]], shapes: Mapping[str, Shape]
) -> str | None:
    """Why `slots` are no adapters of a model with the parameters `shapes`; None when they are."""
    if not (math.isfinite(adapters.scale) and adapters.scale > 0):
        return f"the adapters' scale must be finite and above 0, got {adapters.scale}"
    if not slots:
        return "the plan has no adapters"
    changed: set[str] = set()
    for (name_a, a_RI), (name_b, b_OR) in itertools.zip_longest(
        slots[::2], slots[1::2], fillvalue=("nothing", ())
    ):
        target = name_a.removesuffix(A)
        if (name_a, name_b) != (target + A, target + B):
            return f"{name_a!r} and {name_b!r} are not the two parts of an adapter"
        if target not in shapes or target in changed:
            return f"the engine's model has no {target!r} for an adapter to change"
        changed.add(target)
        if not _fits(a_RI, b_OR, shapes[target]):
            return (
                f"{list(b_OR)} times {list(a_RI)} is no change of {target!r}, which has shape "
                f"{list(shapes[target])}"
            )
    return None


def _fits(a_RI: Shape, b_OR: Shape, w_OI: Shape) -> bool:
    return len(a_RI) == len(b_OR) == 2 and b_OR[1] == a_RI[0] > 0 and (b_OR[0], a_RI[1]) == w_OI


def pairs(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Each target's name with its A and B, from adapters in publish order."""
    parts = iter(named)
    for (name, a_RI), (_, b_OR) in zip(parts, parts, strict=True):
        yield name.removesuffix(A), (a_RI, b_OR)


@torch.no_grad()
def merged(w_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """W0 + scale * B @ A, computed in float32 where W0 lies, rounded once to W0's dtype."""
    a_RI, b_OR = (part.to(w_OI.device, torch.float32) for part in (a_RI, b_OR))
    return torch.addmm(w_OI.float(), b_OR, a_RI, alpha=scale).to(w_OI.dtype)
