"""W0: the weights that an engine started with, to which adapters are added.

`ModelFolder` reads them where they came from; `BaseWeights` keeps what adapters change of an
engine's live parameters, so that every version is made of W0 and never of the version before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from connectors.weights.adapters import Adapters, merged, pairs
from connectors.weights.layout import Digester
from connectors.weights.wire import PlanRefused

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class ModelFolder:
    """A Hugging Face folder's safetensors files, mapped: what is read stays in the page cache,
    which the processes of a host share. PlanRefused for whatever they do not hold."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}  # by parameter
        try:
            index = folder / _INDEX
            if index.is_file():
                files = set(msgspec.json.decode(index.read_bytes())["weight_map"].values())
            else:
                files = {_SINGLE}
            for file in sorted(files):
                opened: Any = safe_open(folder / file, framework="pt")
                self._files.update(dict.fromkeys(opened.keys(), opened))
        except (OSError, SafetensorError, msgspec.DecodeError, KeyError) as error:
            raise PlanRefused(f"{folder}: has no base weights for adapters: {error}") from error

    def names(self) -> Iterable[str]:
        return self._files.keys()

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """On the CPU."""
        if name not in self._files:
            raise PlanRefused(f"{self._folder}: has no base weights {name!r} for adapters")
        found: Tensor = self._files[name].get_tensor(name)
        return found.to(dtype)

    def digest(self, names: Iterable[str], dtype: torch.dtype) -> str:
        """As `Adapters.base`, of the parameters `names` of a model."""
        fold = Digester(dtype, "cpu")
        for name in names:
            fold.update(self.tensor(name, dtype))
        return fold.hex()

    def with_adapters(
        self,
        adapters: Adapters,
        named: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Iterator[tuple[str, Tensor]]:
        """All that the files hold, W0 merged with its adapter where there is one in `named`, which
        is in publish order."""
        parts = dict(pairs(named))
        for name in self.names():
            base = self.tensor(name, dtype)
            if (part := parts.get(name)) is not None:
                base = merged(base.to(device), *part, adapters.scale)
            yield name, base


def check_base(adapters: Adapters, digest: str) -> None:
    """PlanRefused when they are of other base weights than an engine's, which have `digest`."""
    if adapters.base != digest:
        raise PlanRefused(
            f"the adapters are of base weights {adapters.base}, this engine started with {digest}"
        )


class BaseWeights:
    """Of the live parameters `live`, whose digest at the start is `digest`. `folder` is where they
    came from, None when nobody knows. Nobody writes to them while one of its methods runs."""

    def __init__(self, live: Mapping[str, Tensor], digest: str, folder: Path | None) -> None:
        self._live, self._digest, self._folder = live, digest, folder
        self._kept: dict[str, Tensor] = {}  # W0 of what adapters changed
        self._overwritten = False  # the others are not W0 any more

    def check(self, adapters: Adapters) -> None:
        """PlanRefused when they are of another W0, or this engine has it no more."""
        check_base(adapters, self._digest)
        if self._overwritten:
            found = self._read().digest(self._live, self._dtype)
            if found != self._digest:
                raise PlanRefused(
                    f"{self._folder}: holds the weights {found}, this engine started with "
                    f"{self._digest}, and whole ones have come over them since"
                )

    def originals(self, targets: Collection[str]) -> dict[str, Tensor]:
        """W0 of `targets`, and of every other parameter that may not be W0 now: all that is to be
        written for adapters of the targets. Nobody may write to them."""
        folder = self._read() if self._overwritten else None
        for name, live in self._live.items():
            if name in targets and name not in self._kept:
                found = live.detach() if folder is None else folder.tensor(name, live.dtype)
                self._kept[name] = found.to(live.device, copy=True)
        if folder is None:
            return dict(self._kept)
        return {
            name: self._kept[name] if name in self._kept else folder.tensor(name, live.dtype)
            for name, live in self._live.items()
        }

    def added(self, targets: Collection[str]) -> None:
        """Adapters of `targets` are in, and all else is W0."""
        self._kept = {name: self._kept[name] for name in targets}
        self._overwritten = False

    def overwrite(self) -> None:
        """Whole weights are about to come."""
        self._kept = {}
        self._overwritten = True

    @property
    def _dtype(self) -> torch.dtype:
        return next(iter(self._live.values())).dtype

    def _read(self) -> ModelFolder:
        if self._folder is None:
            raise PlanRefused("whole weights have come over this engine's base weights")
        return ModelFolder(self._folder)
