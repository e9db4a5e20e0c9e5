"""The one file that imports kafka-python's client: producer, reader and topic administration.

Every client here rides out a broker restart: it retries until `unavailable_s` has passed and then raises
`BrokerUnavailable`. A reader never skips: an offset that retention removed raises `OffsetGone`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


class KafkaFailure(RuntimeError):
    """Root of this module's errors."""


class BrokerUnavailable(KafkaFailure):
    """No broker answered for `unavailable_s` seconds."""


class OffsetGone(KafkaFailure):
    """The offset is below the partition's start (retention passed it) or beyond its end."""


class RecordTooLarge(KafkaFailure):
    """Larger than the topic or the client allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """How to reach the log. `namespace` prefixes each topic: topic("prompts") = "headwater.prompts"."""

    bootstrap_servers: str
    namespace: str = "headwater."
    max_message_bytes: int = 64 << 20
    security: Mapping[str, str] = field(default_factory=dict)  # kafka-python's security_* / sasl_* / ssl_*
    unavailable_s: float = 60.0

    def topic(self, name: str) -> str:
        return self.namespace + name


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes
    headers: Mapping[str, str]
    timestamp_ms: int


class Producer:
    """Idempotent, acks=all. `send` returns at once; `flush` raises the first delivery error and returns
    the offsets of everything sent since the last flush, in order."""

    def __init__(self, cluster: Cluster, *, compression: str | None = "zstd") -> None: ...

    def send(
        self,
        topic: str,
        partition: int,
        value: bytes,
        *,
        key: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None: ...

    def flush(self) -> list[int]: ...

    def append(self, topic: str, partition: int, value: bytes, *, key: bytes | None = None,
               headers: Mapping[str, str] | None = None) -> int:
        """send + flush of one record: its offset once it is acknowledged."""

    def close(self) -> None: ...


class Reader:
    """Reads some partitions of one topic from given offsets, without a consumer group.

    `poll` returns what is there (possibly nothing) within `timeout_s`, at most `max_records`, in offset
    order a partition. `positions` are the next offsets. `seek` moves one partition. `read_at` returns the
    record at exactly that offset, leaving positions unchanged (OffsetGone if there is none).
    `ends`/`starts` are the log end (next offset to be written) and start offsets, asked from the broker.
    """

    def __init__(self, cluster: Cluster, topic: str, offsets: Mapping[int, int]) -> None: ...

    def poll(self, timeout_s: float = 0.0, max_records: int = 500) -> list[Record]: ...

    def read_at(self, partition: int, offset: int) -> Record: ...

    def seek(self, partition: int, offset: int) -> None: ...

    def positions(self) -> dict[int, int]: ...

    def ends(self) -> dict[int, int]: ...

    def starts(self) -> dict[int, int]: ...

    def close(self) -> None: ...


def ensure_topics(cluster: Cluster, partitions: Mapping[str, int]) -> None:
    """Creates the topics that are missing (names without namespace); KafkaFailure if one exists with
    another partition count."""


def partition_counts(cluster: Cluster, topics: Sequence[str] | None = None) -> dict[str, int]:
    """Partition count of each existing topic of the namespace (names without namespace)."""


def read_all(cluster: Cluster, topic: str, partitions: Iterable[int]) -> list[Record]:
    """Everything in the partitions now, up to the end offsets at the call; for tools and audits."""
