"""A run's log read for the audit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

from connectors.arrow import CorruptRecord, checksum
from connectors.config import Config, ConfigError
from connectors.kafka.client import Cluster, OffsetGone, Reader, Record
from connectors.kafka.parsed import parsed
from connectors.kafka.terminals import UnknownRecord, terminal
from connectors.records import (
    Closed,
    Coordinate,
    Group,
    PolicyRecord,
    Version,
)
from connectors.run_dir import RunDir
from deploy.audit import audit
from deploy.base import (
    StepRecords,
    Unprovable,
    base_of,
    check_partitions,
)
from deploy.findings import Audit, History, Terminal
from deploy.history import CLOCK_SKEW_S, Follower, Place
from trainer.checkpoint_meta import CheckpointMeta
from trainer.staleness import configured_policy, granted_per_step
from trainer.traffic import is_traffic, topics_of

TRIES: Final = 3
"""A trainer at work may trim what is being read; then it is read anew from where it begins now."""


def audit_run(config: Config, run_dir: RunDir, cluster: Cluster) -> Audit:
    """The audit of a run's log, of one at work as of the call. Unprovable when what is left of the
    log proves nothing. ConfigError for a shadow, which grants nothing."""
    if (source := config.trainer.source) is not None:
        raise ConfigError(f"{run_dir.path} is a shadow and grants nothing: audit {source.run}")
    for attempt in range(TRIES):
        try:
            return _audit(config, run_dir, cluster)
        except OffsetGone as error:
            if attempt == TRIES - 1:
                raise Unprovable(f"the log was trimmed while it was read: {error}") from error
    raise AssertionError


def _audit(config: Config, run_dir: RunDir, cluster: Cluster) -> Audit:
    """Ends are taken so that each record's causes are read: a terminal before `policy`, where its
    grant is, and that before `steps`, where its version was made."""
    check_partitions(config, cluster)
    partitions = range(config.kafka.partitions)
    traffic_topics = topics_of(cluster) if config.nearline is not None else ()
    with ExitStack() as opened:
        terminals = _Lanes(cluster, partitions, opened)
        prompts = opened.enter_context(closing(Follower(cluster, "prompts", partitions)))
        policy = _PolicyRecords(cluster)
        judged = policy.end()
        steps = StepRecords.now(cluster)
        policy.stop = policy.end()
        base = base_of(config, run_dir, cluster, steps)
        terminals.begin_at(base)
        prompts.skip()
        found = audit(
            History(
                prompts_topic=cluster.topic("prompts"),
                steps=steps,
                policy=policy,
                terminals={p: terminals.read(p) for p in partitions},
                rollouts=_Rollouts(cluster, partitions),
                strategy=configured_policy(config),
                batch_size=granted_per_step(config),
                group_size=max(task.group_size for task in config.tasks.values()),
                patience_s=patience_s(config),
                policy_end=judged,
                terminal_ends=terminals.ends,
                prompt_starts=prompts.starts,
                prompt_ends=prompts.ends,
                base=base,
                arrived=_arrived(cluster, base),
                traffic_topics=traffic_topics,
                sessions=partial(_sessions, cluster, partitions, traffic_topics),
            )
        )
    found.chain_breaks += [*steps.unreadable.values(), *policy.unreadable.values()]
    return found


class _Lanes:
    """`trajectories`, each partition by itself, so that none is read ahead of the others."""

    def __init__(self, cluster: Cluster, partitions: Sequence[int], opened: ExitStack) -> None:
        self._lanes = {
            p: opened.enter_context(closing(Follower(cluster, "trajectories", [p])))
            for p in partitions
        }
        for lane in self._lanes.values():
            lane.skip()
        self.ends = {p: lane.ends[p] for p, lane in self._lanes.items()}

    def begin_at(self, base: CheckpointMeta | None) -> None:
        for partition, offset in enumerate(base.feed.read if base else ()):
            self._lanes[partition].seek(partition, offset)

    def read(self, partition: int) -> Iterator[Terminal]:
        return map(terminal_of, self._lanes[partition].news())


@dataclass(slots=True)
class _PolicyRecords:
    """`policy` from its start to `stop`."""

    cluster: Cluster
    stop: int = 0
    unreadable: dict[int, str] = field(default_factory=dict)

    def end(self) -> int:
        with closing(Reader(self.cluster, self.cluster.topic("policy"), {0: 0})) as reader:
            return reader.ends()[0]

    def __iter__(self) -> Iterator[tuple[int, PolicyRecord]]:
        with closing(Follower(self.cluster, "policy", [0])) as follower:
            yield from parsed(follower.to({0: self.stop}), PolicyRecord, self.unreadable)


@dataclass(frozen=True, slots=True)
class _Rollouts:
    """Looks for groups in `rollouts`, from the time of their first grant on."""

    cluster: Cluster
    partitions: Sequence[int]

    def __call__(
        self, wanted: Collection[Place], granted_at: float
    ) -> Iterable[tuple[Place, float]]:
        topic = self.cluster.topic("prompts")
        keys = {f"{topic}/{p}/{at}".encode(): (p, at) for p, at in wanted}
        with closing(Follower(self.cluster, "rollouts", self.partitions)) as follower:
            follower.seek_time(granted_at - CLOCK_SKEW_S)
            for record in follower.news():
                if (place := keys.pop(record.key or b"", None)) is not None:
                    yield place, record.timestamp_ms / 1000.0


def _sessions(
    cluster: Cluster, partitions: Sequence[int], names: tuple[str, ...]
) -> Iterator[tuple[str, int, float]]:
    if not names:
        return
    with closing(Follower(cluster, "rollouts", partitions)) as follower:
        for record in follower.news():
            group_id = (record.key or b"").decode(errors="replace")
            if is_traffic(group_id, names):
                yield group_id, record.partition, record.timestamp_ms / 1000.0


def _arrived(cluster: Cluster, base: CheckpointMeta | None) -> list[Terminal]:
    """The terminals of the groups that were ready, or in the queue, at the base, read where they
    lie."""
    feed = base.feed if base else None
    at = [e.coordinate for e in feed.open if e.coordinate is not None] if feed else []
    at += [queued.coordinate for queued in feed.traffic.queue] if feed else []
    with closing(Reader(cluster, cluster.topic("trajectories"), {})) as reader:
        return [_terminal_at(reader, coordinate) for coordinate in at]


def _terminal_at(reader: Reader, at: Coordinate) -> Terminal:
    return terminal_of(reader.read_at(at.partition, at.offset))


def terminal_of(record: Record) -> Terminal:
    """A record of `trajectories`, its group decoded only to find the versions it is trained on."""
    kind: Literal["group", "closed", "corrupt"]
    versions, reason, error = frozenset[Version](), "malformed", ""
    try:
        ended = terminal(record)
    except (CorruptRecord, UnknownRecord) as caught:
        kind, error = "corrupt", str(caught)
    else:
        if isinstance(ended, Closed):
            kind, reason = "closed", ended.reason
        else:
            kind, versions = "group", trained_versions(ended)
    return Terminal(
        group_id=(record.key or b"").decode(errors="replace"),
        partition=record.partition,
        offset=record.offset,
        crc=checksum(record.value),
        kind=kind,
        versions=versions,
        written_at=record.timestamp_ms / 1000.0,
        reason=reason,
        error=error,
    )


def trained_versions(group: Group) -> frozenset[Version]:
    """Those that wrote a token with loss_mask 1."""
    return frozenset(
        segment.version
        for trajectory in group.trajectories
        for segment in trajectory.segments
        if trajectory.loss_mask[segment.start : segment.end].any()
    )


def patience_s(config: Config) -> float:
    """The longest the reward stage works on one group, its retries and their pauses included; twice
    that, for a worker that was killed starts again."""
    longest = max(
        task.reward_timeout_s * (task.reward_retries + 1) + 2.0**task.reward_retries
        for task in config.tasks.values()
    )
    return 2 * longest + 60.0
