"""The fold of the policy topic: epochs by position."""

from __future__ import annotations

import logging
import time

import pytest

from connectors.kafka.client import Cluster, Producer
from connectors.kafka.tail import PolicyTail
from connectors.kafka.topics import ensure_topics
from connectors.records import Announcement, Begin, PolicyRecord, Version, encode


def begin(epoch: int | None) -> Begin:
    return Begin(epoch=epoch, writer="test", resumed_step=0, started_at=0.0)


def announcement(epoch: int, number: int) -> Announcement:
    return Announcement(epoch=epoch, version=Version(0, number), digest="0" * 16, limits=(number,))


def announce(cluster: Cluster, *records: PolicyRecord) -> None:
    ensure_topics(cluster, {"policy": 1})
    producer = Producer(cluster)
    for record in records:
        producer.send(cluster.topic("policy"), 0, encode(record))
    producer.flush()
    producer.close()


def read_to_end(tail: PolicyTail) -> list[tuple[int, int]]:
    """(offset, version number) of what counts."""
    found: list[tuple[int, int]] = []
    deadline = time.monotonic() + 20
    while tail.position < tail.end() and time.monotonic() < deadline:
        found += [(offset, spoken.version.number) for offset, spoken in tail.poll(0.1)]
    return found


def test_announcements_of_a_fenced_trainer_are_dropped_by_position(cluster: Cluster) -> None:
    announce(
        cluster,
        begin(3),
        announcement(3, 1),
        begin(8),
        announcement(3, 99),  # the zombie goes on
        announcement(8, 2),
        begin(5),  # begins late, below the highest epoch
        announcement(5, 98),
        announcement(8, 3),
    )
    tail = PolicyTail(cluster)
    assert read_to_end(tail) == [(1, 1), (4, 2), (7, 3)]
    assert (tail.epoch, tail.position) == (8, 8)
    assert tail.latest is not None
    assert tail.latest.version == Version(0, 3)
    tail.close()


def test_a_tail_that_starts_late_knows_the_epoch_it_is_given(cluster: Cluster) -> None:
    announce(cluster, begin(8), announcement(3, 99), announcement(8, 2))
    tail = PolicyTail(cluster, offset=1, epoch=8)
    assert read_to_end(tail) == [(2, 2)]
    tail.close()


def test_a_poll_without_news_answers_at_once(cluster: Cluster) -> None:
    announce(cluster)
    tail = PolicyTail(cluster)
    assert tail.poll() == []
    assert tail.latest is None
    announce(cluster, announcement(0, 1))
    assert read_to_end(tail) == [(0, 1)]
    tail.close()


def test_foreign_records_are_passed_over_and_named(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    announce(cluster, begin(0), announcement(0, 1))
    producer = Producer(cluster)
    for value in (b"{}", b"", b'"\xff"', b"[" * 100_000, encode(begin(None))):
        producer.append(cluster.topic("policy"), 0, value)
    producer.close()
    announce(cluster, announcement(0, 2))
    tail = PolicyTail(cluster)
    with caplog.at_level(logging.WARNING):
        assert read_to_end(tail) == [(1, 1), (7, 2)]
    tail.close()
    assert tail.position == 8
    for offset in (2, 3, 4, 5):
        assert f"passed over: {cluster.topic('policy')}/0/{offset}: " in caplog.text
