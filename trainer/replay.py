"""Replay: any stretch of training whose checkpoint and log are kept, executed again in this
process.

checkpoint at or before the first step ──▶ fresh engine ──▶ each manifest ──▶ digests compared
"""

from __future__ import annotations

from collections import deque
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from connectors.config import Config
from connectors.kafka.client import Cluster
from connectors.run_dir import RunDir
from trainer.checkpoint import CheckpointStore
from trainer.execute import training_engine
from trainer.recovery import ReexecutionDiffers, load_newest, reexecute
from trainer.step_log import StepLog


class NothingToReplay(ValueError):
    """The run has no such steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """`steps` compared, from `first` to `last`. A difference has the first step that differs, what
    differs, and the record that is not the one that was trained, if it is that."""

    first: int
    last: int
    steps: int
    differs: ReexecutionDiffers | None = None

    @property
    def equal(self) -> bool:
        return self.differs is None

    @property
    def first_difference(self) -> dict[str, Any] | None:
        """{step, record}, `record` a coordinate or None."""
        if self.differs is None:
            return None
        record = self.differs.record
        return {
            "step": self.differs.step,
            "record": None
            if record is None
            else f"trajectories/{record.partition}/{record.offset}",
        }


def replay(
    cluster: Cluster,
    run_dir: RunDir,
    config: Config,
    *,
    last: int | None = None,
    first: int | None = None,
    until: int | None = None,
) -> Replay:
    """Executes steps `first` to `until` again (or the `last` K; all steps by default) and compares
    each digest with the log's. Steps between the checkpoint and `first` are executed, not counted.
    NothingToReplay when the log holds no such steps."""
    with closing(StepLog(cluster)) as steps:
        chain = {m.step: m for m in steps.manifests()}
    if not chain:
        raise NothingToReplay("the run has trained no step yet")
    until = max(chain) if until is None else until
    if first is None:
        first = min(chain) if last is None else max(min(chain), until - last + 1)
    if not (min(chain) <= first <= until <= max(chain)):
        raise NothingToReplay(
            f"steps {first} to {until} are not in the log; it holds {min(chain)} to {max(chain)}"
        )
    store = CheckpointStore(config.checkpoint.url or run_dir.checkpoints)
    differs = None
    with closing(training_engine(config)) as engine:
        meta = load_newest(store, engine, chain, at_most=first - 1)
        start = meta.step if meta else 0
        if start + 1 not in chain:
            raise NothingToReplay(
                f"no checkpoint at or before step {first - 1} whose later manifests are in the log"
            )
        manifests = (chain[step] for step in range(start + 1, until + 1))
        try:
            deque(reexecute(config, cluster, engine, manifests), maxlen=0)
        except ReexecutionDiffers as error:
            differs = error
    return Replay(first=first, last=until, steps=until - first + 1, differs=differs)
