"""A shadow trainer: another algorithm or learning rate on the trajectories of a run, without
rollouts of its own.

    the run's policy, trajectories ──▶ Merge ──▶ Loop ──▶ `steps`, checkpoints, curves of its own
                                                     └──▶ its weights go to nobody

It recovers exactly as the main trainer does: the same checkpoints, write-ahead log and execution.
Its steps are its own, so the staleness in its manifests is what it is: versions of the run's tokens
by their number against the shadow's step, negative where the run was ahead. No bound is enforced.
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from connectors.config import Config, ConfigError
from connectors.kafka.client import Cluster
from connectors.kafka.locate import topics
from connectors.kafka.topics import ensure_topics
from connectors.records import Version
from connectors.run_dir import RunDir
from connectors.weights import Snapshot
from trainer import gang
from trainer.checkpoint import run_store
from trainer.credit import no_signal
from trainer.execute import untrainable
from trainer.feed_state import Counts
from trainer.loop import run_loop
from trainer.merge import Merge
from trainer.recovery import recover
from trainer.step_log import StepLog

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shadowed:
    """Where it stands: its last step, the digest of its weights, and what became of the groups it
    looked at. `resumed_step`: where it stood before."""

    resumed_step: int
    step: int
    digest: str
    counts: Counts


class Nobody:
    """In place of a publisher: nobody gets the weights."""

    def __init__(self) -> None:
        self.last_seconds = 0.0
        self._free: Snapshot | None = None

    def spare(self) -> Snapshot | None:
        """Buffers to take the next snapshot into: the last one's."""
        return self._free

    def submit(
        self, snapshot: Snapshot, version: Version, master_changed: bool | None = None
    ) -> None:
        """Lets it be."""
        self._free = snapshot

    def check(self) -> None:
        """Nothing fails."""

    def wait_published(self, version: Version, timeout_s: float) -> bool:
        """At once: there is nobody to wait for."""
        return True


def shadow(
    config: Config,
    run_dir: RunDir,
    cluster: Cluster,
    stop: threading.Event,
    *,
    follow: bool,
) -> Shadowed:
    """Trains until `trainer.num_steps`, `stop` or, unless it is to `follow` the run, the end of the
    log. `config` is the shadow's, `cluster` the run's broker under
    the shadow's namespace. Raises as `trainer.loop.train`, LedgerBroken and OffsetGone as `Merge`.
    """
    source = config.trainer.source
    if source is None:
        raise ConfigError("trainer.source: is needed by a shadow trainer")
    ensure_topics(cluster, topics(config.kafka.partitions))
    store = run_store(config, run_dir)
    store.clean()
    run_dir.register("shadow")
    with ExitStack() as open_parts:
        engine = open_parts.enter_context(gang.engine(config, cluster, run_dir, role="shadow"))
        steps = open_parts.enter_context(closing(StepLog(cluster)))
        recovered = recover(config, cluster, engine, store, steps)
        log.info("epoch %d continues after step %d", recovered.epoch, recovered.step)
        merge = Merge(
            cluster,
            source,
            recovered,
            batch_size=config.trainer.groups_per_step,
            untrainable=lambda group: untrainable(
                group, config.trainer, engine.vocabulary_size, engine.max_tokens
            ),
            no_signal=lambda group: no_signal(group, config.trainer),
            at_end=None if follow else stop.set,
        )
        open_parts.callback(merge.close)
        recovered = replace(recovered, state=merge.state)
        run_loop(config, run_dir, cluster, engine, steps, recovered, merge, Nobody(), store, stop)
        return Shadowed(
            resumed_step=recovered.step,
            step=merge.step,
            digest=engine.digest(),
            counts=merge.counts,
        )
