"""The run's curves as TensorBoard event files, one point a step."""

from __future__ import annotations

from pathlib import Path

from connectors.records import Manifest


class Curves:
    """Points after `last_step` that an earlier trainer wrote are void: it was killed before their
    step counted."""

    def __init__(self, folder: Path, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=last_step + 1, flush_secs=10)

    def write(self, manifest: Manifest) -> None:
        """All its metrics but those of single versions, each of which would be a curve of its own
        (`headwater status` has them)."""
        values = {
            **{k: v for k, v in manifest.metrics.items() if not k.startswith("prequential/")},
            **{f"staleness/{name}": value for name, value in manifest.staleness.items()},
            "skipped": float(manifest.skipped is not None),
        }
        for name, value in values.items():
            self._writer.add_scalar(name, value, manifest.step, walltime=manifest.finished_at)

    def close(self) -> None:
        self._writer.close()
