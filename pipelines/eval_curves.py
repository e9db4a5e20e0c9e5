"""Evaluations as TensorBoard event files, beside the trainer's: one point an evaluated version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from connectors.records import Estimate, Evaluation


class EvalCurves:
    """Writes into a folder of its own, the run `eval` of TensorBoard. Points of versions that the
    first one of this start reaches or overtakes are void: a rollback gave them up, or they are
    written again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "eval"
        self._writer: Any = None

    def write(self, evaluation: Evaluation) -> None:
        from torch.utils.tensorboard import SummaryWriter

        number = evaluation.version.number
        if self._writer is None:
            self._writer = SummaryWriter(str(self._folder), purge_step=number, flush_secs=10)
        for name, value in values(evaluation):
            self._writer.add_scalar(name, value, number, walltime=evaluation.evaluated_at)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def values(evaluation: Evaluation) -> Iterator[tuple[str, float]]:
    """Each curve's name and its point."""
    reward = Estimate(evaluation.reward, evaluation.low, evaluation.high)
    passes = {f"pass@{k}": found for k, found in evaluation.pass_at.items()}
    for name, found in {"reward": reward, **passes}.items():
        yield f"eval/{evaluation.task}/{name}", found.mean
        if found.low is not None and found.high is not None:
            yield f"eval/{evaluation.task}/{name}_low", found.low
            yield f"eval/{evaluation.task}/{name}_high", found.high
