"""What a Kafka client may expect of the embedded broker: one contract, two independent clients, and
any Kafka that HEADWATER_TEST_KAFKA names (see conftest.py)."""

from __future__ import annotations

import os
import threading
import time
import uuid

import pytest

from connectors.broker.errors import ErrorCode
from tests.connectors.broker_clients import (
    LARGEST_BYTES,
    Confluent,
    KafkaPython,
    Received,
    Rejected,
    Sent,
    soon,
)


def values(received: list[Received]) -> list[bytes | None]:
    return [record.value for record in received]


def test_a_created_topic_is_listed_with_its_partitions(client):
    name = f"listed.{uuid.uuid4().hex[:8]}_-Z"
    client.create(name, 3)
    assert soon(lambda: client.topics().get(name) == 3)


def test_a_topic_is_created_once(client, topic):
    with pytest.raises(Rejected) as rejection:
        client.create(topic)
    assert rejection.value.code == ErrorCode.TOPIC_ALREADY_EXISTS


@pytest.mark.parametrize(
    ("name", "num_partitions", "configs", "code"),
    [
        ("no/slashes", 1, {}, ErrorCode.INVALID_TOPIC),
        ("..", 1, {}, ErrorCode.INVALID_TOPIC),
        ("n" * 250, 1, {}, ErrorCode.INVALID_TOPIC),
        ("none", 0, {}, ErrorCode.INVALID_PARTITIONS),
        ("config", 1, {"max.massage.bytes": "1"}, ErrorCode.INVALID_CONFIG),
        ("config", 1, {"max.message.bytes": "many"}, ErrorCode.INVALID_CONFIG),
    ],
)
def test_what_cannot_be_a_topic_is_refused(client, name, num_partitions, configs, code):
    with pytest.raises(Rejected) as rejection:
        client.create(name, num_partitions, configs)
    assert rejection.value.code == code
    assert name not in client.topics()


@pytest.mark.usefixtures("embedded")
@pytest.mark.parametrize(
    ("num_partitions", "configs", "code"),
    [
        (5000, {}, ErrorCode.INVALID_PARTITIONS),
        (1, {"cleanup.policy": "compact"}, ErrorCode.INVALID_CONFIG),
    ],
)
def test_what_the_embedded_broker_does_not_have_is_refused(client, num_partitions, configs, code):
    with pytest.raises(Rejected) as rejection:
        client.create("too-much", num_partitions, configs)
    assert rejection.value.code == code
    assert "too-much" not in client.topics()


def test_configs_are_described_with_their_defaults(client):
    name = f"configured-{uuid.uuid4().hex[:8]}"
    client.create(name, 1, {"max.message.bytes": "12345"})
    described = client.configs(name)
    assert described["max.message.bytes"] == "12345"
    assert described["cleanup.policy"] == "delete"


def test_a_deleted_topic_is_gone_and_may_be_created_anew(client, topic):
    client.produce(topic, [Sent(b"old")])
    client.delete(topic)
    assert soon(lambda: topic not in client.topics())
    with pytest.raises(Rejected) as rejection:
        client.delete(topic)
    assert rejection.value.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    client.create(topic)
    assert client.ends(topic) == (0, 0)


def test_producing_to_an_unknown_topic_fails_and_does_not_create_it(client):
    name = f"unknown-{uuid.uuid4().hex[:8]}"
    with pytest.raises(Rejected) as rejection:
        client.produce(name, [Sent(b"x")])
    assert rejection.value.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert name not in client.topics()


def test_records_come_back_whole_and_in_order(client, topic):
    sent = [
        Sent(b"value", b"key", (("kind", b"group"), ("kind", b"again")), 1_700_000_000_123),
        Sent(b"no key", None, (), 1_700_000_000_124),
        Sent(None, b"tombstone", (), 1_700_000_000_125),
        Sent(b"", b"", (("empty", b""),), 1_700_000_000_126),
    ]
    assert client.produce(topic, sent, partition=1, linger_ms=20) == [0, 1, 2, 3]
    received = client.consume(topic, 4, partition=1)
    assert [record.offset for record in received] == [0, 1, 2, 3]
    assert [Sent(r.value, r.key, r.headers, r.timestamp_ms) for r in received] == sent
    assert client.ends(topic, 0) == (0, 0)


@pytest.mark.parametrize("acks", [1, -1])
def test_acknowledged_offsets_are_where_the_records_are(client, topic, acks):
    offsets = client.produce(topic, [Sent(b"%d" % n) for n in range(50)], acks=acks)
    assert offsets == list(range(50))
    assert values(client.consume(topic, 1, offset=offsets[37])) == [b"37"]


def test_records_sent_without_acknowledgement_are_stored(client, topic):
    client.produce(topic, [Sent(b"%d" % n) for n in range(5)], acks=0)
    assert values(client.consume(topic, 5)) == [b"%d" % n for n in range(5)]


