"""Two independent Kafka clients behind one small interface, for the broker's conformance suite.

Both translate what a broker refuses into `Rejected` with Kafka's error code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import confluent_kafka
import confluent_kafka.admin
import kafka
import kafka.admin
import kafka.errors
from kafka.protocol.consumer import OffsetSpec

DEADLINE_S = 30.0
LARGEST_BYTES = 66 << 20


class Rejected(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"Kafka error {code}")
        self.code = code


@dataclass(frozen=True, slots=True)
class Sent:
    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    timestamp_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Received:
    offset: int
    value: bytes | None
    key: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    timestamp_ms: int


class Client(Protocol):
    name: str
    bootstrap: str
    created: Sequence[str]
    """The topics that it has created."""
    compressions: Sequence[str]

    def create(
        self, topic: str, num_partitions: int = 1, configs: Mapping[str, str] | None = None
    ) -> None: ...

    def delete(self, topic: str) -> None: ...

    def topics(self) -> dict[str, int]:
        """Partitions of each topic."""

    def configs(self, topic: str) -> dict[str, str]: ...

    def produce(
        self,
        topic: str,
        records: Sequence[Sent],
        *,
        partition: int = 0,
        acks: int = -1,
        compression: str = "none",
        idempotent: bool = False,
        linger_ms: int = 0,
    ) -> list[int]:
        """Offsets in the order of sending, or the first rejection."""

    def consume(
        self,
        topic: str,
        count: int,
        *,
        partition: int = 0,
        offset: int = 0,
        max_wait_ms: int = 500,
        partition_max_bytes: int = 1 << 20,
    ) -> list[Received]:
        """`count` records from `offset` on, or fewer if they do not come within DEADLINE_S."""

    def ends(self, topic: str, partition: int = 0) -> tuple[int, int]:
        """Earliest and latest offset."""

    def offset_at(self, topic: str, timestamp_ms: int, partition: int = 0) -> int | None: ...

    def delete_records(self, topic: str, offset: int, partition: int = 0) -> int:
        """The partition's new earliest offset."""

    def commit(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """For a group that has no members."""

    def committed(self, group: str) -> dict[tuple[str, int], int]: ...

    def groups(self) -> list[str]: ...

    def group(self, name: str) -> tuple[str, list[list[int]]]:
        """Its state, and the partitions of each member."""

    def delete_group(self, name: str) -> None: ...

    def newest(self, topic: str, partition: int = 0) -> tuple[int, int]:
        """Offset and time of the record with the latest time."""

    def add_partitions(self, topic: str, num_partitions: int) -> None:
        """Makes it `num_partitions` in all."""

    def set_configs(self, topic: str, configs: Mapping[str, str | None]) -> None:
        """Changes these, None to the default, and leaves the others."""

    def replace_configs(self, topic: str, configs: Mapping[str, str]) -> None:
        """These and no others are set from now on."""


class KafkaPython:
    name = "kafka-python"
    compressions = ("gzip", "lz4", "snappy", "zstd")

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.created: list[str] = []
        self._servers = {"bootstrap_servers": bootstrap}

    def _admin(self, call: Any) -> Any:
        admin = kafka.admin.KafkaAdminClient(**self._servers)
        try:
            return call(admin)
        except kafka.errors.BrokerResponseError as error:
            raise Rejected(error.errno) from error
        finally:
            admin.close()

    def create(
        self, topic: str, num_partitions: int = 1, configs: Mapping[str, str] | None = None
    ) -> None:
        wanted = kafka.admin.NewTopic(topic, num_partitions, 1, topic_configs=dict(configs or {}))
        self._admin(lambda admin: admin.create_topics([wanted]))
        self.created.append(topic)

    def delete(self, topic: str) -> None:
        self._admin(lambda admin: admin.delete_topics([topic]))

    def topics(self) -> dict[str, int]:
        def describe(admin: Any) -> dict[str, int]:
            described = admin.describe_topics(admin.list_topics())
            return {each["name"]: len(each["partitions"]) for each in described}

        found: dict[str, int] = self._admin(describe)
        return found

    def configs(self, topic: str) -> dict[str, str]:
        resource = kafka.admin.ConfigResource("TOPIC", topic)
        described = self._admin(
            lambda admin: admin.describe_configs([resource], config_filter="all")
        )
        return {name: setting["value"] for name, setting in described["topic"][topic].items()}

    def produce(
        self,
        topic: str,
        records: Sequence[Sent],
        *,
        partition: int = 0,
        acks: int = -1,
        compression: str = "none",
        idempotent: bool = False,
        linger_ms: int = 0,
    ) -> list[int]:
        producer = kafka.KafkaProducer(
            **self._servers,
            acks=acks,
            enable_idempotence=idempotent,
            compression_type=None if compression == "none" else compression,
            linger_ms=linger_ms,
            max_request_size=LARGEST_BYTES,
            max_block_ms=2000,
        )
        try:
            futures = [
                producer.send(
                    topic,
                    value=record.value,
                    key=record.key,
                    headers=list(record.headers),
                    timestamp_ms=record.timestamp_ms,
                    partition=partition,
                )
                for record in records
            ]
            producer.flush(DEADLINE_S)
            return [future.get(DEADLINE_S).offset for future in futures]
        except kafka.errors.BrokerResponseError as error:
            raise Rejected(error.errno) from error
        except kafka.errors.KafkaTimeoutError as error:
            raise Rejected(kafka.errors.UnknownTopicOrPartitionError.errno) from error
        finally:
            producer.close(timeout=5)

    def _consumer(self, **options: Any) -> Any:
        return kafka.KafkaConsumer(
            **self._servers, enable_auto_commit=False, auto_offset_reset="none", **options
        )

    def consume(
        self,
        topic: str,
        count: int,
        *,
        partition: int = 0,
        offset: int = 0,
        max_wait_ms: int = 500,
        partition_max_bytes: int = 1 << 20,
    ) -> list[Received]:
        consumer = self._consumer(
            fetch_max_wait_ms=max_wait_ms,
            max_partition_fetch_bytes=partition_max_bytes,
            request_timeout_ms=max_wait_ms + 30_000,
        )
        where = kafka.TopicPartition(topic, partition)
        consumer.assign([where])
        consumer.seek(where, offset)
        found: list[Received] = []
        deadline = time.monotonic() + DEADLINE_S
        try:
            while len(found) < count and time.monotonic() < deadline:
                for records in consumer.poll(timeout_ms=1000).values():
                    found += [
                        Received(r.offset, r.value, r.key, tuple(r.headers), r.timestamp)
                        for r in records
                    ]
        except kafka.errors.OffsetOutOfRangeError as error:
            raise Rejected(error.errno) from error
        finally:
            consumer.close()
        return found[:count]

    def _ask(self, topic: str, partition: int, call: Any) -> Any:
        consumer = self._consumer()
        try:
            return call(consumer, kafka.TopicPartition(topic, partition))
        finally:
            consumer.close()

    def ends(self, topic: str, partition: int = 0) -> tuple[int, int]:
        def ask(consumer: Any, where: Any) -> tuple[int, int]:
            return (
                consumer.beginning_offsets([where])[where],
                consumer.end_offsets([where])[where],
            )

        found: tuple[int, int] = self._ask(topic, partition, ask)
        return found

    def offset_at(self, topic: str, timestamp_ms: int, partition: int = 0) -> int | None:
        def ask(consumer: Any, where: Any) -> Any:
            return consumer.offsets_for_times({where: timestamp_ms})[where]

        found = self._ask(topic, partition, ask)
        return None if found is None else found.offset

    def delete_records(self, topic: str, offset: int, partition: int = 0) -> int:
        where = kafka.TopicPartition(topic, partition)
        trimmed = self._admin(lambda admin: admin.delete_records({where: offset}))
        start: int = trimmed[where]["low_watermark"]
        return start

    def commit(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        wanted = {
            kafka.TopicPartition(topic, partition): kafka.OffsetAndMetadata(offset, "", -1)
            for partition, offset in offsets.items()
        }
        done = self._admin(lambda admin: admin.alter_group_offsets(group, wanted))
        for error in done.values():
            if error.errno:
                raise Rejected(error.errno)

    def committed(self, group: str) -> dict[tuple[str, int], int]:
        found = self._admin(lambda admin: admin.list_group_offsets({group: None}))
        return {tuple(where): committed.offset for where, committed in found[group].items()}

    def groups(self) -> list[str]:
        return [each["group_id"] for each in self._admin(lambda admin: admin.list_groups())]

    def group(self, name: str) -> tuple[str, list[list[int]]]:
        found = self._admin(lambda admin: admin.describe_groups([name]))[name]
        members = [
            [p for topic in assignment["assigned_partitions"] for p in topic["partitions"]]
            for assignment in (member["member_assignment"] for member in found["members"])
            if assignment  # known in a stable group alone
        ]
        return found["group_state"], sorted(members)

    def delete_group(self, name: str) -> None:
        done = self._admin(lambda admin: admin.delete_groups([name]))[name]
        if done != "OK":
            raise Rejected(getattr(kafka.errors, done).errno)

    def newest(self, topic: str, partition: int = 0) -> tuple[int, int]:
        where = kafka.TopicPartition(topic, partition)
        found = self._admin(
            lambda admin: admin.list_partition_offsets({where: OffsetSpec.MAX_TIMESTAMP})
        )
        return found[where].offset, found[where].timestamp

    def add_partitions(self, topic: str, num_partitions: int) -> None:
        self._admin(lambda admin: admin.create_partitions({topic: num_partitions}))

    def set_configs(self, topic: str, configs: Mapping[str, str | None]) -> None:
        changes = {
            name: ("DELETE", None) if value is None else ("SET", value)
            for name, value in configs.items()
        }
        self._alter(topic, changes, incremental=True)

    def replace_configs(self, topic: str, configs: Mapping[str, str]) -> None:
        self._alter(topic, dict(configs), incremental=False)

    def _alter(self, topic: str, configs: dict[str, Any], *, incremental: bool) -> None:
        resource = kafka.admin.ConfigResource("TOPIC", topic, configs)

        async def alter(admin: Any) -> Any:
            # alter_configs would check them by what is described, and fill in what is missing.
            return await admin._send_alter_configs_requests([resource], False, incremental)

        outcome = self._admin(lambda admin: admin._manager.run(alter, admin))["topic"][topic]
        if outcome != "OK":
            raise Rejected(int(outcome.removeprefix("[Error ").split("]")[0]))


class Confluent:
    name = "confluent"
    compressions = ("gzip", "lz4", "snappy", "zstd")

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.created: list[str] = []
        self._servers = {"bootstrap.servers": bootstrap, "log_level": 0}

    def _admin(self, call: Any) -> Any:
        admin = confluent_kafka.admin.AdminClient(self._servers)
        try:
            return [future.result(DEADLINE_S) for future in call(admin).values()]
        except confluent_kafka.KafkaException as error:
            raise Rejected(error.args[0].code()) from error

    def create(
        self, topic: str, num_partitions: int = 1, configs: Mapping[str, str] | None = None
    ) -> None:
        wanted = confluent_kafka.admin.NewTopic(
            topic, num_partitions, 1, config=dict(configs or {})
        )
        self._admin(lambda admin: admin.create_topics([wanted]))
        self.created.append(topic)

    def delete(self, topic: str) -> None:
        self._admin(lambda admin: admin.delete_topics([topic]))

    def topics(self) -> dict[str, int]:
        found = confluent_kafka.admin.AdminClient(self._servers).list_topics(timeout=DEADLINE_S)
        return {name: len(topic.partitions) for name, topic in found.topics.items()}

    def configs(self, topic: str) -> dict[str, str]:
        resource = confluent_kafka.admin.ConfigResource("topic", topic)
        (described,) = self._admin(lambda admin: admin.describe_configs([resource]))
        return {name: entry.value for name, entry in described.items()}

    def produce(
        self,
        topic: str,
        records: Sequence[Sent],
        *,
        partition: int = 0,
        acks: int = -1,
        compression: str = "none",
        idempotent: bool = False,
        linger_ms: int = 0,
    ) -> list[int]:
        producer = confluent_kafka.Producer(
            {
                **self._servers,
                "acks": acks,
                "enable.idempotence": idempotent,
                "compression.type": compression,
                "linger.ms": linger_ms,
                "message.max.bytes": LARGEST_BYTES,
                "topic.metadata.propagation.max.ms": 1000,
            }
        )
        offsets: list[int] = []
        errors: list[int] = []

        def delivered(error: Any, message: Any) -> None:
            if error is not None:
                errors.append(error.code())
            else:
                offsets.append(message.offset())

        for record in records:
            producer.produce(
                topic,
                value=record.value,
                key=record.key,
                headers=list(record.headers),
                timestamp=record.timestamp_ms or 0,
                partition=partition,
                on_delivery=delivered,
            )
        assert producer.flush(DEADLINE_S) == 0
        if errors:
            code = errors[0]
            if code == confluent_kafka.KafkaError._UNKNOWN_TOPIC:
                code = confluent_kafka.KafkaError.UNKNOWN_TOPIC_OR_PART
            raise Rejected(code)
        return offsets

    def _consumer(self, **options: Any) -> Any:
        return confluent_kafka.Consumer(
            {
                **self._servers,
                "group.id": "none",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "receive.message.max.bytes": 2 * LARGEST_BYTES,
                **options,
            }
        )

    def consume(
        self,
        topic: str,
        count: int,
        *,
        partition: int = 0,
        offset: int = 0,
        max_wait_ms: int = 500,
        partition_max_bytes: int = 1 << 20,
    ) -> list[Received]:
        consumer = self._consumer(
            **{
                "fetch.wait.max.ms": max_wait_ms,
                "fetch.message.max.bytes": partition_max_bytes,
                "socket.timeout.ms": max_wait_ms + 30_000,
            }
        )
        consumer.assign([confluent_kafka.TopicPartition(topic, partition, offset)])
        found: list[Received] = []
        deadline = time.monotonic() + DEADLINE_S
        try:
            while len(found) < count and time.monotonic() < deadline:
                for message in consumer.consume(min(count - len(found), 500), 1.0):
                    if message.error() is not None:
                        raise Rejected(_cause(message.error()))
                    found.append(
                        Received(
                            message.offset(),
                            message.value(),
                            message.key(),
                            tuple(message.headers() or ()),
                            message.timestamp()[1],
                        )
                    )
        finally:
            consumer.close()
        return found[:count]

    def ends(self, topic: str, partition: int = 0) -> tuple[int, int]:
        consumer = self._consumer()
        try:
            where = confluent_kafka.TopicPartition(topic, partition)
            found: tuple[int, int] = consumer.get_watermark_offsets(where, timeout=DEADLINE_S)
            return found
        finally:
            consumer.close()

    def offset_at(self, topic: str, timestamp_ms: int, partition: int = 0) -> int | None:
        consumer = self._consumer()
        try:
            where = confluent_kafka.TopicPartition(topic, partition, timestamp_ms)
            (found,) = consumer.offsets_for_times([where], timeout=DEADLINE_S)
            return None if found.offset < 0 else found.offset
        finally:
            consumer.close()

    def delete_records(self, topic: str, offset: int, partition: int = 0) -> int:
        where = confluent_kafka.TopicPartition(topic, partition, offset)
        (trimmed,) = self._admin(lambda admin: admin.delete_records([where]))
        start: int = trimmed.low_watermark
        return start

    def commit(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        wanted = [
            confluent_kafka.TopicPartition(topic, partition, offset)
            for partition, offset in offsets.items()
        ]
        asked = [confluent_kafka.ConsumerGroupTopicPartitions(group, wanted)]
        (done,) = self._admin(lambda admin: admin.alter_consumer_group_offsets(asked))
        for each in done.topic_partitions:
            if each.error is not None:
                raise Rejected(each.error.code())

    def committed(self, group: str) -> dict[tuple[str, int], int]:
        asked = [confluent_kafka.ConsumerGroupTopicPartitions(group)]
        (found,) = self._admin(lambda admin: admin.list_consumer_group_offsets(asked))
        return {(each.topic, each.partition): each.offset for each in found.topic_partitions}

    def groups(self) -> list[str]:
        admin = confluent_kafka.admin.AdminClient(self._servers)
        return [each.group_id for each in admin.list_consumer_groups().result(DEADLINE_S).valid]

    def group(self, name: str) -> tuple[str, list[list[int]]]:
        (found,) = self._admin(lambda admin: admin.describe_consumer_groups([name]))
        members = [
            [where.partition for where in member.assignment.topic_partitions]
            for member in found.members
        ]
        return found.state.name.capitalize(), sorted(members)

    def delete_group(self, name: str) -> None:
        self._admin(lambda admin: admin.delete_consumer_groups([name]))

    def newest(self, topic: str, partition: int = 0) -> tuple[int, int]:
        where = confluent_kafka.TopicPartition(topic, partition)
        latest = confluent_kafka.admin.OffsetSpec.max_timestamp()
        (found,) = self._admin(lambda admin: admin.list_offsets({where: latest}))
        return found.offset, found.timestamp

    def add_partitions(self, topic: str, num_partitions: int) -> None:
        wanted = confluent_kafka.admin.NewPartitions(topic, num_partitions)
        self._admin(lambda admin: admin.create_partitions([wanted]))

    def set_configs(self, topic: str, configs: Mapping[str, str | None]) -> None:
        kind = confluent_kafka.admin.AlterConfigOpType
        changes = [
            confluent_kafka.admin.ConfigEntry(
                name, value, incremental_operation=kind.DELETE if value is None else kind.SET
            )
            for name, value in configs.items()
        ]
        resource = confluent_kafka.admin.ConfigResource("topic", topic, incremental_configs=changes)
        self._admin(lambda admin: admin.incremental_alter_configs([resource]))

    def replace_configs(self, topic: str, configs: Mapping[str, str]) -> None:
        resource = confluent_kafka.admin.ConfigResource("topic", topic, set_config=dict(configs))
        self._admin(lambda admin: admin.alter_configs([resource]))


def _cause(error: Any) -> int:
    if error.code() == confluent_kafka.KafkaError._AUTO_OFFSET_RESET:
        return int(confluent_kafka.KafkaError.OFFSET_OUT_OF_RANGE)
    return int(error.code())


def soon(is_so: Callable[[], bool]) -> bool:
    """Whether it becomes so: a Kafka of several nodes takes a moment to know what it has done."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


CLIENTS: dict[str, type[KafkaPython] | type[Confluent]] = {
    "kafka-python": KafkaPython,
    "confluent": Confluent,
}
