"""Producer, reader and topic administration against the embedded broker."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from connectors.config import ConfigError
from connectors.kafka.client import (
    BrokerUnavailable,
    Cluster,
    KafkaFailure,
    OffsetGone,
    Producer,
    Reader,
    Record,
    RecordTooLarge,
    read_all,
)
from connectors.kafka.topics import ensure_topics, partition_counts
from tests.broker_process import BrokerProcess


def read(reader: Reader, count: int, deadline_s: float = 20.0) -> list[Record]:
    found: list[Record] = []
    deadline = time.monotonic() + deadline_s
    while len(found) < count and time.monotonic() < deadline:
        found += reader.poll(0.2)
    return found


def test_a_record_comes_back_as_it_was_sent(cluster: Cluster) -> None:
    ensure_topics(cluster, {"prompts": 2})
    topic = cluster.topic("prompts")
    producer = Producer(cluster)
    producer.send(topic, 1, b"value", key=b"key", headers={"writer": "rollout", "é": "ü"})
    producer.send(topic, 0, b"")
    assert producer.flush() == [0, 0]
    assert producer.append(topic, 1, b"second") == 1
    producer.close()
    reader = Reader(cluster, topic, {0: 0, 1: 0})
    records = sorted(read(reader, 3), key=lambda r: (r.partition, r.offset))
    assert [(r.partition, r.offset, r.key, r.value) for r in records] == [
        (0, 0, None, b""),
        (1, 0, b"key", b"value"),
        (1, 1, None, b"second"),
    ]
    assert records[1].headers == {"writer": "rollout", "é": "ü"}
    assert abs(records[1].timestamp_ms / 1000 - time.time()) < 600
    assert reader.positions() == reader.ends() == {0: 1, 1: 2}
    assert reader.starts() == {0: 0, 1: 0}
    reader.close()


def test_flush_answers_offsets_in_the_order_of_sending(cluster: Cluster) -> None:
    ensure_topics(cluster, {"prompts": 3})
    producer = Producer(cluster)
    for i in range(300):
        producer.send(cluster.topic("prompts"), i % 3, b"%d" % i)
    assert producer.flush() == [i // 3 for i in range(300)]
    assert producer.flush() == []
    producer.close()
    everything = read_all(cluster, cluster.topic("prompts"), range(3))
    assert [r.value for r in everything] == [b"%d" % i for p in range(3) for i in range(p, 300, 3)]


def test_the_largest_record_passes_and_a_larger_one_is_refused_at_once(cluster: Cluster) -> None:
    small = replace(cluster, max_message_bytes=1 << 20)
    ensure_topics(small, {"rollouts": 1})
    producer = Producer(small)
    topic = small.topic("rollouts")
    value = os.urandom(small.largest_record_bytes - 300)  # does not compress
    assert producer.append(topic, 0, value) == 0
    with pytest.raises(RecordTooLarge):
        producer.send(topic, 0, os.urandom(1 << 20))
    assert producer.append(topic, 0, b"after") == 1
    assert [r.value for r in read_all(small, topic, [0])] == [value, b"after"]
    producer.close()


def test_a_64_mib_message_makes_the_round_trip(cluster: Cluster) -> None:
    ensure_topics(cluster, {"rollouts": 1})
    value = bytes(1 << 20) * 32 + os.urandom(31 << 20)
    producer = Producer(cluster)
    producer.append(cluster.topic("rollouts"), 0, value)
    producer.close()
    reader = Reader(cluster, cluster.topic("rollouts"), {0: 0})
    assert reader.read_at(0, 0).value == value
    assert [len(r.value) for r in read(reader, 1)] == [len(value)]
    reader.close()


def test_a_delivery_error_is_raised_by_flush(cluster: Cluster) -> None:
    """The broker's limit is below the client's: only the broker notices."""
    ensure_topics(replace(cluster, max_message_bytes=1 << 16), {"rollouts": 1})
    producer = Producer(cluster)
    producer.send(cluster.topic("rollouts"), 0, os.urandom(1 << 17))
    with pytest.raises(RecordTooLarge):
        producer.flush()
    producer.close()
    assert read_all(cluster, cluster.topic("rollouts"), [0]) == []


def test_read_at_is_exact_and_leaves_positions_alone(cluster: Cluster) -> None:
    ensure_topics(cluster, {"rollouts": 2})
    topic = cluster.topic("rollouts")
    producer = Producer(cluster)
    for i in range(400):
        producer.send(topic, i % 2, b"%d" % i)
    producer.flush()
    producer.close()
    reader = Reader(cluster, topic, {0: 3, 1: 7})
    for partition, offset in [(0, 5), (0, 6), (1, 199), (1, 0), (0, 5)]:
        record = reader.read_at(partition, offset)
        assert (record.offset, record.value) == (offset, b"%d" % (2 * offset + partition))
        assert reader.positions() == {0: 3, 1: 7}
    first = reader.poll(5.0, 1)
    assert len(first) == 1
    assert (first[0].partition, first[0].offset) in {(0, 3), (1, 7)}
    for offset in (200, 5000):
        with pytest.raises(OffsetGone):
            reader.read_at(0, offset)
    assert reader.read_at(0, 199).offset == 199
    reader.close()


def test_seek_moves_one_partition(cluster: Cluster) -> None:
    ensure_topics(cluster, {"rollouts": 2})
    producer = Producer(cluster)
    for i in range(20):
        producer.send(cluster.topic("rollouts"), i % 2, b"%d" % i)
    producer.flush()
    producer.close()
    reader = Reader(cluster, cluster.topic("rollouts"), {0: 0, 1: 0})
    assert len(read(reader, 20)) == 20
    reader.seek(1, 8)
    assert [(r.partition, r.offset) for r in read(reader, 2)] == [(1, 8), (1, 9)]
    reader.close()


def test_an_offset_outside_the_log_is_an_error_and_no_jump(cluster: Cluster) -> None:
    ensure_topics(cluster, {"rollouts": 1})
    reader = Reader(cluster, cluster.topic("rollouts"), {0: 17})
    with pytest.raises(OffsetGone, match=r"rollouts/0/17 is not in the log, which holds 0 to 0"):
        read(reader, 1)
    reader.close()


def test_a_missing_topic_or_partition_is_named(cluster: Cluster) -> None:
    with pytest.raises(KafkaFailure, match="does not exist"):
        Reader(cluster, cluster.topic("nothing"), {0: 0})
    ensure_topics(cluster, {"rollouts": 1})
    with pytest.raises(KafkaFailure, match="has no partition 4"):
        Reader(cluster, cluster.topic("rollouts"), {4: 0})


def test_topics_are_created_once_and_a_partition_count_is_never_changed(cluster: Cluster) -> None:
    ensure_topics(cluster, {"prompts": 2, "policy": 1})
    ensure_topics(cluster, {"prompts": 2, "steps": 1})
    assert partition_counts(cluster) == {"prompts": 2, "policy": 1, "steps": 1}
    assert partition_counts(cluster, ["steps", "nothing"]) == {"steps": 1}
    with pytest.raises(ConfigError, match="has 2 partitions, not 3"):
        ensure_topics(cluster, {"prompts": 3})


def test_an_absent_broker_is_unavailable_after_the_time_given() -> None:
    nobody = Cluster(bootstrap_servers="127.0.0.1:1", unavailable_s=0.5)
    for construct in (
        lambda: Producer(nobody),
        lambda: Reader(nobody, "t", {0: 0}),
        lambda: partition_counts(nobody),
    ):
        with pytest.raises(BrokerUnavailable, match=r"no broker answered at 127\.0\.0\.1:1"):
            construct()


def test_an_unknown_security_setting_is_a_configuration_error(cluster: Cluster) -> None:
    wrong = replace(cluster, security={"sasl_mecanism": "PLAIN"})
    for construct in (lambda: Producer(wrong), lambda: partition_counts(wrong)):
        with pytest.raises(ConfigError, match="sasl_mecanism"):
            construct()


def test_producer_and_reader_give_up_when_the_broker_stays_away(
    own_broker: BrokerProcess, own_cluster: Cluster
) -> None:
    ensure_topics(own_cluster, {"rollouts": 1})
    brief = replace(own_cluster, unavailable_s=1.5)
    topic = brief.topic("rollouts")
    producer, reader = Producer(brief), Reader(brief, topic, {0: 0})
    producer.append(topic, 0, b"x")
    assert len(read(reader, 1)) == 1
    own_broker.kill9()
    attempts: list[Callable[[], object]] = [
        lambda: producer.append(topic, 0, b"y"),
        lambda: read(reader, 1),
        lambda: reader.read_at(0, 0),
        lambda: reader.ends(),
    ]
    for attempt in attempts:
        with pytest.raises(BrokerUnavailable):
            attempt()
