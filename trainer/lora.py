"""Low-rank adapters (LoRA) on a Hugging Face model: a frozen model enters, one that computes with
W + scale * B @ A leaves, whose A and B alone are trained and published.

    add_adapters ─▶ Adapted ─▶ named_parameters, plan    what is trained and published
                            ─▶ disabled                  the initial policy: no second model
                            ─▶ merged_parameters         what a plain model of the same policy has

The model is changed in place and stays of its class. With B zero it begins as what it was.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn

from connectors import weights
from connectors.config import ConfigError
from connectors.config.lora import Lora
from connectors.weights.adapters import A, B, merged

_ADAPTER: Final = "default"
_INNER: Final = ".base_layer"  # what peft puts between a layer's name and its parameters'


class Adapted:
    """A model with adapters. `scale` is what B @ A is multiplied by, `base` the digest of the
    weights below, as published: equal adapters of equal bases at equal scales are equal models."""

    def __init__(self, model: Any, layers: dict[str, Any], scale: float, base: str) -> None:
        """`layers`: peft's, by the names of the linear layers that they replaced."""
        self._model, self._layers = model, layers
        self.scale, self.base = scale, base

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """A and B of each target in the model's order, under names made of the target's own:
        `...q_proj.weight.lora_A`, then `...q_proj.weight.lora_B`."""
        return [
            (f"{name}.weight{suffix}", part[_ADAPTER].weight)
            for name, layer in self._layers.items()
            for suffix, part in ((A, layer.lora_A), (B, layer.lora_B))
        ]

    def plan(self, dtype: torch.dtype) -> weights.Plan:
        """How the adapters are published."""
        shapes = weights.shapes_of(self.named_parameters())
        return weights.plan(shapes, dtype, adapters=weights.Adapters(self.scale, self.base))

    def environment(self) -> dict[str, str]:
        """What bits depend on beside the adapters themselves."""
        import peft

        return {"lora_base": self.base, "lora_scale": repr(self.scale), "peft": peft.__version__}

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the model computes as it did before it had adapters. Graphs that were made
        outside stay good."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    def merged_parameters(
        self, gather: weights.Gather = nullcontext
    ) -> Iterator[tuple[str, Tensor]]:
        """The plain model's parameters by their own names, tied ones once; the same bits each time
        and in each engine that has the adapters. Where they are cut over
        ranks, all ranks go through this, and each is whole until the next is asked for."""
        adapters = dict(self.named_parameters())
        for inner, parameter in self._model.named_parameters():
            name = inner.replace(_INNER + ".", ".")
            if name == inner and ".lora_" in inner:
                continue
            a_RI, b_OR = adapters.get(name + A), adapters.get(name + B)
            if a_RI is None or b_OR is None:
                with gather([parameter]):
                    yield name, parameter.detach()
            else:
                with gather([parameter, a_RI, b_OR]):
                    yield name, merged(parameter, a_RI, b_OR, self.scale)


def add_adapters(model: Any, lora: Lora, seed: int) -> Adapted:
    """Freezes `model` and adds adapters to it: A drawn from `seed` as kaiming_uniform, the same on
    every rank, B zero. The model's parameters are whole and in the dtype that is published.
    ConfigError for targets that it does not have."""
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds

    named = dict(model.named_parameters())
    dtype = next(iter(named.values())).dtype
    base = weights.digest(named, weights.plan(weights.shapes_of(named), dtype))
    names = _targets(model, lora.targets)
    alpha: Any = lora.alpha  # peft says that it is an integer, and takes any number
    settings = LoraConfig(r=lora.rank, lora_alpha=alpha, target_modules=names, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):  # its own draws are replaced
        inject_adapter_in_model(settings, model, _ADAPTER)
    layers = {name: model.get_submodule(name) for name in names}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in layers.values():
            a_RI, b_OR = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
            drawn_RI = torch.empty(a_RI.shape, dtype=torch.float32)
            nn.init.kaiming_uniform_(drawn_RI, a=math.sqrt(5), generator=generator)
            a_RI.data = drawn_RI.to(a_RI.device, dtype)
            b_OR.data = torch.zeros_like(b_OR, dtype=dtype)
    return Adapted(model, layers, lora.scale, base)


def _targets(model: Any, wanted: str | list[str]) -> list[str]:
    """The names of the layers, in the model's order. An output embedding is none of them: the head
    is computed from its weight alone. Nor is a layer that shares its weight."""
    holders: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    linear = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
        and layer is not model.get_output_embeddings()
        and holders[id(layer.weight)] == 1
    ]
    if wanted == "all-linear":
        chosen = linear
    else:
        for target in wanted:
            if not any(_is(name, target) for name in linear):
                known = sorted({name.rpartition(".")[2] for name in linear})
                raise ConfigError(
                    f"trainer.lora.targets: the model has no layer {target!r} to adapt; it has "
                    f"{', '.join(known)}"
                )
        chosen = [name for name in linear if any(_is(name, target) for target in wanted)]
    if not chosen:
        raise ConfigError("trainer.lora: the model has no linear layers to adapt")
    return chosen


def _is(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")
