"""Topic administration: creating a run's topics, and how many partitions those have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from kafka import errors as kafka_errors
from kafka.admin import KafkaAdminClient

from connectors.kafka.client import Cluster, KafkaFailure, connected, connection, ride_out

T = TypeVar("T")


def ensure_topics(cluster: Cluster, partitions: Mapping[str, int]) -> None:
    """Creates the topics that are missing (names without namespace); KafkaFailure if one exists
    with another partition count. Returns once every topic can be read and written. What is kept
    is decided by those who read it, so the broker removes nothing by age."""
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
                raise KafkaFailure(
                    f"topic {cluster.topic(name)} has {existing.get(name)} partitions, not {count}"
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
