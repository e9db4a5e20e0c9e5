"""Two topics as one source: in the order in which they were written, also long after."""

from __future__ import annotations

import time

import pytest

from connectors.kafka.client import Cluster, OffsetGone, Producer
from connectors.kafka.merged import MergedPart, MergedSource
from connectors.kafka.source import StopFlag
from connectors.kafka.topics import delete_records, ensure_topics

TOPICS = ("agent-traffic", "feedback")


@pytest.fixture
def producer(cluster: Cluster) -> Producer:
    ensure_topics(cluster, dict.fromkeys(TOPICS, 2))
    return Producer(cluster)


def write(cluster: Cluster, producer: Producer, *values: str) -> None:
    """`f...` is feedback; each in a millisecond of its own."""
    for value in values:
        topic = "feedback" if value.startswith("f") else "agent-traffic"
        producer.append(cluster.topic(topic), 1, value.encode())
        time.sleep(0.003)


def take(part: MergedPart, count: int) -> list[str]:
    found: list[str] = []
    deadline = time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < deadline, found
        for key, item in part.next_batch():
            assert key == "1"
            assert item.record is not None
            found.append(item.record.value.decode())
        time.sleep(0.01)
    return found


def test_records_come_in_the_order_in_which_they_were_written(
    cluster: Cluster, producer: Producer
) -> None:
    written = ["a", "f1", "b", "c", "f2", "f3", "d"]
    write(cluster, producer, *written)
    source = MergedSource(cluster, TOPICS)
    assert source.list_parts() == ["0", "1"]
    part = source.build_part("s", "1", None)
    assert take(part, 7) == written
    write(cluster, producer, "e", "f4")
    assert sorted(take(part, 2)) == ["e", "f4"]
    part.close()


def test_a_resumed_part_goes_on_where_it_stopped(cluster: Cluster, producer: Producer) -> None:
    write(cluster, producer, "a", "f1", "b")
    part = MergedSource(cluster, TOPICS).build_part("s", "1", None)
    take(part, 3)
    state = part.snapshot()
    part.close()
    assert state == {"agent-traffic": 2, "feedback": 1}
    write(cluster, producer, "f2", "c")
    again = MergedSource(cluster, TOPICS).build_part("s", "1", state)
    assert take(again, 2) == ["f2", "c"]
    again.close()


def test_it_ends_when_told_and_refuses_what_retention_removed(
    cluster: Cluster, producer: Producer
) -> None:
    write(cluster, producer, "a", "b")
    stop = StopFlag()
    part = MergedSource(cluster, TOPICS, stop=stop).build_part("s", "1", None)
    stop.set()
    with pytest.raises(StopIteration):
        part.next_batch()
    part.close()
    delete_records(cluster, {"agent-traffic": {1: 2}})
    with pytest.raises(OffsetGone, match="cannot go on at offset 0"):
        MergedSource(cluster, TOPICS).build_part("s", "1", {"agent-traffic": 0, "feedback": 0})
