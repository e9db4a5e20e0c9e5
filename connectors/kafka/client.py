"""Producer and reader. With `topics`, the only file that imports kafka-python's client.

Every client here rides out a broker restart: it retries until `unavailable_s` has passed and
then raises `BrokerUnavailable`. A reader never skips: an offset that retention removed raises
`OffsetGone`. No consumer groups: partitions are assigned, and offsets live in the reader's own
checkpoint. None of the classes is thread-safe; give each thread its own.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import kafka
from kafka import TopicPartition
from kafka import errors as kafka_errors

from connectors.config import ConfigError
from connectors.kafka import connections
from connectors.kafka.knock import Away, Refuses, knock

T = TypeVar("T")

# It logs every attempt to reach a broker that is away, tens of lines a second; what an outage means
# is said once, by BrokerUnavailable.
logging.getLogger("kafka").setLevel(logging.CRITICAL)

FETCH_BYTES = 8 << 20
"""Of one partition in one answer. A larger record still comes, alone (KIP-74)."""
FETCH_WAIT_MS = 500
"""Long poll. A seek waits for the poll under way, so this is also what a seek may cost."""
FRAME_SLACK_BYTES = 1 << 20
"""Headers of a response around its record batches."""
ANSWER_S = 3.0
"""For a broker that is up to say whether it serves us; a refusal takes it half a second."""
POINT_READ_TRIES = 5
"""Empty answers after which a point read asks whether its offset is in the log at all."""


class KafkaFailure(RuntimeError):
    """Root of this module's errors."""


class BrokerUnavailable(KafkaFailure):
    """No broker answered for `unavailable_s` seconds."""


class OffsetGone(KafkaFailure):
    """The offset is below the partition's start (retention passed it) or beyond its end."""


class NoRecord(OffsetGone):
    """The offset lies in the log, which holds no record there (control record, compacted one)."""


