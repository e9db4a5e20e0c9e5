"""A small, right history to corrupt: two partitions, four groups a step, bound 1."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from connectors.records import Announcement, Begin, Coordinate, Manifest, StepRecord, Version
from deploy.audit import History, Terminal

TOPIC = "headwater.prompts"


def group_id(partition: int, offset: int) -> str:
    return f"{TOPIC}/{partition}/{offset}"


def announcement(number: int, limits: tuple[int, ...], **more: object) -> Announcement:
    return Announcement(
        epoch=0, version=Version(0, number), digest=f"{number:016x}", limits=limits, **more
    )  # type: ignore[arg-type]


def group(partition: int, offset: int, generated_by: int) -> Terminal:
    return Terminal(
        group_id=group_id(partition, offset),
        partition=partition,
        offset=offset,
        crc=1000 * partition + offset,
        kind="group",
        oldest=Version(0, generated_by),
    )


def closed(partition: int, offset: int) -> Terminal:
    return replace(group(partition, offset, 0), kind="closed", oldest=None)


def manifest(step: int, *records: Terminal, epoch: int = 0, **more: object) -> Manifest:
    values = {
        "digest_before": f"{step - 1:016x}",
        "digest": f"{step:016x}",
        "version": Version(0, step),
        **more,
    }
    return Manifest(
        step=step,
        epoch=epoch,
        records=tuple(Coordinate(t.partition, t.offset, t.crc, t.group_id) for t in records),
        micro_batches=(),
        seed=0,
        **values,  # type: ignore[arg-type]
    )


def begin(resumed_step: int = 0) -> Begin:
    return Begin(epoch=None, writer="test", resumed_step=resumed_step, started_at=0.0)


@dataclass
class Log:
    """Steps 1 and 2 trained two groups each; one group was closed; two are open, one of them
    scored."""

    announcements: list[Announcement] = field(
        default_factory=lambda: [
            announcement(0, (2, 2)),
            announcement(1, (3, 3)),
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
    bound: int | None = 1

    def history(self) -> History:
        return History(
            prompts_topic=TOPIC,
            announcements=self.announcements,
            steps=self.steps,
            terminals=self.terminals,
            bound=self.bound,
        )
