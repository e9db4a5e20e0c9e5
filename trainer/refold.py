"""The ledger of a checkpoint brought up to the log."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from connectors.records import Announcement, Begin, Manifest
from trainer.ledger import FeedCore
from trainer.step_log import Chain


def recover(
    core: FeedCore, announcements: Iterable[tuple[int, Announcement]], chain: Chain
) -> None:
    """Brings `core`, built from a checkpoint's snapshot, up to the log: `announcements` are those
    of `policy` from the snapshot's offset up to this trainer's `Begin`. A manifest comes after
    every announcement of a version below its own: those granted what it trains. A fork comes after
    every announcement of a lower epoch, whichever order the two topics were written in. What steps
    that a rollback gave up had trained stays open. Terminals are read again afterwards, from the
    snapshot's offsets."""
    core.lineage.update(chain.lineage)
    waiting = deque(chain.after(core.version))
    for offset, announcement in announcements:
        while waiting and _comes_before(waiting[0], announcement):
            _apply(core, waiting.popleft())
        core.apply_announcement(offset, announcement)
    for record in waiting:
        _apply(core, record)


def _comes_before(record: Begin | Manifest, announcement: Announcement) -> bool:
    if isinstance(record, Begin):
        return record.epoch is not None and record.epoch <= announcement.epoch
    return record.version <= announcement.version


def _apply(core: FeedCore, record: Begin | Manifest) -> None:
    if isinstance(record, Begin):
        core.apply_fork(record)
    else:
        core.apply_manifest(record)
