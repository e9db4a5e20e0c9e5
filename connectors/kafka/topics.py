"""Topic administration: creating a run's topics, how many partitions those have, and trimming
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from kafka import TopicPartition
from kafka import errors as kafka_errors
from kafka.admin import KafkaAdminClient

from connectors.config import ConfigError
from connectors.kafka.client import Cluster, KafkaFailure, connected, connection, ride_out

T = TypeVar("T")


def ensure_topics(cluster: Cluster, partitions: Mapping[str, int]) -> None:
    """Creates the topics that are missing (names without namespace); ConfigError if one exists with
    another partition count, which a run never changes: offsets and checkpoints name partitions.
    Returns once every topic can be read and written. What is kept is decided by those
    who read it, so the broker removes nothing by age."""
    limits = {"max.message.bytes": str(cluster.max_message_bytes), "retention.ms": "-1"}

    def attempt(admin: Any) -> None:
        existing = _counts(admin, cluster)
        missing = {
            cluster.topic(name): {
                "num_partitions": count,
                "replication_factor": -1,
                "configs": limits,
            }
            for name, count in partitions.items()
            if name not in existing
        }
        if missing:
            try:
                admin.create_topics(missing)
            except kafka_errors.TopicAlreadyExistsError:
                existing = _counts(admin, cluster)  # another process was faster
            admin.wait_for_topics(list(missing))
            existing = _counts(admin, cluster)
        for name, count in partitions.items():
            if existing.get(name) != count:
                raise ConfigError(
                    f"topic {cluster.topic(name)} has {existing.get(name)} partitions, not {count}:"
                    " a run keeps the number it began with; set kafka.partitions to what its topics"
                    " have, or give this run a kafka.namespace of its own"
                )

    _administer(cluster, attempt)


def partition_counts(cluster: Cluster, topics: Sequence[str] | None = None) -> dict[str, int]:
    """Partition count of each existing topic of the namespace (names without namespace)."""
    found = _administer(cluster, lambda admin: _counts(admin, cluster))
    return {name: n for name, n in found.items() if topics is None or name in topics}


def num_partitions(cluster: Cluster, topic: str) -> int:
    """Of `topic` (without namespace); KafkaFailure when it does not exist."""
    count = partition_counts(cluster, [topic]).get(topic)
    if count is None:
        raise KafkaFailure(f"topic {cluster.topic(topic)} does not exist")
    return count


def cluster_id(cluster: Cluster) -> str:
    """What tells one log from another: the brokers' own name of their cluster."""
    found = _administer(cluster, lambda admin: admin.describe_cluster())
    return str(found["cluster_id"])


def delete_records(
    cluster: Cluster, before: Mapping[str, Mapping[int, int]]
) -> dict[str, dict[int, int]]:
    """Removes each partition's records before the offset given (topics without namespace); where
    the partitions start afterwards. An offset at or below a partition's start removes nothing.
    KafkaFailure when one lies beyond the end or there is no such partition."""

    def attempt(admin: Any) -> dict[str, dict[int, int]]:
        counts = _counts(admin, cluster)
        starts: dict[str, dict[int, int]] = {}
        for name, partitions in before.items():
            for partition, offset in partitions.items():
                if partition >= counts.get(name, 0):
                    raise KafkaFailure(f"topic {cluster.topic(name)} has no partition {partition}")
                # One by one: of several failures kafka-python does not say which may pass.
                where = TopicPartition(cluster.topic(name), partition)
                trimmed = admin.delete_records({where: offset})[where]
                starts.setdefault(name, {})[partition] = trimmed["low_watermark"]
        return starts

    return _administer(cluster, attempt)


def _administer(cluster: Cluster, attempt: Callable[[Any], T]) -> T:
    admin = connected(cluster, lambda: KafkaAdminClient(**connection(cluster)))
    try:
        return ride_out(cluster, "topics", lambda _: attempt(admin))
    finally:
        admin.close()


def _counts(admin: Any, cluster: Cluster) -> dict[str, int]:
    return {
        topic["name"].removeprefix(cluster.namespace): len(topic["partitions"])
        for topic in admin.describe_topics()
        if topic["name"].startswith(cluster.namespace) and topic["error_code"] == 0
    }
