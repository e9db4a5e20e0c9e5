"""A checkpoint's files as they will be, in memory: copied while nothing trains, written beside
training."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Others = Callable[[Path], Callable[[], None]]
"""Makes other ranks write what they captured into a folder; what is returned waits for them."""


class StateCopy:
    """States by file name. Tensors are copied into memory that is kept: from the second time on, a
    state of the same shapes costs the copying and nothing else. On CUDA that memory is pinned.

    others  who has the rest of the same moment's state, and writes it whenever this is written"""

    def __init__(self, others: Others = lambda folder: lambda: None) -> None:
        self._others = others
        self._files: dict[str, Any] = {}
        self._buffers: list[Tensor] = []
        self._num_used = 0
        # Copies by where the original lies, which is kept until `wait`: freed, its place could be
        # taken by another one of the same state.
        self._known: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self._pinned = torch.cuda.is_available()

    @property
    def tensors(self) -> list[Tensor]:
        """All that it holds."""
        return self._buffers[: self._num_used]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def clear(self) -> None:
        """Before the next states; the memory stays."""
        self._files, self._known, self._num_used = {}, {}, 0

    def add(self, name: str, state: Any) -> None:
        """Copies `state` (tensors in dicts, lists and tuples, and anything that can be deep-copied)
        as what the file `name` shall hold. `wait` once all is added, before anything changes."""
        self._files[name] = self._copied(state)

    def wait(self) -> None:
        """Until the copies are complete."""
        if self._pinned:
            torch.cuda.synchronize()
        self._known = {}

    def add_text(self, name: str, text: str) -> None:
        """What the file `name` shall hold, as it is."""
        self._files[name] = _Text(text)

    def write(self, folder: Path) -> None:
        """Writes the files below `folder`: states to be read by torch.load, texts as they are. It
        returns, or raises, once the others have written theirs or could not."""
        wait = self._others(folder)
        for name, state in self._files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(state, _Text):
                (folder / name).write_text(state)
            else:
                torch.save(state, folder / name)
        wait()

    def _copied(self, state: Any) -> Any:
        if isinstance(state, Tensor):
            where = (state.data_ptr(), state.shape, state.stride(), state.dtype)
            if where not in self._known or not state.numel():  # tied weights are copied once
                buffer = self._buffer(state).copy_(state.detach(), non_blocking=True)
                self._known[where] = buffer, state
            return self._known[where][0]
        if type(state) in (dict, OrderedDict):
            return type(state)((key, self._copied(value)) for key, value in state.items())
        if type(state) in (list, tuple):
            return type(state)(map(self._copied, state))
        return copy.deepcopy(state)

    def _buffer(self, like: Tensor) -> Tensor:
        """The next one of those kept; a new one where the state has other shapes than last time."""
        at, self._num_used = self._num_used, self._num_used + 1
        kept = self._buffers[at] if at < len(self._buffers) else None
        if kept is None or kept.shape != like.shape or kept.dtype != like.dtype:
            kept = torch.empty(like.shape, dtype=like.dtype, pin_memory=self._pinned)
            self._buffers[at : at + 1] = [kept]
        return kept


class _Text(str):
    """A file that torch has no part in."""
