"""What a checkpoint holds beside the engine's files; without the libraries that training takes."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from connectors.records import Begin, Manifest, Version
from trainer.checkpoint import CheckpointStore, CorruptCheckpoint
from trainer.feed_state import FeedState
from trainer.step_log import Chain


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """`epoch` of the trainer that saved it; `feed` is the ledger after `step`."""

    step: int
    version: Version
    digest: str
    epoch: int
    feed: FeedState

    def counts(self, chain: Chain) -> bool:
        """Whether it is of a step on the chain."""
        return chain.holds(self.step, self.version, self.digest)

    def holds(self, record: Begin | Manifest) -> bool:
        """Whether a record of `steps` came before the checkpoint."""
        epoch = record.epoch or 0
        if isinstance(record, Begin) or epoch != self.epoch:
            return epoch <= self.epoch
        return record.step <= self.step


def kept_on_chain(store: CheckpointStore, chain: Chain) -> list[CheckpointMeta]:
    """Of the checkpoints that a recovery could start from, in step order, as far as sizes tell
    whether they are whole."""
    found = []
    for step in store.steps():
        with suppress(CorruptCheckpoint, msgspec.DecodeError):
            found.append(msgspec.json.decode(store.meta(step), type=CheckpointMeta))
    return [meta for meta in found if meta.counts(chain)]
