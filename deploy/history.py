"""A run's past as plain values, folded from its log: what `status`, `audit` and `trace` look at.

Nothing here trusts a process or the trainer's own books; everything comes from records. Pure,
except for `Follower`, which reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from connectors.kafka.client import Cluster, Reader, Record
from connectors.records import Announcement, Origin, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """What was granted: `limits` are the offsets below which each prompt partition is; `first[p]`
    lists (limit, version) of each announcement that raised partition p's limit, in order."""

    limits: list[int] = field(default_factory=list)
    first: list[list[tuple[int, Version]]] = field(default_factory=list)

    def observe(self, announcement: Announcement) -> None:
        for partition, limit in enumerate(announcement.limits):
            if partition == len(self.limits):
                self.limits.append(0)
                self.first.append([])
            if limit > self.limits[partition]:
                self.limits[partition] = limit
                self.first[partition].append((limit, announcement.version))

    @property
    def num_granted(self) -> int:
        return sum(self.limits)

    def __contains__(self, prompt: tuple[int, int]) -> bool:
        partition, offset = prompt
        return partition < len(self.limits) and 0 <= offset < self.limits[partition]

    def __iter__(self) -> Iterator[tuple[int, int, Version]]:
        """(partition, offset, version of its grant) of every granted prompt."""
        for partition, raises in enumerate(self.first):
            start = 0
            for limit, version in raises:
                for offset in range(start, limit):
                    yield partition, offset, version
                start = limit


class Follower:
    """Reads a topic from its start, and what is new at each call."""

    def __init__(self, cluster: Cluster, topic: str, num_partitions: int) -> None:
        """`topic` without namespace. KafkaFailure when it does not exist."""
        self._reader = Reader(
            cluster, cluster.topic(topic), dict.fromkeys(range(num_partitions), 0)
        )
        self.starts: Mapping[int, int] = self._reader.rewind()
        self.ends: Mapping[int, int] = dict(self.starts)

    def news(self) -> Iterator[Record]:
        """Every record up to the end at the call, in offset order a partition."""
        self.ends = self._reader.ends()
        yield from self._reader.read_to(self.ends, 5_000)

    def skip(self) -> None:
        """Only takes note of the ends."""
        self.ends = self._reader.ends()

    def close(self) -> None:
        self._reader.close()


def origin_of(topic: str, partition: int, offset: int) -> str:
    """The group id of a prompt."""
    return str(Origin(topic, partition, offset))
