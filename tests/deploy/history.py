"""A small, right history to corrupt: two partitions, two groups a step, bound 1."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from connectors.records import (
    Announcement,
    Begin,
    Coordinate,
    Fork,
    Manifest,
    PolicyRecord,
    StepRecord,
    Version,
)
from deploy.findings import History, Terminal
from deploy.history import Place
from operators.staleness.n_step_off import NStepOff
from trainer.checkpoint_meta import CheckpointMeta

TOPIC = "headwater.prompts"


def group_id(partition: int, offset: int) -> str:
    return f"{TOPIC}/{partition}/{offset}"


def digest(number: int, incarnation: int = 0) -> str:
    return f"{incarnation}:{number:014x}"


def announcement(
    number: int, limits: tuple[int, ...], *, epoch: int = 0, incarnation: int = 0, **more: object
) -> Announcement:
    values = {"digest": digest(number), **more}
    return Announcement(epoch=epoch, version=Version(incarnation, number), limits=limits, **values)  # type: ignore[arg-type]


def group(partition: int, offset: int, *generated_by: int, incarnation: int = 0) -> Terminal:
    """At the same offset of `trajectories` as its prompt's."""
    return Terminal(
        group_id=group_id(partition, offset),
        partition=partition,
        offset=offset,
        crc=1000 * partition + offset,
        kind="group",
        versions=frozenset(Version(incarnation, number) for number in generated_by),
        written_at=float(offset),
    )


def closed(partition: int, offset: int) -> Terminal:
    return replace(group(partition, offset), kind="closed")


def coordinate(terminal: Terminal) -> Coordinate:
    return Coordinate(terminal.partition, terminal.offset, terminal.crc, terminal.group_id)


def manifest(
    step: int, *records: Terminal, epoch: int = 0, incarnation: int = 0, **more: object
) -> Manifest:
    values = {
        "digest_before": digest(step - 1),
        "digest": digest(step),
        "version": Version(incarnation, step),
        **more,
    }
    return Manifest(
        step=step,
        epoch=epoch,
        records=tuple(map(coordinate, records)),
        micro_batches=(),
        seed=0,
        **values,  # type: ignore[arg-type]
    )


def begin(resumed_step: int = 0, epoch: int | None = None, **more: object) -> Begin:
    return Begin(epoch=epoch, writer="test", resumed_step=resumed_step, started_at=0.0, **more)  # type: ignore[arg-type]


def rollback(number: int, *, parent: int = 0, epoch: int | None = None, **more: object) -> Begin:
    fork = Fork(parent=parent, number=number, reason="rollback")
    values = {"digest": digest(number), **more}
    return begin(number, epoch, incarnation=parent + 1, fork=fork, **values)


@dataclass
class Log:
    """Steps 1 and 2 trained two groups each; one group was closed; two are open, one of them
    scored. `rollouts`: groups that were generated, and when."""

    policy: list[PolicyRecord] = field(
        default_factory=lambda: [
            begin(epoch=0),
            announcement(0, (2, 2)),
            announcement(1, (3, 3), closed=(group_id(0, 1),)),
            announcement(2, (4, 3)),
        ]
    )
    terminals: list[Terminal] = field(
        default_factory=lambda: [
            group(0, 0, 0),
            group(1, 0, 0),
            closed(0, 1),
            group(1, 1, 0),
            group(0, 2, 1),
            group(1, 2, 1),
        ]
    )
    steps: list[tuple[int, StepRecord]] = field(
        default_factory=lambda: [
            (0, begin()),
            (1, manifest(1, group(0, 0, 0), group(1, 0, 0))),
            (2, manifest(2, group(1, 1, 0), group(0, 2, 1))),
        ]
    )
    rollouts: dict[Place, float] = field(default_factory=dict)
    strategy: NStepOff = field(default_factory=lambda: NStepOff(1))
    prompt_starts: dict[int, int] = field(default_factory=dict)
    prompt_ends: dict[int, int] = field(default_factory=dict)
    base: CheckpointMeta | None = None
    arrived: list[Terminal] = field(default_factory=list)

    def history(self) -> History:
        by_partition = {
            p: sorted((t for t in self.terminals if t.partition == p), key=lambda t: t.offset)
            for p in (0, 1)
        }
        return History(
            prompts_topic=TOPIC,
            policy=list(enumerate(self.policy)),
            steps=self.steps,
            terminals=by_partition,
            rollouts=self._look,
            strategy=self.strategy,
            batch_size=2,
            group_size=1,
            patience_s=100.0,
            prompt_starts=self.prompt_starts,
            prompt_ends=self.prompt_ends,
            base=self.base,
            arrived=self.arrived,
        )

    def _look(self, wanted: Collection[Place], since: float) -> Iterable[tuple[Place, float]]:
        return [(place, at) for place, at in self.rollouts.items() if place in wanted]


def rolled_back() -> Log:
    """The example, rolled back to step 1: step 2 is given up and its groups are trained again, by
    another trainer, as step 2 of incarnation 1."""
    log = Log()
    log.steps += [
        (3, rollback(1)),
        (4, begin(1, incarnation=1)),
        (5, manifest(2, group(1, 1, 0), group(0, 2, 1), epoch=4, incarnation=1, digest="new")),
    ]
    log.policy += [
        rollback(1, epoch=3),
        begin(1, epoch=4, incarnation=1),
        announcement(1, (4, 3), epoch=4, incarnation=1),
        announcement(2, (4, 4), epoch=4, incarnation=1, digest="new"),
    ]
    return log
