"""What is kept of a live run: its setting and, step by step, how it went; a line of JSON a run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from connectors.files import replace_file
from deploy.simulate.subjects import label


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """`shared`: what all runs of an experiment set, as key=value. `waits`: how long its rollouts do
    so beside the engine, in words."""

    policy: str
    parameters: dict[str, Any]
    correction: str
    seed: int
    shared: tuple[str, ...]
    waits: str = ""

    @property
    def label(self) -> str:
        return label(self.policy, self.parameters)

    @property
    def name(self) -> str:
        """Of its run's folder."""
        parts = re.findall(r"[\w.-]+", f"{self.label} {self.correction} seed {self.seed}")
        return "-".join(parts)

    def overrides(self) -> list[str]:
        pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in self.parameters.items())
        return [
            *self.shared,
            f"staleness.policy={json.dumps(self.policy)}",
            f"staleness.parameters={{{pairs}}}",
            f"trainer.correction={json.dumps(self.correction)}",
            f"run.seed={self.seed}",
        ]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """`at_s`: its end, from the first announcement on. `oldest`: steps that its oldest token is
    old, counted from the trajectories themselves."""

    at_s: float
    reward: float
    staleness_mean: float
    staleness_max: float
    oldest: int
    wait_s: float


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulator says of the same policy and as many steps, calibrated by this run."""

    steps_per_hour: float
    staleness_mean: float
    staleness_max: float
    stalled: str | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """bound      that the policy promises, None = none
    num_dropped  groups that were granted and neither trained nor open at the end
    held_out     mean reward over the held-out prompts at the first and the last evaluated version
    stalled      the report of a stall, which ended the run
    took_s       the whole command
    """

    setting: Setting
    steps: tuple[Step, ...]
    bound: int | None
    staleness_mean: float | None
    num_dropped: int
    held_out: tuple[float | None, float | None]
    took_s: float
    predicted: Predicted | None = None
    stalled: str | None = None


class Results:
    """The records of one experiment, in OUT/EXPERIMENT.jsonl."""

    def __init__(self, folder: Path, experiment: str) -> None:
        self._file = folder / f"{experiment}.jsonl"

    def __iter__(self) -> Iterator[Record]:
        for line in self._read().splitlines():
            yield msgspec.json.decode(line, type=Record)

    def has(self, setting: Setting) -> bool:
        return any(record.setting == setting for record in self)

    def add(self, record: Record) -> None:
        """A process that is killed leaves no half record."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._file, self._read() + msgspec.json.encode(record) + b"\n")

    def _read(self) -> bytes:
        return self._file.read_bytes() if self._file.is_file() else b""


def steps_per_hour(ends_s: list[float]) -> float:
    """From the first step's end to the last one's; 0 of fewer than two."""
    if len(ends_s) < 2:
        return 0.0
    return 3600 * (len(ends_s) - 1) / (ends_s[-1] - ends_s[0])
