"""The exactly-once sink: what a dead run wrote is not written again, and dead letters."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from connectors.kafka.client import (
    BrokerUnavailable,
    Cluster,
    KafkaFailure,
    Producer,
    RecordTooLarge,
    read_all,
)
from connectors.kafka.dead_letters import dead_letter, fits
from connectors.kafka.sink import LogSink, Outgoing, SinkPart, SinkState
from connectors.kafka.topics import ensure_topics
from connectors.records import Origin
from tests.broker_process import BrokerProcess


def out(key: str, payload: str = "first") -> Outgoing:
    return Outgoing(key=key, value=f"{key} {payload}".encode(), headers={"kind": "group"})


def part(cluster: Cluster, state: SinkState | None = None, writer: str = "rollout") -> SinkPart:
    sink = LogSink(cluster, "rollouts", writer)
    name = sink.list_parts()[sink.part_fn("1")]
    return sink.build_part("step", name, pickle.loads(pickle.dumps(state)))


def stored(sink: SinkPart, *values: Outgoing) -> SinkPart:
    """Writes them, and then dies before the snapshot is kept."""
    sink.write_batch(list(values))
    sink.snapshot()
    return sink


def written(cluster: Cluster) -> list[str]:
    return [r.value.decode() for r in read_all(cluster, cluster.topic("rollouts"), [1])]


def test_a_record_carries_its_key_its_headers_and_its_writer(cluster: Cluster) -> None:
    ensure_topics(cluster, {"rollouts": 2})
    sink = part(cluster)
    sink.write_batch([out("a"), out("b")])
    sink.write_batch([])
    assert sink.snapshot() == (2, ())
    sink.close()
    first, second = read_all(cluster, cluster.topic("rollouts"), [0, 1])
    assert (first.partition, first.key, first.value) == (1, b"a", b"a first")
    assert first.headers == {"kind": "group", "writer": "rollout"}
    assert second.key == b"b"


def test_what_a_dead_run_wrote_after_its_snapshot_is_not_written_again(cluster: Cluster) -> None:
    ensure_topics(cluster, {"rollouts": 2})
    dead = part(cluster)
    dead.write_batch([out("a")])
    state = dead.snapshot()
    stored(dead, out("b"), out("c"))
    stored(part(cluster, state), *(out(key, "again") for key in "cdb"))
    assert written(cluster) == ["a first", "b first", "c first", "d again"]


def test_keys_not_generated_again_survive_a_second_kill(cluster: Cluster) -> None:
    """The read-back of the second restart starts after them: only the snapshot knows them."""
    ensure_topics(cluster, {"rollouts": 2})
    stored(part(cluster), out("a"), out("b"), out("c"))
    second = part(cluster)
    second.write_batch([out("b", "again")])
    state = second.snapshot()
    assert state == (3, ("a", "c"))
    stored(second, out("d", "again"))
    third = stored(part(cluster, state), *(out(key, "third") for key in "adce"))
    assert written(cluster) == ["a first", "b first", "c first", "d again", "e third"]
    assert third.snapshot() == (5, ())


def test_records_of_other_writers_are_left_alone(cluster: Cluster) -> None:
    ensure_topics(cluster, {"rollouts": 2})
    stored(part(cluster, writer="near-line"), out("a", "near-line"))
    producer = Producer(cluster)
    producer.append(cluster.topic("rollouts"), 1, b"by hand")
    producer.append(cluster.topic("rollouts"), 1, b"a by hand", key=b"a")
    stored(part(cluster), out("a"))
    assert written(cluster) == ["a near-line", "by hand", "a by hand", "a first"]


def test_a_delivery_error_is_raised(cluster: Cluster) -> None:
    ensure_topics(cluster, {"rollouts": 2})
    sink = part(replace(cluster, max_message_bytes=1 << 16))
    with pytest.raises(RecordTooLarge):
        sink.write_batch([Outgoing(key="a", value=os.urandom(1 << 17))])
    with pytest.raises(KafkaFailure, match="does not exist"):
        LogSink(cluster, "nothing", "w").list_parts()


def test_no_snapshot_is_taken_of_what_the_broker_did_not_acknowledge(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "broker")
    cluster = Cluster(bootstrap_servers=broker.bootstrap, unavailable_s=2.0)
    ensure_topics(cluster, {"rollouts": 2})
    sink = stored(part(cluster), out("a"))
    broker.kill9()
    sink.write_batch([out("b")])  # returns at once
    with pytest.raises(BrokerUnavailable):
        sink.snapshot()


def test_parts_share_a_connection_that_ends_with_the_last_of_them(cluster: Cluster) -> None:
    ensure_topics(cluster, {"rollouts": 2})
    sink = LogSink(cluster, "rollouts", "w")
    first, second, idle = (sink.build_part("step", sink.list_parts()[p], None) for p in (0, 1, 1))
    for number in range(3):
        first.write_batch([out(f"a{number}")])
    second.write_batch([out("b")])
    assert (second.snapshot(), first.snapshot(), idle.snapshot()) == ((1, ()), (3, ()), (0, ()))
    first.close()
    second.write_batch([out("c")])
    assert second.snapshot() == (2, ())
    second.close()
    again = sink.build_part("step", sink.list_parts()[0], (3, ()))
    again.write_batch([out("d")])
    assert again.snapshot() == (4, ())
    again.close()
    assert written(cluster) == ["b first", "c first"]


def test_parts_beyond_nine_keep_their_partition(cluster: Cluster) -> None:
    """bytewax picks the part by its place in the order of names."""
    ensure_topics(cluster, {"rollouts": 12})
    sink = LogSink(cluster, "rollouts", "w")
    names = sink.list_parts()
    assert names == sorted(names)
    assert [int(names[sink.part_fn(str(partition))]) for partition in range(12)] == list(range(12))


def test_a_dead_letter_holds_the_original_bytes_and_the_reason(cluster: Cluster) -> None:
    origin = Origin(cluster.topic("prompts"), 1, 7)
    letter = dead_letter(cluster, origin, b"{not json", code="not_json", message="at byte 1")
    assert letter == Outgoing(
        key=str(origin),
        value=b"{not json",
        headers={"code": "not_json", "message": "at byte 1", "origin": str(origin)},
    )


def test_a_dead_letter_that_fits_no_message_becomes_a_reference(cluster: Cluster) -> None:
    small = replace(cluster, max_message_bytes=1 << 16)
    ensure_topics(small, {"rollouts": 2})
    origin = Origin("prompts", 1, 7)
    sink = part(small, writer="dead")
    largest = 0
    for size in range((1 << 16) - 3000, (1 << 16) + 1, 97):
        message = "é" * 5000
        letter = dead_letter(small, origin, os.urandom(size), code="too_large", message=message)
        assert fits(small, letter)
        if "reference" in letter.headers:
            assert msgspec.json.decode(letter.value) == {"origin": "prompts/1/7", "bytes": size}
        else:
            largest = size
        stored(sink, letter)  # the broker takes whatever `fits`
    assert largest > (1 << 16) - 3000
