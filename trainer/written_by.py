"""What a checkpoint's files are cut for: DeepSpeed's are of one number of ranks, one ZeRO stage and
one set of trained weights, and it finds out late, on some rank, with words of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from connectors.config import ConfigError
from trainer.state_copy import StateCopy

_FILE: Final = "ranks.json"
_KEYS: Final = {
    "ranks": "trainer.num_ranks", "zero_stage": "trainer.zero_stage", "dtype": "model.dtype",
    "lora": "trainer.lora",
}  # fmt: skip
"""Of an engine's environment, and what sets them."""


def note(state: StateCopy, environment: Mapping[str, str]) -> None:
    """Adds to what is captured by whom it was."""
    written = {key: environment[key] for key in _KEYS}
    state.add_text(_FILE, msgspec.json.encode(written).decode())


def check(state: Path, environment: Mapping[str, str], step: int) -> None:
    """ConfigError when the checkpoint of `step`, whose state is in that folder, cannot be loaded in
    this environment."""
    if not (state / _FILE).exists():
        return
    written = msgspec.json.decode((state / _FILE).read_bytes(), type=dict[str, str])
    # Checkpoints of earlier versions do not say everything.
    differ = [key for key in _KEYS if key in written and written[key] != environment[key]]
    if differ:
        then, now = (
            ", ".join(f"{_KEYS[key]} = {of[key]}" for key in differ)
            for of in (written, environment)
        )
        raise ConfigError(
            f"the checkpoint of step {step} was saved with {then}; this configuration says {now}: "
            "a run goes on with those it was saved with"
        )
