"""From a checkpoint and the log to the state the run was in: load the snapshot, open an epoch,
execute again what the log says was trained after it.

    newest whole checkpoint ──▶ engine, FeedState
    Begin in `steps` and `policy` ──▶ epoch: older trainers are fenced
    manifests after the checkpoint ──▶ executed again, each digest compared

The feed folds the same manifests into its ledger itself (`trainer.feed`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec

from connectors.arrow import CorruptRecord, decode_group
from connectors.config import Config
from connectors.kafka.client import Cluster, OffsetGone, Reader
from connectors.records import Coordinate, Group, Manifest, Version
from trainer.checkpoint import CheckpointStore, CorruptCheckpoint
from trainer.engine import TrainingEngine
from trainer.execute import Execution, execute, recorded
from trainer.feed_state import FeedState, fresh
from trainer.step_log import StepLog

log = logging.getLogger(__name__)


class ReexecutionDiffers(RuntimeError):
    """A step executed again gave other weights than the log says. `record` names the first record
    that is not the one that was trained, None when the records are the same and the machine is
    not."""

    def __init__(self, message: str, step: int, record: Coordinate | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.record = record


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds beside the engine's files."""

    step: int
    version: Version
    digest: str
    epoch: int
    feed: FeedState


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """`state` and `manifests` are the feed's; `version` and `digest` what the engine holds now."""

    epoch: int
    step: int
    version: Version
    digest: str
    state: FeedState
    manifests: Sequence[Manifest]


def recover(
    config: Config,
    cluster: Cluster,
    engine: TrainingEngine,
    store: CheckpointStore,
    steps: StepLog,
    on_step: Callable[[Manifest], None] = lambda manifest: None,
) -> Recovered:
    """Opens this trainer's epoch and brings `engine` to the last step on the chain.
    ReexecutionDiffers when a step gives other weights than it did."""
    before = {m.step: m for m in steps.manifests()}
    meta = load_newest(store, engine, before)
    state = meta.feed if meta else _first_state(config, cluster)
    step = meta.step if meta else 0
    epoch = steps.begin(step)
    manifests = steps.manifests(after_step=step)
    if manifests:
        log.info("executing steps %d to %d again", manifests[0].step, manifests[-1].step)
    for manifest, _ in reexecute(config, cluster, engine, manifests):
        on_step(manifest)
    return Recovered(
        epoch=epoch,
        step=manifests[-1].step if manifests else step,
        version=manifests[-1].version if manifests else state.version,
        digest=engine.digest(),
        state=state,
        manifests=manifests,
    )


def load_newest(
    store: CheckpointStore,
    engine: TrainingEngine,
    chain: Mapping[int, Manifest],
    at_most: int | None = None,
) -> CheckpointMeta | None:
    """Loads the newest whole checkpoint whose step is on the chain with the same digest, not after
    step `at_most`; None leaves the engine as it was built (the state before step 1)."""
    for step in reversed(store.steps()):
        if at_most is not None and step > at_most:
            continue
        try:
            folder, data = store.read(step)
        except CorruptCheckpoint as error:
            log.warning("checkpoint passed over: %s", error)
            continue
        meta = msgspec.json.decode(data, type=CheckpointMeta)
        if step not in chain or chain[step].digest != meta.digest:
            log.warning("the checkpoint of step %d is not on the chain: passed over", step)
            continue
        engine.load(folder)
        log.info("loaded the checkpoint of step %d", step)
        return meta
    return None


def reexecute(
    config: Config, cluster: Cluster, engine: TrainingEngine, manifests: Iterable[Manifest]
) -> Iterator[tuple[Manifest, Execution]]:
    """Executes each manifest on `engine`, yielding it once its digest is the log's.
    ReexecutionDiffers at the first that is not."""
    topic = cluster.topic("trajectories")
    with closing(Reader(cluster, topic, {})) as reader:
        for manifest in manifests:
            groups = read_groups(reader, manifest)
            trainer = recorded(config.trainer, manifest)
            done = execute(engine, groups, trainer, manifest.seed, manifest.micro_batches)
            if (digest := engine.digest()) != manifest.digest:
                raise ReexecutionDiffers(
                    f"step {manifest.step} executed again gives the digest {digest}; the log says "
                    f"{manifest.digest}{_difference(manifest, engine.environment())}",
                    manifest.step,
                )
            yield manifest, done


def read_groups(reader: Reader, manifest: Manifest) -> list[Group]:
    """The groups a manifest trained, in its order. ReexecutionDiffers naming the first record that
    is gone or is not the one that was trained."""
    groups = []
    for record in manifest.records:
        where = f"trajectories/{record.partition}/{record.offset} ({record.group_id})"
        try:
            data = reader.read_at(record.partition, record.offset).value
            groups.append(decode_group(data, record.crc))
        except (OffsetGone, CorruptRecord) as error:
            raise ReexecutionDiffers(
                f"step {manifest.step} cannot be executed again: {where}: {error}",
                manifest.step,
                record,
            ) from error
    return groups


def _first_state(config: Config, cluster: Cluster) -> FeedState:
    partitions = config.kafka.partitions
    offsets = dict.fromkeys(range(partitions), 0)
    with closing(Reader(cluster, cluster.topic("prompts"), offsets)) as reader:
        starts = reader.starts()
    return fresh(partitions, starts=[starts[p] for p in range(partitions)])


def _difference(manifest: Manifest, now: Mapping[str, Any]) -> str:
    differ = [
        f"{key} {then} then, {now.get(key)} now"
        for key, then in manifest.environment.items()
        if now.get(key) != then
    ]
    return f" (the environment differs: {'; '.join(differ)})" if differ else ""
