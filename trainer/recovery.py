"""From a checkpoint and the log to the state the run was in: load the snapshot, open an epoch,
execute again what the log says was trained after it.

    newest whole checkpoint on the chain ──▶ engine, FeedState
    Begin in `steps` and `policy` ──▶ epoch: older trainers are fenced
    manifests after the checkpoint ──▶ executed again, each digest compared
    `policy`, manifests and forks ──▶ folded into the FeedState (`fold`)

Where the environment is another one and gives other bits, the weights it came to are a `rebuild`:
a second Begin opens an incarnation that goes on from them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from connectors.config import Config
from connectors.kafka.client import Cluster, Reader
from connectors.kafka.tail import PolicyTail
from connectors.records import Announcement, Fork, Manifest, Version
from operators.staleness.feasible import infeasible
from operators.staleness.types import StalenessPolicy
from trainer import written_by
from trainer.accounts import LedgerBroken
from trainer.checkpoint import CheckpointStore, CorruptCheckpoint
from trainer.checkpoint_meta import CheckpointMeta, kept_on_chain
from trainer.engine import TrainingEngine
from trainer.feed_state import FeedState, fresh
from trainer.ledger import FeedCore
from trainer.reexecute import ReexecutionDiffers, reexecute
from trainer.refold import recover as fold_ledger
from trainer.staleness import allowance_of, granted_per_step, reserves
from trainer.step_log import Chain, ChainBroken, Fenced, StepLog

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """`state` is the checkpoint's ledger, to be brought up to `chain` (`fold`); `version` and
    `digest` are what the engine holds, after `step`. `rebuilt`: those are weights that no
    checkpoint holds."""

    epoch: int
    step: int
    version: Version
    digest: str
    state: FeedState
    chain: Chain
    rebuilt: bool = False

    @property
    def manifests(self) -> list[Manifest]:
        """Of the steps after `state`."""
        return [m for m in self.chain.manifests if m.step > self.state.version.number]


def recover(
    config: Config,
    cluster: Cluster,
    engine: TrainingEngine,
    store: CheckpointStore,
    steps: StepLog,
    on_step: Callable[[Manifest], None] = lambda manifest: None,
) -> Recovered:
    """Opens this trainer's epoch and brings `engine` to the last step on the chain.
    ReexecutionDiffers when a step gives other weights than it did in an equal environment, or its
    records are not those it trained; ConfigError when the checkpoint is of other ranks."""
    found = _newest(store, steps.chain())
    _check_log(store, steps.chain())
    epoch = steps.begin(found.meta.step if found else 0)
    while found is not None and not found.meta.counts(steps.chain()):  # rolled back meanwhile
        found = _newest(store, steps.chain())
        epoch = steps.begin(found.meta.step if found else 0)
    chain = steps.chain()
    if found is not None:
        found.load(engine)
        log.info("loaded the checkpoint of step %d", found.meta.step)
    start = found.meta.step if found else 0
    _check_start(engine, chain, start)
    _execute_again(config, cluster, engine, chain, start, on_step)
    digest = engine.digest()
    rebuilt = chain.step > start and digest != chain.digest_at(chain.step)
    if rebuilt:
        fork = Fork(parent=chain.incarnation, number=chain.step, reason="rebuild")
        epoch = steps.begin(start, fork, digest)
        chain = steps.chain()
        log.warning(
            "rebuild: here step %d ends at %s; incarnation %d goes on from it",
            chain.step, digest, chain.incarnation,
        )  # fmt: skip
    store.pass_over(set(store.steps()) - {meta.step for meta in kept_on_chain(store, chain)})
    return Recovered(
        epoch=epoch,
        step=chain.step,
        version=chain.version,
        digest=digest,
        state=found.meta.feed if found else _first_state(config, cluster),
        chain=chain,
        rebuilt=rebuilt,
    )


def fold(
    config: Config,
    cluster: Cluster,
    policy: StalenessPolicy[Any],
    recovered: Recovered,
) -> FeedState:
    """The ledger brought up to the log: everything before this trainer's Begin in `policy`, and the
    chain after the checkpoint. An alarm in the log if the result breaks the policy's bound already.
    Fenced when a newer trainer began."""
    epoch = recovered.epoch
    core = FeedCore(
        policy,
        recovered.state,
        prompts_topic=cluster.topic("prompts"),
        batch_size=granted_per_step(config),
        group_size=max_group_size(config),
        allowance=allowance_of(config, cluster),
    )
    announcements: list[tuple[int, Announcement]] = []
    with closing(PolicyTail(cluster, offset=core.policy_offset, epoch=core.epoch)) as tail:
        end = tail.end()
        while tail.epoch < epoch:
            if tail.position >= end:
                raise LedgerBroken(f"policy holds no begin of epoch {epoch}")
            announcements += tail.poll(0.5)
        if tail.epoch > epoch:
            raise Fenced(f"a newer trainer began epoch {tail.epoch}; epoch {epoch} is fenced")
    fold_ledger(core, announcements, recovered.chain)
    bound = policy.bound if core.batch_size and reserves(policy) else None
    if bound is not None and (late := infeasible(core.ledger(), bound)):
        log.error(
            "ALARM: %d of %d open groups will be older than the bound of %s steps when they could "
            "be trained (after a rollback or a lowered bound): they will be dropped as stale",
            len(late), len(core.accounts.open), bound,
        )  # fmt: skip
    return core.snapshot()


def max_group_size(config: Config) -> int:
    """Of all tasks."""
    return max(task.group_size for task in config.tasks.values())


@dataclass(frozen=True, slots=True)
class _Found:
    folder: Path
    meta: CheckpointMeta

    def load(self, engine: TrainingEngine) -> None:
        written_by.check(self.folder, engine.environment(), self.meta.step)
        engine.load(self.folder)


def load_newest(
    store: CheckpointStore, engine: TrainingEngine, chain: Chain, at_most: int | None = None
) -> CheckpointMeta | None:
    """Loads the newest whole checkpoint whose step is on the chain with the same digest, not after
    step `at_most`; None leaves the engine as it was built (the state before step 1)."""
    found = _newest(store, chain, at_most)
    if found is None:
        return None
    found.load(engine)
    return found.meta


def _newest(store: CheckpointStore, chain: Chain, at_most: int | None = None) -> _Found | None:
    for step in reversed(store.steps()):
        if at_most is not None and step > at_most:
            continue
        try:
            meta = msgspec.json.decode(store.meta(step), type=CheckpointMeta)
            if meta.counts(chain):
                return _Found(store.read(step)[0], meta)
            log.warning("the checkpoint of step %d is not on the chain: passed over", step)
        except (CorruptCheckpoint, msgspec.DecodeError) as error:
            log.warning("the checkpoint of step %d is passed over: %s", step, error)
    return None


def _check_log(store: CheckpointStore, chain: Chain) -> None:
    """A log that never held a step has no checkpoints."""
    if not chain.manifests and not chain.given_up and not chain.forks and (saved := store.steps()):
        raise ChainBroken(
            f"`steps` holds no step, but {store.url} the checkpoint of step {saved[-1]}: the log "
            "is not the one it was written with (put the log back; or, for another run, choose "
            "another checkpoint.url)"
        )


def _check_start(engine: TrainingEngine, chain: Chain, start: int) -> None:
    """What is executed again, or trained next, must start from the weights that it was trained
    from."""
    first = chain.manifests[0].step if chain.manifests else chain.step + 1
    if first > start + 1:
        raise ReexecutionDiffers(
            f"no whole checkpoint of step {first - 1} or later is on the chain, and `steps` holds "
            f"none before step {first}: nothing leads to step {chain.step} (put a checkpoint back, "
            "or start another run)",
            first,
        )
    said, here = chain.digest_at(start), engine.digest()
    if said is not None and said != here:
        what = f"the checkpoint of step {start}" if start else "the initial model (model.path)"
        raise ReexecutionDiffers(
            f"{what} has the digest {here}, the run went on from {said}: it is not the run's",
            start + 1,
        )


def _execute_again(
    config: Config,
    cluster: Cluster,
    engine: TrainingEngine,
    chain: Chain,
    start: int,
    on_step: Callable[[Manifest], None],
) -> None:
    manifests = [m for m in chain.manifests if m.step > start]
    if manifests:
        log.info("executing steps %d to %d again", manifests[0].step, manifests[-1].step)
    try:
        again = reexecute(config, cluster, engine, manifests, chain.rebuilt, elsewhere=True)
        for manifest, _ in again:
            on_step(manifest)
    except ReexecutionDiffers as error:
        raise ReexecutionDiffers(
            f"{error}; `headwater rollback RUN --to {error.step - 1}` goes on from before it",
            error.step,
            error.record,
        ) from error


def _first_state(config: Config, cluster: Cluster) -> FeedState:
    partitions = config.kafka.partitions
    offsets = dict.fromkeys(range(partitions), 0)
    with closing(Reader(cluster, cluster.topic("prompts"), offsets)) as reader:
        starts = reader.starts()
    first = fresh(partitions, starts=[starts[p] for p in range(partitions)])
    shadowed = config.trainer.source
    return first if shadowed is None else replace(first, read=tuple(shadowed.starts))