class RecordTooLarge(KafkaFailure):
    """Larger than the topic or the client allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """How to reach the log. `namespace` prefixes each topic: topic("prompts") is
    "headwater.prompts". `security` is as `connectors.kafka.security` gives it."""

    bootstrap_servers: str
    namespace: str = "headwater."
    max_message_bytes: int = 64 << 20
    security: Mapping[str, Any] = field(default_factory=dict, repr=False)  # has the password
    unavailable_s: float = 60.0

    def topic(self, name: str) -> str:
        return self.namespace + name

    @property
    def largest_record_bytes(self) -> int:
        """Of key, value, headers and framing. The topics' limit is on compressed batches, and what
        does not compress grows a little (zstd: 3 bytes in 128 KiB)."""
        return self.max_message_bytes - (self.max_message_bytes >> 12) - 256


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
    """Idempotent, acks=all. `send` returns at once; `flush` raises the first delivery error and
    returns the offsets of everything sent since the last flush, in order.

    After an error from `flush` the producer is finished: nothing is in flight, but what failed
    may still have been written when only the answer was lost. Read the log back, then take a new
    one, as every role does that ends and is started again."""

    def __init__(self, cluster: Cluster, *, compression: str | None = "zstd") -> None:
        self._cluster = cluster
        self._pending: list[Any] = []
        self._siblings = [self]
        request_ms = _request_timeout_ms(cluster)
        self._producer: Any = connected(
            cluster,
            lambda: kafka.KafkaProducer(
                **connection(cluster),
                acks="all",
                enable_idempotence=True,
                compression_type=compression,
                batch_size=min(256 << 10, cluster.max_message_bytes // 2),
                linger_ms=0,
                max_request_size=cluster.largest_record_bytes,
                delivery_timeout_ms=max(int(cluster.unavailable_s * 1000), request_ms + 1),
                max_block_ms=max(int(cluster.unavailable_s * 1000), 1),
                allow_auto_create_topics=False,
                metrics_enabled=False,  # nobody reads them, and they are a third of a send
            ),
        )

    def send(
        self,
        topic: str,
        partition: int,
        value: bytes,
        *,
        key: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`topic` is the full name. RecordTooLarge at once, and nothing of it is sent."""
        pairs = [(name, text.encode()) for name, text in (headers or {}).items()]
        try:
            future = self._producer.send(
                topic, value=value, key=key, headers=pairs, partition=partition
            )
        except kafka_errors.KafkaError as error:
            what = f"cannot write to {topic}/{partition}"
            raise _translated(error, self._cluster, what) from error
        self._pending.append(future)

    def flush(self) -> list[int]:
        pending, self._pending = self._pending, []
        if not pending:
            return []
        # Every batch resolves by its delivery time-out; the slack covers the thread saying so.
        deadline = time.monotonic() + self._cluster.unavailable_s + 30.0
        offsets: list[int] = []
        first: Exception | None = None
        for future in pending:
            try:
                offsets.append(future.get(timeout=max(0.0, deadline - time.monotonic())).offset)
            except kafka_errors.KafkaError as error:
                first = first or error
        if first is not None:
            raise _translated(first, self._cluster, "a record was not acknowledged") from first
        return offsets

    def append(
        self,
        topic: str,
        partition: int,
        value: bytes,
        *,
        key: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> int:
        """send + flush of one record: its offset once it is acknowledged."""
        self.send(topic, partition, value, key=key, headers=headers)
        return self.flush()[-1]

    def sibling(self) -> Producer:
        """Another one over the same connection, with flushes of its own."""
        made = copy.copy(self)
        made._pending = []
        self._siblings.append(made)
        return made

    @property
    def closed(self) -> bool:
        """Whether the connection ended, with the last that used it."""
        return not self._siblings

    def close(self) -> None:
        """The connection ends with its last producer: drops what was sent and not flushed if the
        broker does not take it within a second."""
        if self in self._siblings:
            self._siblings.remove(self)
        if self.closed:
            self._producer.close(timeout=1)


class Reader:
    """Reads some partitions of one topic (its full name) from given offsets.

    `poll` returns what is there (possibly nothing) within `timeout_s`, at most `max_records`, in
    offset order a partition. `positions` are the next offsets; they pass offsets that hold no
    record. `seek` moves one partition, `rewind` all. `read_at` returns the record at exactly that
    offset, leaving positions unchanged (OffsetGone if there is none). `ends`/`starts` are the log
    end (next offset to be written) and start offsets, asked from the broker.
    """

    def __init__(self, cluster: Cluster, topic: str, offsets: Mapping[int, int]) -> None:
        self._cluster = cluster
        self._topic = topic
        self._partitions = {p: TopicPartition(topic, p) for p in sorted(offsets)}
        self._points: Any = None  # a second consumer: point reads must not disturb the positions
        self._point: tuple[int, int] | None = None  # partition, next offset of the second consumer
        self._away_s = 0.0
        self._polled_at = 0.0
        self._consumer: Any = self._open(FETCH_BYTES, FETCH_WAIT_MS)
        known = ride_out(cluster, topic, lambda _: self._consumer.partitions_for_topic(topic))
        missing = [p for p in self._partitions if p not in known]
        if missing:
            self.close()
            raise KafkaFailure(
                f"topic {topic} has no partition {missing[0]}"
                if known
                else f"topic {topic} does not exist"
            )
        self._consumer.assign(list(self._partitions.values()))
        for partition, offset in offsets.items():
            self.seek(partition, offset)

    def poll(self, timeout_s: float = 0.0, max_records: int = 500) -> list[Record]:
        """OffsetGone when a position is not in the log; BrokerUnavailable when no connection was
        up for `unavailable_s` of polling."""
        found = self._poll(self._consumer, timeout_s, max_records)
        self._watch_connection(bool(found))
        return found

    def read_at(self, partition: int, offset: int) -> Record:
        if self._points is None:
            # One batch an answer: a point read must not fetch the log behind it.
            self._points = self._open(1, 5)
        where = TopicPartition(self._topic, partition)
        place = f"{self._topic}/{partition}/{offset}"
        if self._point != (partition, offset):
            if self._point is None or self._point[0] != partition:
                self._points.assign([where])
            self._points.seek(where, offset)
        self._point = None
        deadline = time.monotonic() + self._cluster.unavailable_s
        for attempt in range(1 << 30):
            found = self._poll(self._points, 0.05, 1)
            if found:
                break
            if attempt % POINT_READ_TRIES == POINT_READ_TRIES - 1:
                if offset >= self._offsets([partition], end=True)[partition]:
                    raise OffsetGone(f"{place} is not written yet")
                if self._points.position(where) > offset:
                    raise NoRecord(f"{place} holds no record")
            if time.monotonic() > deadline:
                raise BrokerUnavailable(f"{place}: {_unanswered(self._cluster)}")
        self._point = (partition, found[0].offset + 1)
        if found[0].offset != offset:
            raise NoRecord(f"{place} holds no record")
        return found[0]

    def seek(self, partition: int, offset: int) -> None:
        self._consumer.seek(self._partitions[partition], offset)

    def positions(self) -> dict[int, int]:
        return {p: self._consumer.position(where) for p, where in self._partitions.items()}

    def rewind(self) -> dict[int, int]:
        """Moves every partition to its start, what retention removed left out; the starts."""
        starts = self.starts()
        for partition, start in starts.items():
            self.seek(partition, start)
        return starts

    def read_to(self, ends: Mapping[int, int], max_records: int = 500) -> Iterator[Record]:
        """Polls until no position lies below `ends`; what was written since comes along."""
        while any(at < ends[partition] for partition, at in self.positions().items()):
            yield from self.poll(0.5, max_records)

    def ends(self) -> dict[int, int]:
        return self._offsets(list(self._partitions), end=True)

    def starts(self) -> dict[int, int]:
        return self._offsets(list(self._partitions), end=False)

    def offsets_at(self, timestamp_ms: int) -> dict[int, int]:
        """Each partition's first offset whose record has that time or a later one; its end offset
        where there is none."""
        wanted = dict.fromkeys(self._partitions.values(), timestamp_ms)
        found = ride_out(
            self._cluster,
            f"offsets of {self._topic}",
            lambda ms: self._consumer.offsets_for_times(wanted, timeout_ms=ms),
        )
        ends = self.ends()
        return {
            w.partition: ends[w.partition] if at is None else at.offset for w, at in found.items()
        }

    def close(self) -> None:
        for consumer in (self._consumer, self._points):
            if consumer is not None:
                consumer.close(autocommit=False, timeout_ms=1000)

    def _open(self, fetch_bytes: int, wait_ms: int) -> Any:
        cluster = self._cluster
        return connected(
            cluster,
            lambda: kafka.KafkaConsumer(
                **connection(cluster),
                group_id=None,
                enable_auto_commit=False,
                auto_offset_reset="none",  # a resume below the log's start must fail, not skip
                allow_auto_create_topics=False,
                metrics_enabled=False,
                max_partition_fetch_bytes=fetch_bytes,
                fetch_max_bytes=max(fetch_bytes, 4 * FETCH_BYTES),
                fetch_max_wait_ms=wait_ms,
                receive_message_max_bytes=cluster.max_message_bytes
                + 4 * FETCH_BYTES
                + FRAME_SLACK_BYTES,
            ),
        )

    def _poll(self, consumer: Any, timeout_s: float, max_records: int) -> list[Record]:
        try:
            found = consumer.poll(timeout_ms=int(timeout_s * 1000), max_records=max_records)
        except kafka_errors.OffsetOutOfRangeError as error:
            raise self._gone(error.args[0]) from error
        except kafka_errors.KafkaError as error:
            if error.retriable:
                return []
            raise _translated(error, self._cluster, f"cannot read {self._topic}") from error
        return [_record(message) for messages in found.values() for message in messages]

    def _gone(self, offsets: Mapping[TopicPartition, int]) -> OffsetGone:
        where, offset = next(iter(offsets.items()))
        start = self._offsets([where.partition], end=False)[where.partition]
        end = self._offsets([where.partition], end=True)[where.partition]
        why = "retention passed it" if offset < start else "nothing is written there"
        place = f"{where.topic}/{where.partition}/{offset}"
        return OffsetGone(f"{place} is not in the log, which holds {start} to {end}: {why}")

    def _offsets(self, partitions: Sequence[int], *, end: bool) -> dict[int, int]:
        where = [TopicPartition(self._topic, p) for p in partitions]
        ask = self._consumer.end_offsets if end else self._consumer.beginning_offsets
        found = ride_out(
            self._cluster, f"offsets of {self._topic}", lambda ms: ask(where, timeout_ms=ms)
        )
        return {w.partition: offset for w, offset in found.items()}

    def _watch_connection(self, answered: bool) -> None:
        """An empty poll looks the same at the log's end and without a broker; connections tell.
        Only time spent polling counts: an idle connection may rightly be closed."""
        now, last = time.monotonic(), self._polled_at
        self._polled_at = now
        if answered or self._consumer._manager.least_used_connections():  # those that are up
            self._away_s = 0.0
            return
        self._away_s += min(now - last, 1.0)
        if self._away_s > self._cluster.unavailable_s:
            raise BrokerUnavailable(_unanswered(self._cluster))


def read_all(cluster: Cluster, topic: str, partitions: Iterable[int]) -> list[Record]:
    """Everything in the partitions now, up to the end offsets at the call, ordered by partition and
    offset; `topic` is the full name. For tools and audits."""
    with closing(Reader(cluster, topic, dict.fromkeys(partitions, 0))) as reader:
        ends = reader.ends()
        reader.rewind()
        records = list(reader.read_to(ends, 10_000))
    kept = [r for r in records if r.offset < ends[r.partition]]
    return sorted(kept, key=lambda r: (r.partition, r.offset))


def _record(message: Any) -> Record:
    return Record(
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        key=None if message.key is None else bytes(message.key),
        value=b"" if message.value is None else bytes(message.value),
        headers={name: (text or b"").decode(errors="replace") for name, text in message.headers},
        timestamp_ms=message.timestamp,
    )


def _request_timeout_ms(cluster: Cluster) -> int:
    return int(min(30.0, max(1.0, cluster.unavailable_s / 2)) * 1000)


def connection(cluster: Cluster) -> dict[str, Any]:
    """What every client of kafka-python is made with."""
    return {
        "bootstrap_servers": cluster.bootstrap_servers.split(","),
        "bootstrap_timeout_ms": max(int(cluster.unavailable_s * 1000), 1),
        "request_timeout_ms": _request_timeout_ms(cluster),
        "retry_backoff_ms": 50,
        "reconnect_backoff_ms": 20,
        "reconnect_backoff_max_ms": 500,  # a restarted broker is found within half a second
        "kafka_client": connections.client,
        **cluster.security,
    }


def connected(cluster: Cluster, construct: Callable[[], T]) -> T:
    """A client of kafka-python, once a broker answers. BrokerUnavailable when none does,
    KafkaFailure at once when one refuses `cluster.security`, ConfigError for unknown settings."""
    try:
        _await_broker(cluster)
        return construct()
    except (kafka_errors.KafkaConfigurationError, ValueError, TypeError) as error:
        raise ConfigError(f"kafka: {error}") from error  # what is not ours is kafka.security
    except kafka_errors.KafkaError as error:
        raise _translated(error, cluster, "cannot connect") from error


def _await_broker(cluster: Cluster) -> None:
    deadline = time.monotonic() + cluster.unavailable_s
    while True:
        try:
            return knock(connection(cluster), min(ANSWER_S, max(0.5, cluster.unavailable_s)))
        except Refuses as error:
            raise KafkaFailure(f"{cluster.bootstrap_servers}: {error}") from error
        except Away as error:
            if time.monotonic() >= deadline:
                why = f"cannot connect: {_unanswered(cluster)} ({error})"
                raise BrokerUnavailable(why) from error
        time.sleep(0.05)


def ride_out(cluster: Cluster, what: str, attempt: Callable[[int], T]) -> T:
    """`attempt(time-out in ms)` until it succeeds or the broker was away for `unavailable_s`."""
    deadline = time.monotonic() + cluster.unavailable_s
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        try:
            return attempt(max(1, int(left_s * 1000)))
        except kafka_errors.KafkaError as error:
            if not error.retriable or left_s == 0.0:
                raise _translated(error, cluster, what) from error
        time.sleep(0.05)


def _translated(error: Exception, cluster: Cluster, what: str) -> KafkaFailure:
    too_large = (
        kafka_errors.MessageSizeTooLargeError,
        kafka_errors.RecordListTooLargeError,
    )
    if isinstance(error, too_large):
        return RecordTooLarge(f"{what}: {error}")
    if getattr(error, "retriable", False):
        return BrokerUnavailable(f"{what}: {_unanswered(cluster)} ({error})")
    return KafkaFailure(f"{what}: {error}")


def _unanswered(cluster: Cluster) -> str:
    return f"no broker answered at {cluster.bootstrap_servers} for {cluster.unavailable_s:g} s"
