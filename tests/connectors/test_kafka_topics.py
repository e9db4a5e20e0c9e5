"""What a run does with its topics: their offsets by time, their trimming."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace

import pytest

from connectors.config import ConfigError
from connectors.kafka.client import Cluster, KafkaFailure, OffsetGone, Producer, Reader
from connectors.kafka.topics import delete_records, ensure_topics
from tests.broker_process import BrokerProcess


def filled(cluster: Cluster, num_records: int) -> str:
    ensure_topics(cluster, {"rollouts": 2})
    topic = cluster.topic("rollouts")
    with closing(Producer(cluster)) as producer:
        for number in range(num_records):
            producer.append(topic, 0, b"%d" % number)
    return topic


def test_records_before_the_offsets_given_are_gone(cluster: Cluster) -> None:
    topic = filled(cluster, 6)
    assert delete_records(cluster, {"rollouts": {0: 4, 1: 0}}) == {"rollouts": {0: 4, 1: 0}}
    with closing(Reader(cluster, topic, {0: 0, 1: 0})) as reader:
        assert reader.starts() == {0: 4, 1: 0}
        assert reader.read_at(0, 4).value == b"4"
        with pytest.raises(OffsetGone, match="retention passed it"):
            reader.poll(5.0)
    assert delete_records(cluster, {"rollouts": {0: 2}}) == {"rollouts": {0: 4}}
    assert delete_records(cluster, {}) == {}


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ({"rollouts": {0: 7}}, "OffsetOutOfRange.*rollouts partition 0"),
        ({"rollouts": {2: 0}}, "rollouts has no partition 2"),
        ({"steps": {0: 0}}, "steps has no partition 0"),
    ],
)
def test_what_cannot_be_trimmed_is_named(
    cluster: Cluster, before: dict[str, dict[int, int]], said: str
) -> None:
    filled(cluster, 6)
    with pytest.raises(KafkaFailure, match=said):
        delete_records(cluster, before)


def test_trimming_and_times_wait_for_a_broker_that_is_away(
    own_broker: BrokerProcess, own_cluster: Cluster
) -> None:
    topic = filled(own_cluster, 6)
    with closing(Reader(own_cluster, topic, {0: 0})) as reader:
        own_broker.kill9()
        again = threading.Timer(1.0, own_broker.start)
        again.start()
        assert delete_records(own_cluster, {"rollouts": {0: 3}}) == {"rollouts": {0: 3}}
        again.join()
        own_broker.restart()
        assert reader.offsets_at(0) == {0: 3}


def test_a_time_gives_each_partitions_first_offset_that_late_or_its_end(cluster: Cluster) -> None:
    topic = filled(cluster, 3)
    with closing(Reader(cluster, topic, {0: 0, 1: 0})) as reader:
        times = [record.timestamp_ms for record in reader.read_to(reader.ends())]
        assert reader.offsets_at(times[1]) == {0: times.index(times[1]), 1: 0}
        assert reader.offsets_at(times[2] + 1) == {0: 3, 1: 0}
        assert reader.offsets_at(0) == {0: 0, 1: 0}
        assert reader.positions() == {0: 3, 1: 0}


def test_another_partition_count_is_refused_with_what_to_do(cluster: Cluster) -> None:
    ensure_topics(cluster, {"prompts": 2})
    for count in (1, 3):
        with pytest.raises(ConfigError, match=r"set kafka\.partitions to what its topics have"):
            ensure_topics(replace(cluster, unavailable_s=5.0), {"prompts": count})
