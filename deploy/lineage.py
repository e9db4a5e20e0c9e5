"""`rollback` and `fork`: a run goes on from an earlier step, without what came after it.

    the chain, checkpoints, the log's starts ──▶ is there a way back to step N? else: to which
    --exclude ──▶ group ids        --set ──▶ RUN/config.toml, as a resumed run would
    one forking Begin ──▶ `steps` and `policy`, read back; RUN/stall.txt goes

It needs nobody's help: a trainer at work is fenced by the Begin, started again by its supervisor
and recovers into the new incarnation, as the trainer of a stopped run does when it is resumed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Final

from connectors.arrow import CorruptRecord, decode_group
from connectors.config import Config, ConfigError
from connectors.kafka.client import Cluster, OffsetGone, Reader
from connectors.kafka.tail import PolicyTail
from connectors.records import Fork, Manifest, Version, parse_group_id
from connectors.run_dir import RunDir
from deploy import run_folder
from deploy.errors import FAILED, RunFailed
from trainer import stall
from trainer.checkpoint import CheckpointStore, CorruptCheckpoint, run_store
from trainer.checkpoint_meta import kept_on_chain
from trainer.step_log import Chain, StepLog
from trainer.traffic import is_traffic, topics_of

_STEPS: Final = re.compile(r"steps:(\d+)(?:-(\d+))?")
_OFFSETS: Final = re.compile(r"(\d+)/(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """version   the run goes on from
    excluded  groups that will not be trained
    kept      groups that were to be excluded, but are in the weights of `version`
    given_up  steps
    changes   'key: old -> new' of the configuration

    Nothing was written where nothing is given up, excluded and changed.
    """

    version: Version
    excluded: tuple[str, ...]
    kept: tuple[str, ...]
    given_up: tuple[int, ...]
    changes: tuple[str, ...]

    @property
    def is_nothing(self) -> bool:
        return not (self.given_up or self.excluded or self.changes)


def fork_run(
    config: Config,
    run_dir: RunDir,
    cluster: Cluster,
    step: int,
    *,
    exclude: Sequence[str] = (),
    changed: Config | None = None,
) -> Forked:
    """Takes the run back to `step`. RunFailed when no way leads there, Fenced when another fork or
    rebuild came in between; ConfigError for an `exclude` that names nothing, or a `changed`
    configuration that the log forbids."""
    with closing(StepLog(cluster)) as steps:
        store = run_store(config, run_dir)
        chain = steps.chain()
        start = _way_back(chain, store, cluster, step)
        digest = chain.digest_at(step)
        if digest is None:
            raise RunFailed(f"the log does not say which weights step {step} left", FAILED)
        limits = _limits(cluster) if exclude else ()
        named = dict.fromkeys(g for spec in exclude for g in _groups(spec, chain, cluster, limits))
        trained = {r.group_id for m in chain.manifests if m.step <= step for r in m.records}
        excluded = tuple(group_id for group_id in named if group_id not in trained)
        if exclude and not excluded:
            raise ConfigError(
                f"--exclude: all {len(named)} groups were trained at or before step {step}, whose "
                "weights hold them: fork at an earlier step"
            )
        was, is_here = len(chain.given_up), step == chain.step
        fork = Fork(parent=chain.incarnation, number=step, reason="rollback")
        with _taken_over(changed, run_dir) as changes:
            if is_here and not excluded and not changes:
                return Forked(version=chain.version, excluded=(), kept=(), given_up=(), changes=())
            # A trainer at work could retire the checkpoint just found; one that is fenced does not.
            steps.begin(start)
            start = _way_back(steps.chain(), store, cluster, step)
            steps.begin(start, fork, digest, excluded)
            stall.keep(run_dir, None)  # from here the run can go on
        chain = steps.chain()
    return Forked(
        version=chain.version,
        excluded=excluded,
        kept=tuple(group_id for group_id in named if group_id in trained),
        given_up=tuple(manifest.step for manifest in chain.given_up[was:]),
        changes=changes,
    )


@contextmanager
def _taken_over(changed: Config | None, run_dir: RunDir) -> Iterator[tuple[str, ...]]:
    """The changed settings are in the run's folder before a trainer can start from the fork, and
    out of it again if there is no fork (killed in between, the next `run` says what it changes)."""
    if changed is None:
        yield ()
        return
    before = run_dir.config_file.read_bytes()
    changes = run_folder.retake(changed, run_dir)
    try:
        yield changes
    except BaseException:
        run_folder.write_config(run_dir, before)
        raise


# ------------------------------------------------------------------------------------ the way back
def _way_back(chain: Chain, store: CheckpointStore, cluster: Cluster, step: int) -> int:
    """The step of the checkpoint (0: the initial model) from which `step` is executed again."""
    if not chain.manifests:
        raise RunFailed("the run has trained no step yet: there is none to go back to", FAILED)
    starts = [kept.step for kept in kept_on_chain(store, chain)]
    if chain.manifests[0].step == 1:
        starts.insert(0, 0)
    with closing(Reader(cluster, cluster.topic("trajectories"), {})) as reader:
        for start in sorted((s for s in starts if s <= step), reverse=True):
            whole = step <= chain.step and _broken(chain, reader, start, step) is None
            if whole and (start == 0 or _is_intact(store, start)):
                return start
        reach = []
        for start in starts:
            broken = _broken(chain, reader, start, chain.step)
            reach.append((start, chain.step if broken is None else broken.step - 1))
    raise RunFailed(
        f"no way leads back to step {step}: it takes a whole checkpoint at or before it and every "
        f"record that was trained between the two. Possible: {_ranges(reach) or 'none'}",
        FAILED,
    )


def _is_intact(store: CheckpointStore, step: int) -> bool:
    try:
        store.read(step)
    except CorruptCheckpoint:
        return False
    return True


def _broken(chain: Chain, reader: Reader, start: int, step: int) -> Manifest | None:
    """The first step after `start` up to `step` that cannot be executed again."""
    for number in range(start + 1, step + 1):
        manifest = chain.manifest(number)
        if manifest is None:  # never inside a chain: its numbers run on
            raise RunFailed(f"step {number} is not in the log", FAILED)
        for record in manifest.records:
            try:
                decode_group(reader.read_at(record.partition, record.offset).value, record.crc)
            except (OffsetGone, CorruptRecord):
                return manifest
    return None


def _ranges(reach: Sequence[tuple[int, int]]) -> str:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(reach):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in merged)


# ------------------------------------------------------------------------------------ --exclude
def _groups(spec: str, chain: Chain, cluster: Cluster, limits: Sequence[int]) -> Iterator[str]:
    """The ids of the groups that one `--exclude` names."""
    if match := _STEPS.fullmatch(spec):
        first, last = int(match[1]), int(match[2] or match[1])
        known = {m.step: m for m in (*chain.given_up, *chain.manifests)}  # the newest of a step
        manifests = [known[s] for s in range(first, last + 1) if s in known]
        if not manifests or len(manifests) != last - first + 1:
            raise ConfigError(f"--exclude {spec}: the log holds steps {min(known)} to {max(known)}")
        yield from (r.group_id for m in manifests for r in m.records)
    elif match := _OFFSETS.fullmatch(spec):
        first, last = int(match[2]), int(match[3] or match[2])
        yield from _written(spec, cluster, int(match[1]), first, last)
    else:
        yield _granted(spec, cluster, limits)


def _written(spec: str, cluster: Cluster, partition: int, first: int, last: int) -> Iterator[str]:
    topic = cluster.topic("trajectories")
    with closing(Reader(cluster, topic, {partition: first})) as reader:
        start, end = reader.starts()[partition], reader.ends()[partition]
        if not start <= first <= last < end:
            raise ConfigError(
                f"--exclude {spec}: {topic}/{partition} holds the offsets {start} to {end - 1}"
            )
        for record in reader.read_to({partition: last + 1}):
            if record.offset <= last:
                yield (record.key or b"").decode(errors="replace")


def _granted(spec: str, cluster: Cluster, limits: Sequence[int]) -> str:
    if is_traffic(spec, topics_of(cluster)):
        return spec  # nobody grants it: it may come yet
    try:
        origin = parse_group_id(spec)
    except ValueError:
        raise ConfigError(
            f"--exclude {spec}: is none of steps:A-B, PARTITION/FROM-TO (offsets of trajectories) "
            f"and a group's id ({cluster.topic('prompts')}/PARTITION/OFFSET)"
        ) from None
    if origin.topic != cluster.topic("prompts") or not (
        0 <= origin.partition < len(limits) and 0 <= origin.offset < limits[origin.partition]
    ):
        raise ConfigError(f"--exclude {spec}: no such group was granted")
    return spec


def _limits(cluster: Cluster) -> tuple[int, ...]:
    """Below which prompts are granted, by partition."""
    with closing(PolicyTail(cluster)) as tail:
        tail.catch_up()
    return tail.latest.limits if tail.latest else ()
