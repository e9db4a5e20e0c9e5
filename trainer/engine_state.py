"""A rank's share of a checkpoint: its model, optimizer and random state, to memory and from
files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from operators.tracker import TrackerState
from trainer.process_group import quiet_deepspeed
from trainer.state_copy import StateCopy

_TAG: Final = "engine"
_TRACKER: Final = "tracker.pt"


def capture(
    engine: Any, tracker: TrackerState, into: StateCopy | None, *, only_trained: bool
) -> StateCopy:
    """A copy of DeepSpeed's state, this rank's random state and, of rank 0, the tracker, whose
    `write` gives what `restore` reads; `into` gives its memory. `only_trained`: without parameters
    that stay as they are. All ranks call it."""
    captured = into or StateCopy()
    captured.clear()
    stock, engine.checkpoint_engine = engine.checkpoint_engine, _IntoMemory(captured)
    try:
        with quiet_deepspeed():
            engine.save_checkpoint(
                ".", tag=_TAG, save_latest=False, exclude_frozen_parameters=only_trained
            )
    finally:
        engine.checkpoint_engine = stock
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    captured.add(f"random_{dist.get_rank()}.pt", state)
    if dist.get_rank() == 0:
        captured.add(_TRACKER, msgspec.json.encode(tracker).decode())
    captured.wait()
    return captured


def restore(engine: Any, folder: Path, *, only_trained: bool) -> TrackerState:
    """Brings the engine to what was captured, bit for bit; the tracker is returned. ValueError when
    `folder` holds no checkpoint, RuntimeError (torch's) when it is of a model with other shapes."""
    if not (folder / _TAG).is_dir():
        raise ValueError(f"{folder} holds no checkpoint of this engine")
    with quiet_deepspeed():
        engine.load_checkpoint(str(folder), tag=_TAG, load_module_strict=not only_trained)
    state = torch.load(folder / f"random_{dist.get_rank()}.pt", weights_only=True)
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    tracker = torch.load(folder / _TRACKER, weights_only=True)
    return msgspec.json.decode(tracker, type=TrackerState)


class _IntoMemory(CheckpointEngine):  # type: ignore[misc]
    """Takes what DeepSpeed would write to files."""

    def __init__(self, captured: StateCopy) -> None:
        super().__init__()
        self._captured = captured

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        return None

    def create(self, info: object) -> None:
        return None

    def save(self, state_dict: object, path: str) -> None:
        self._captured.add(path, state_dict)

    def load(self, path: str, map_location: object = None) -> None:
        raise NotImplementedError

    def commit(self, info: object) -> bool:
        return True
