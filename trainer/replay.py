"""Replay: any stretch of training whose checkpoint and log are kept, executed again in this
process.

checkpoint at or before the first step ──▶ fresh engine ──▶ each manifest ──▶ digests compared

A record that is another one now than was trained is named, and replay goes on with it as it is: so
it finds the first step that comes out differently. Steps that a rollback gave up are not on the
chain. Where the chain goes on from the weights of a `rebuild`, so does replay, from its checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from connectors.config import Config
from connectors.kafka.client import Cluster
from connectors.records import Coordinate, Manifest
from connectors.run_dir import RunDir
from trainer import gang
from trainer.checkpoint import CheckpointStore, run_store
from trainer.checkpoint_meta import kept_on_chain
from trainer.engine import TrainingEngine
from trainer.recovery import load_newest
from trainer.reexecute import ReexecutionDiffers, reexecute
from trainer.step_log import Chain, StepLog


class NothingToReplay(ValueError):
    """The run has no such steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherRecord:
    """`trained` in `step`; its checksum is `crc` now."""

    step: int
    trained: Coordinate
    crc: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """`steps` compared, from `first` to `last`. `differs`: the first step that comes out otherwise
    or cannot be executed. `others`: records up to there that are not those that were trained."""

    first: int
    last: int
    steps: int
    differs: ReexecutionDiffers | None = None
    others: Sequence[OtherRecord] = field(default=())

    @property
    def equal(self) -> bool:
        return self.differs is None and not self.others

    @property
    def first_difference(self) -> dict[str, Any] | None:
        """`step`: the first whose digest differs, None if none does; `record`: the first that is
        not the one that was trained, as a coordinate, None if all are. Of that record also the
        group, the step it was `trained_in` and the checksums, `crc` None where it cannot be read.
        """
        if self.equal:
            return None
        step = None if self.differs is None else self.differs.step
        found: dict[str, Any] = {"step": step, "record": None}
        if self.others:
            return found | _described(self.others[0].trained, self.others[0])
        if self.differs is not None and self.differs.record is not None:
            return found | _described(self.differs.record, None) | {"trained_in": step}
        return found


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
    NothingToReplay when the log holds no such steps, or nothing leads to them."""
    with closing(StepLog(cluster)) as steps:
        chain = steps.chain()
    if not chain.manifests:
        raise NothingToReplay("the run has trained no step yet")
    store = run_store(config, run_dir)
    first, until = _asked(chain, store, last, first, until)
    differs: ReexecutionDiffers | None = None
    others: list[OtherRecord] = []
    with gang.engine(config, cluster, run_dir, role="replay") as engine:
        meta = load_newest(store, engine, chain, at_most=first - 1)
        start = meta.step if meta else 0
        if chain.manifest(start + 1) is None:
            raise NothingToReplay(
                f"no checkpoint at or before step {first - 1} whose later manifests are in the log"
            )
        try:
            for manifests in _stretches(chain, start, until):
                _start_from_rebuild(chain, store, engine, manifests[0].step - 1)
                again = reexecute(
                    config, cluster, engine, manifests, chain.rebuilt,
                    on_other=lambda step, trained, crc: others.append(
                        OtherRecord(step=step, trained=trained, crc=crc)
                    ),
                )  # fmt: skip
                deque(again, maxlen=0)
        except ReexecutionDiffers as error:
            differs = error
        except (ValueError, LookupError) as error:
            if not others:
                raise
            step, trained = others[-1].step, others[-1].trained
            differs = ReexecutionDiffers(
                f"step {step} cannot be executed with what its records are now: {error}",
                step,
                trained,
            )
    return Replay(
        first=first, last=until, steps=until - first + 1, differs=differs, others=tuple(others)
    )


def difference_lines(done: Replay) -> list[str]:
    """What differs, for reading; empty when all is equal."""
    lines = [
        f"trajectories/{other.trained.partition}/{other.trained.offset} ({other.trained.group_id}) "
        f"had the checksum {other.trained.crc:08x} when step {other.step} trained it, now it has "
        f"{other.crc:08x}"
        for other in done.others
    ]
    return lines if done.differs is None else [*lines, str(done.differs)]


def _asked(
    chain: Chain, store: CheckpointStore, last: int | None, first: int | None, until: int | None
) -> tuple[int, int]:
    """The first and the last step that are meant."""
    oldest, newest = chain.manifests[0].step, chain.step
    if oldest > 1 and (kept := kept_on_chain(store, chain)):
        oldest = max(oldest, kept[0].step + 1)  # nothing leads to earlier steps of a trimmed log
    until = newest if until is None else until
    if first is None:
        first = oldest if last is None else max(oldest, until - last + 1)
    for step in (first, until):
        if not oldest <= step <= newest:
            raise NothingToReplay(
                f"no step {step} can be replayed: the log leads to steps {oldest} to {newest}"
            )
    if first > until:
        raise NothingToReplay(f"step {first} comes after step {until}: there is none between them")
    return first, until


def _stretches(chain: Chain, start: int, until: int) -> Iterator[list[Manifest]]:
    """The manifests after `start`, cut after each step that was rebuilt."""
    stretch: list[Manifest] = []
    for manifest in chain.manifests:
        if start < manifest.step <= until:
            stretch.append(manifest)
            if manifest.step in chain.rebuilt:
                yield stretch
                stretch = []
    if stretch:
        yield stretch


def _start_from_rebuild(
    chain: Chain, store: CheckpointStore, engine: TrainingEngine, step: int
) -> None:
    """Loads the checkpoint of a rebuild that left other weights after `step` than are here."""
    if step not in chain.rebuilt or engine.digest() == chain.rebuilt[step]:
        return
    meta = load_newest(store, engine, chain, at_most=step)
    if meta is None or meta.step != step:
        raise NothingToReplay(
            f"the steps up to {step} come out as they did; step {step + 1} went on from a rebuild, "
            f"made elsewhere, whose checkpoint of step {step} is not kept (replay --to {step}, or "
            "--from a later checkpoint on)"
        )


def _described(record: Coordinate, now: OtherRecord | None) -> dict[str, Any]:
    return {
        "record": f"trajectories/{record.partition}/{record.offset}",
        "group_id": record.group_id,
        "trained_in": None if now is None else now.step,
        "crc_trained": f"{record.crc:08x}",
        "crc": None if now is None else f"{now.crc:08x}",
    }