def test_each_compression_passes_through_to_the_other_client(client, topic):
    for compression in client.compressions:
        client.produce(topic, [Sent(b"squeeze " * 500)] * 20, compression=compression, linger_ms=50)
    num_records = 20 * len(client.compressions)
    assert values(client.consume(topic, num_records)) == [b"squeeze " * 500] * num_records
    if set(client.compressions) <= set(KafkaPython.compressions):
        other = Confluent(client.bootstrap)
        assert values(other.consume(topic, num_records)) == [b"squeeze " * 500] * num_records


def test_records_are_stored_as_compressed_as_they_came(client, topic, embedded):
    client.produce(topic, [Sent(b"squeeze " * 500)] * 20, compression="zstd", linger_ms=50)
    stored = sum(f.stat().st_size for f in (embedded.data_dir / "topics" / topic).rglob("*.log"))
    assert 0 < stored < 20 * 2000  # of 4000 bytes each


def test_an_idempotent_producer_writes_in_order(client, topic):
    sent = [Sent(b"%d" % n) for n in range(2000)]
    assert client.produce(topic, sent, idempotent=True) == list(range(2000))
    assert values(client.consume(topic, 2000)) == [record.value for record in sent]


def test_reading_starts_in_the_middle_of_a_batch(client, topic):
    client.produce(topic, [Sent(b"%d" % n) for n in range(10)], linger_ms=50)
    received = client.consume(topic, 3, offset=4)
    assert [(record.offset, record.value) for record in received] == [
        (4, b"4"),
        (5, b"5"),
        (6, b"6"),
    ]


def test_a_waiting_reader_is_woken_by_a_new_record(client, topic):
    """Its fetch waits longer than it has time for: only being woken lets it succeed."""
    received: list[Received] = []

    def read() -> None:
        received.extend(client.consume(topic, 2, max_wait_ms=120_000))

    client.produce(topic, [Sent(b"before")])
    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(1.0)  # lets it reach the end of the log; the result does not depend on it
    client.produce(topic, [Sent(b"after")])
    reader.join(60)
    assert values(received) == [b"before", b"after"]


@pytest.mark.parametrize("offset", [11, 5000])
def test_an_offset_beyond_the_end_is_out_of_range(client, topic, offset):
    client.produce(topic, [Sent(b"x")] * 10)
    with pytest.raises(Rejected) as rejection:
        client.consume(topic, 1, offset=offset)
    assert rejection.value.code == ErrorCode.OFFSET_OUT_OF_RANGE


def test_deleted_records_move_the_start_and_are_out_of_range(client, topic):
    client.produce(topic, [Sent(b"%d" % n) for n in range(10)])
    assert client.delete_records(topic, 6) == 6
    assert client.ends(topic) == (6, 10)
    assert values(client.consume(topic, 4, offset=6)) == [b"6", b"7", b"8", b"9"]
    with pytest.raises(Rejected) as rejection:
        client.consume(topic, 1, offset=5)
    assert rejection.value.code == ErrorCode.OFFSET_OUT_OF_RANGE
    with pytest.raises(Rejected) as rejection:
        client.delete_records(topic, 11)
    assert rejection.value.code == ErrorCode.OFFSET_OUT_OF_RANGE


def test_an_offset_is_found_by_time(client, topic):
    base_ms = 1_700_000_000_000
    sent = [Sent(b"%d" % n, timestamp_ms=base_ms + 1000 * n) for n in range(10)]
    client.produce(topic, sent[:6], linger_ms=50)
    client.produce(topic, sent[6:], linger_ms=50)
    assert client.offset_at(topic, base_ms + 3500) == 4
    assert client.offset_at(topic, base_ms + 8000) == 8
    assert client.offset_at(topic, base_ms + 60_000) is None


def test_the_topics_limit_holds(client):
    name = f"limited-{uuid.uuid4().hex[:8]}"
    client.create(name, 1, {"max.message.bytes": "100000"})
    client.produce(name, [Sent(os.urandom(90_000))])
    with pytest.raises(Rejected) as rejection:
        client.produce(name, [Sent(os.urandom(110_000))])
    assert rejection.value.code == ErrorCode.MESSAGE_TOO_LARGE
    assert client.ends(name) == (0, 1)


def test_a_message_of_64_mib_passes_even_where_the_reader_asks_for_less(client):
    name = f"large-{uuid.uuid4().hex[:8]}"
    client.create(name, 1, {"max.message.bytes": str(LARGEST_BYTES)})
    value = os.urandom(1 << 20) * 64
    client.produce(name, [Sent(b"before"), Sent(value), Sent(b"after")])
    received = client.consume(name, 3)
    assert values(received) == [b"before", value, b"after"]
    client.delete(name)
