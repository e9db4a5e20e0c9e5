"""The `policy` topic as a fold: what the trainer announced, with fenced trainers left out.

A `Begin` raises the epoch; from there on, by position, announcements of lower epochs are void.
Every stage that obeys grants reads `policy` through this, so all of them agree on which trainer
speaks."""

from __future__ import annotations

from collections.abc import Sequence

from connectors.kafka.client import Cluster, Reader, Record
from connectors.kafka.parsed import parsed
from connectors.records import Announcement, PolicyRecord


class PolicyFold:
    """What follows from the records of `policy` from `offset` on, where `epoch` was the highest of
    any `Begin` before it (-1: none).

    epoch     the highest epoch of any `Begin` seen
    latest    the last announcement that counts, None before the first one
    position  the next offset of `policy` to be read
    """

    def __init__(self, *, offset: int = 0, epoch: int = -1) -> None:
        self.epoch = epoch
        self.latest: Announcement | None = None
        self.position = offset

    def take_in(self, records: Sequence[Record]) -> list[tuple[int, Announcement]]:
        """The announcements that count among the next `records`, with their offsets. Foreign
        records are passed over (`parsed`)."""
        found: list[tuple[int, Announcement]] = []
        for offset, spoken in parsed(records, PolicyRecord):
            if isinstance(spoken, Announcement):
                if spoken.epoch >= self.epoch:
                    self.latest = spoken
                    found.append((offset, spoken))
            elif spoken.epoch is not None:
                self.epoch = max(self.epoch, spoken.epoch)
        if records:
            self.position = records[-1].offset + 1
        return found


class PolicyTail(PolicyFold):
    """The fold over a reader of its own."""

    def __init__(self, cluster: Cluster, *, offset: int = 0, epoch: int = -1) -> None:
        super().__init__(offset=offset, epoch=epoch)
        self._reader = Reader(cluster, cluster.topic("policy"), {0: offset})

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Announcement]]:
        """What was announced since the last call; empty at once when there is nothing new."""
        return self.take_in(self._reader.poll(timeout_s))

    def catch_up(self) -> list[tuple[int, Announcement]]:
        """Polls until everything before the call is read: `latest` is at least what held then."""
        found: list[tuple[int, Announcement]] = []
        end = self.end()
        while self.position < end:
            found += self.poll(0.2)
        return found

    def end(self) -> int:
        """The end offset of `policy` now."""
        return self._reader.ends()[0]

    def close(self) -> None:
        self._reader.close()
