"""Executing recorded steps again: the same records, seed and settings give the same bits, or it is
said which record is another one, or that the machine is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

from connectors.arrow import CorruptRecord, checksum, decode_group
from connectors.config import Config
from connectors.kafka.client import Cluster, OffsetGone, Reader
from connectors.kafka.locate import source
from connectors.records import Coordinate, Group, Manifest
from trainer.ages import recorded_ages
from trainer.engine import TrainingEngine
from trainer.execute import Execution, execute, recorded
from trainer.overdue import weights_of
from trainer.packing import Assignment
from trainer.traffic import labels_of

OnOther = Callable[[int, Coordinate, int], None]
"""Hears of a record that is not the one that was trained: the step, what was, its checksum now."""


class ReexecutionDiffers(RuntimeError):
    """A step executed again gave other weights than the log says, or cannot be executed. `record`
    names the first record that is not the one that was trained, None when the records are the same
    and the machine is not."""

    def __init__(self, message: str, step: int, record: Coordinate | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.record = record


def reexecute(
    config: Config,
    cluster: Cluster,
    engine: TrainingEngine,
    manifests: Iterable[Manifest],
    rebuilt: Mapping[int, str],
    *,
    elsewhere: bool = False,
    on_other: OnOther | None = None,
) -> Iterator[tuple[Manifest, Execution]]:
    """Executes each manifest on `engine`, yielding it once its digest is the log's.
    ReexecutionDiffers at the first that is not.

    `rebuilt` is the chain's: before such a step the weights may be those of its rebuild, which no
    manifest names; at it they must come to the rebuild's digest. With `elsewhere`, other weights
    are no difference once an environment differed from its manifest's: the caller compares the
    last digest. `on_other` as for `read_groups`."""
    topic = source(config, cluster).topic("trajectories")
    environment = engine.environment()
    away: ReexecutionDiffers | None = None  # since when the weights are not the log's
    foreign = False  # because they were made in another environment
    with closing(Reader(cluster, topic, {})) as reader:
        for manifest in manifests:
            groups = read_groups(reader, manifest, on_other)
            trainer = recorded(config.trainer, manifest)
            done = execute(
                engine,
                groups,
                trainer,
                manifest.seed,
                records=manifest.records,
                assignment=assigned(manifest, engine.num_shares),
                ages=recorded_ages(manifest.settings),
                weights=weights_of(manifest.settings),
                labels=labels_of(manifest.settings),
            )
            digest = engine.digest()
            if digest == rebuilt.get(manifest.step, manifest.digest):
                away = None
            elif away is None:
                away = _differs(manifest, digest, environment)
                foreign = digest == manifest.digest or manifest.environment != environment
            if away is not None and digest != manifest.digest:
                to_come = any(step > manifest.step for step in rebuilt)
                if not to_come and not (elsewhere and foreign):
                    raise away
            yield manifest, done


def assigned(manifest: Manifest, num_shares: int) -> Assignment | None:
    """Its micro-batches and their ranks; None where there are not so many ranks: then they are cut
    anew, which gives other bits."""
    ranks = manifest.ranks or (0,) * len(manifest.micro_batches)
    if max(ranks, default=0) >= num_shares:
        return None
    return Assignment(micro_batches=manifest.micro_batches, ranks=ranks)


def _differs(manifest: Manifest, digest: str, now: Mapping[str, Any]) -> ReexecutionDiffers:
    return ReexecutionDiffers(
        f"step {manifest.step} executed again gives the digest {digest}; the log says "
        f"{manifest.digest}{_difference(manifest, now)}",
        manifest.step,
    )


def read_groups(reader: Reader, manifest: Manifest, on_other: OnOther | None = None) -> list[Group]:
    """The groups a manifest trained, in its order. ReexecutionDiffers naming the first record that
    is gone or is not the one that was trained; with `on_other`, one that is another group now is
    told to it and taken as it is."""
    groups = []
    for record in manifest.records:
        where = f"trajectories/{record.partition}/{record.offset} ({record.group_id})"
        try:
            data = reader.read_at(record.partition, record.offset).value
            if on_other is not None and (crc := checksum(data)) != record.crc:
                groups.append(decode_group(data))
                on_other(manifest.step, record, crc)
            else:
                groups.append(decode_group(data, record.crc))
        except (OffsetGone, CorruptRecord) as error:
            raise ReexecutionDiffers(
                f"step {manifest.step} cannot be executed again: {where}: {error}",
                manifest.step,
                record,
            ) from error
    return groups


def _difference(manifest: Manifest, now: Mapping[str, Any]) -> str:
    differ = [
        f"{key} {then} then, {now.get(key)} now"
        for key, then in manifest.environment.items()
        if now.get(key) != then
    ]
    return f" (the environment differs: {'; '.join(differ)})" if differ else ""
