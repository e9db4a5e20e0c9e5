"""The `policy` topic as a fold: what the trainer announced, with fenced trainers left out.

A `Begin` raises the epoch; from there on, by position, announcements of lower epochs are void.
Every stage that obeys grants reads `policy` through this, so all of them agree on which trainer
speaks."""

from __future__ import annotations

from connectors.kafka.client import Cluster, Reader
from connectors.records import Announcement, Begin, PolicyRecord, decode_as


class PolicyTail:
    """Starts at `offset`, where `epoch` was the highest of any `Begin` before it (-1: none).

    epoch     the highest epoch of any `Begin` seen
    latest    the last announcement that counts, None before the first one
    position  the next offset of `policy` to be read
    """

    def __init__(self, cluster: Cluster, *, offset: int = 0, epoch: int = -1) -> None:
        self.epoch = epoch
        self.latest: Announcement | None = None
        self.position = offset
        self._reader = Reader(cluster, cluster.topic("policy"), {0: offset})

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Announcement]]:
        """What was announced since the last call, with its offset in `policy`; empty at once when
        there is nothing new. A record that is none of `policy` is a broken invariant:
        msgspec.DecodeError or ValueError."""
        found: list[tuple[int, Announcement]] = []
        for record in self._reader.poll(timeout_s):
            self.position = record.offset + 1
            spoken: PolicyRecord = decode_as(record.value, PolicyRecord)
            if isinstance(spoken, Begin):
                if spoken.epoch is None:
                    raise ValueError(f"policy/{record.offset}: a begin without an epoch")
                self.epoch = max(self.epoch, spoken.epoch)
            elif spoken.epoch >= self.epoch:
                self.latest = spoken
                found.append((record.offset, spoken))
        return found

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
