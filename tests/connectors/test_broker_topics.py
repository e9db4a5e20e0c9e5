"""Topics and stored records, by two independent clients: partitions, configs, times, retention and
deleted records, also across a restart of the broker and for readers at work."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable

import pytest
from kafka.protocol.consumer import FetchResponse, ListOffsetsRequest, ListOffsetsResponse

from connectors.broker.errors import ErrorCode
from tests.broker_process import BrokerProcess
from tests.connectors.broker_clients import CLIENTS, Client, KafkaPython, Rejected, Sent
from tests.connectors.broker_wire import Connection, batch, fetch_request, fetched, records

DEADLINE_S = 30.0
BASE_MS = 1_700_000_000_000


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def timed(*seconds: int) -> list[Sent]:
    return [Sent(b"%d" % s, timestamp_ms=BASE_MS + 1000 * s) for s in seconds]


@pytest.fixture(params=CLIENTS)
def own_client(request: pytest.FixtureRequest, own_broker: BrokerProcess) -> Client:
    """Of a broker that the test may restart."""
    return CLIENTS[request.param](own_broker.bootstrap)


class TestPartitions:
    def test_a_topic_is_given_more_and_keeps_what_it_has(self, client, topic):
        client.produce(topic, [Sent(b"kept")], partition=1)
        client.add_partitions(topic, 4)
        assert client.topics()[topic] == 4
        client.produce(topic, [Sent(b"new")], partition=3)
        assert client.consume(topic, 1, partition=3)[0].value == b"new"
        assert client.consume(topic, 1, partition=1)[0].value == b"kept"

    @pytest.mark.parametrize("num_partitions", [1, 2])
    def test_it_is_never_given_fewer_or_as_many(self, client, topic, num_partitions):
        with pytest.raises(Rejected) as rejection:
            client.add_partitions(topic, num_partitions)
        assert rejection.value.code == ErrorCode.INVALID_PARTITIONS
        assert client.topics()[topic] == 2

    def test_an_unknown_topic_is_given_none(self, client):
        with pytest.raises(Rejected) as rejection:
            client.add_partitions(f"unknown-{uuid.uuid4().hex[:8]}", 3)
        assert rejection.value.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


class TestConfigs:
    def test_the_ones_named_change_and_the_others_stay(self, client, topic):
        client.set_configs(topic, {"retention.ms": "86400000", "max.message.bytes": "50000"})
        client.set_configs(topic, {"retention.bytes": "1000000000", "retention.ms": None})
        described = client.configs(topic)
        assert described["max.message.bytes"] == "50000"
        assert described["retention.bytes"] == "1000000000"
        assert described["retention.ms"] != "86400000"

    def test_replacing_them_resets_those_not_given(self, client, topic):
        client.set_configs(topic, {"retention.ms": "86400000"})
        client.replace_configs(topic, {"max.message.bytes": "50000"})
        described = client.configs(topic)
        assert described["max.message.bytes"] == "50000"
        assert described["retention.ms"] != "86400000"

    def test_a_changed_limit_holds_at_once(self, client, topic):
        client.produce(topic, [Sent(os.urandom(20_000))])
        client.set_configs(topic, {"max.message.bytes": "10000"})
        with pytest.raises(Rejected) as rejection:
            client.produce(topic, [Sent(os.urandom(20_000))])
        assert rejection.value.code == ErrorCode.MESSAGE_TOO_LARGE

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("retention.ms", "-2"),
            ("retention.ms", "1.5"),
            ("retention.bytes", "1_000"),
            ("segment.bytes", "0"),
            ("segment.ms", "0"),
            ("message.timestamp.type", "Yesterday"),
            ("cleanup.policy", "keep"),
            ("no.such.config", "1"),
        ],
    )
    def test_a_value_that_breaks_kafkas_rules_changes_nothing(self, client, topic, name, value):
        for change in (client.set_configs, client.replace_configs):
            with pytest.raises(Rejected) as rejection:
                change(topic, {name: value, "max.message.bytes": "50000"})
            assert rejection.value.code == ErrorCode.INVALID_CONFIG
        assert client.configs(topic)["max.message.bytes"] != "50000"

    def test_only_a_list_can_be_appended_to(self, broker):
        client = KafkaPython(broker.bootstrap)
        client.create(name := f"listed-{uuid.uuid4().hex[:8]}")
        client._alter(name, {"cleanup.policy": ("APPEND", "delete")}, incremental=True)
        for change in (
            {"cleanup.policy": ("APPEND", "compact")},
            {"cleanup.policy": ("SUBTRACT", "delete")},
            {"retention.ms": ("APPEND", "5")},
        ):
            with pytest.raises(Rejected) as rejection:
                client._alter(name, change, incremental=True)
            assert rejection.value.code == ErrorCode.INVALID_CONFIG
        assert client.configs(name)["cleanup.policy"] == "delete"

    @pytest.mark.usefixtures("embedded")
    def test_compaction_is_refused_in_every_way_to_ask_for_it(self, client, topic):
        for change in (client.set_configs, client.replace_configs):
            with pytest.raises(Rejected) as rejection:
                change(topic, {"cleanup.policy": "compact"})
            assert rejection.value.code == ErrorCode.INVALID_CONFIG

    def test_partitions_and_configs_outlive_the_broker(self, own_client, own_broker):
        own_client.create("t", 1, {"segment.bytes": "2048"})
        own_client.add_partitions("t", 3)
        own_client.set_configs("t", {"retention.ms": "123456789012"})
        own_broker.restart()
        assert own_client.topics() == {"t": 3}
        described = own_client.configs("t")
        assert (described["segment.bytes"], described["retention.ms"]) == ("2048", "123456789012")


class TestTimes:
    @pytest.mark.parametrize("compression", ["none", "gzip", "lz4", "snappy", "zstd"])
    def test_an_offset_is_found_inside_a_compressed_batch(self, client, topic, compression):
        client.produce(topic, timed(*range(10)), compression=compression, linger_ms=50)
        assert client.offset_at(topic, BASE_MS + 3500) == 4
        assert client.offset_at(topic, BASE_MS + 9000) == 9
        assert client.offset_at(topic, BASE_MS + 9001) is None

    def test_times_out_of_order_give_the_first_offset_that_late(self, client, topic):
        for each in timed(5, 1, 9, 3, 9, 2):
            client.produce(topic, [each])
        found = [client.offset_at(topic, BASE_MS + 1000 * s) for s in (0, 5, 6, 9, 10)]
        assert found == [0, 0, 2, 2, None]
        assert client.newest(topic) == (2, BASE_MS + 9000)

    def test_an_empty_partition_has_none(self, client, topic):
        assert client.offset_at(topic, 0) is None
        assert client.newest(topic) == (-1, -1)

    def test_deleted_records_are_not_found_in_the_middle_of_a_batch_either(self, client, topic):
        client.produce(topic, timed(1, 9, 2, 3), compression="gzip", linger_ms=50)
        client.delete_records(topic, 2)
        assert client.offset_at(topic, BASE_MS) == 2
        assert client.offset_at(topic, BASE_MS + 3000) == 3
        assert client.offset_at(topic, BASE_MS + 4000) is None
        assert client.newest(topic) == (3, BASE_MS + 3000)

    def test_they_are_found_after_a_restart_and_over_segments(self, own_client, own_broker):
        own_client.create("t", 1, {"segment.bytes": "1024"})
        for second in (4, 1, 7, 2):
            at_ms = BASE_MS + 1000 * second
            own_client.produce("t", [Sent(b"x" * 1000, timestamp_ms=at_ms)])
        own_client.delete_records("t", 1)
        own_broker.restart()
        found = [own_client.offset_at("t", BASE_MS + 1000 * s) for s in (0, 2, 5, 8)]
        assert found == [1, 2, 2, None]
        assert own_client.newest("t") == (2, BASE_MS + 7000)

    def test_a_topic_may_take_the_brokers_time(self, client):
        name = f"dated-{uuid.uuid4().hex[:8]}"
        client.create(name, 1, {"message.timestamp.type": "LogAppendTime"})
        before_ms = 1000 * int(time.time())
        client.produce(name, timed(1, 2), compression="zstd", linger_ms=50)
        received = client.consume(name, 2)
        assert [record.value for record in received] == [b"1", b"2"]
        assert all(record.timestamp_ms >= before_ms for record in received)
        assert client.offset_at(name, before_ms) == 0

    @pytest.mark.parametrize(("version", "code"), [(6, 35), (7, 0)])
    def test_the_latest_time_is_asked_for_in_the_versions_that_have_it(self, broker, version, code):
        name = f"asked-{uuid.uuid4().hex[:8]}"
        KafkaPython(broker.bootstrap).create(name)
        kind = ListOffsetsRequest.ListOffsetsTopic
        wanted = kind.ListOffsetsPartition(partition_index=0, current_leader_epoch=-1, timestamp=-3)
        topics = [kind(name=name, partitions=[wanted])]
        with Connection(broker.bootstrap) as connection:
            connection.produce(name, batch([b"a", b"b"], timestamps_ms=[8, 5]))
            request = ListOffsetsRequest(replica_id=-1, isolation_level=0, topics=topics)
            answer = connection.ask(request, ListOffsetsResponse, version)
        (listed,) = answer.topics[0].partitions
        assert listed.error_code == code
        assert (listed.offset, listed.timestamp) == ((0, 8) if code == 0 else (-1, -1))


@pytest.mark.usefixtures("embedded")
class TestRetention:
    """Of the embedded broker, which looks each second; Kafka does every five minutes."""

    def test_old_records_go_and_their_readers_are_told(self, client):
        name = f"aging-{uuid.uuid4().hex[:8]}"
        client.create(name, 1, {"segment.bytes": "1024"})
        old_ms = 1000 * int(time.time()) - 60_000
        for number in range(6):
            at_ms = old_ms if number < 4 else old_ms + 3_600_000
            client.produce(name, [Sent(b"%d" % number * 1000, timestamp_ms=at_ms)])
        client.set_configs(name, {"retention.ms": "30000"})
        until(lambda: client.ends(name) == (4, 6))
        with pytest.raises(Rejected) as rejection:
            client.consume(name, 1, offset=3)
        assert rejection.value.code == ErrorCode.OFFSET_OUT_OF_RANGE
        assert [r.value for r in client.consume(name, 2, offset=4)] == [b"4" * 1000, b"5" * 1000]

    def test_everything_may_go_and_offsets_go_on(self, client, topic):
        client.produce(topic, timed(1, 2, 3))
        client.set_configs(topic, {"retention.ms": "1000"})
        until(lambda: client.ends(topic) == (3, 3))
        client.set_configs(topic, {"retention.ms": None})
        assert client.produce(topic, timed(4)) == [3]

    def test_a_partition_is_held_to_its_bytes(self, client, embedded):
        name = f"bounded-{uuid.uuid4().hex[:8]}"
        client.create(name, 2, {"segment.bytes": "2048", "retention.bytes": "6000"})
        for number in range(20):
            client.produce(name, [Sent(b"%02d" % number * 500)], partition=1)
        until(lambda: client.ends(name, 1)[0] >= 14)
        start, end = client.ends(name, 1)
        assert end == 20
        assert client.consume(name, 1, partition=1, offset=start)[0].value == b"%02d" % start * 500
        files = (embedded.data_dir / "topics" / name / "1").glob("*.log")
        assert 6000 <= sum(file.stat().st_size for file in files) < 6000 + 2048 + 1100


class TestDeletedRecords:
    def test_the_start_outlives_the_broker_and_old_offsets_stay_out_of_range(
        self, own_client, own_broker
    ):
        own_client.create("t", 1, {"segment.bytes": "1024"})
        for number in range(8):
            own_client.produce("t", [Sent(b"%d" % number * 1000)])
        assert own_client.delete_records("t", 5) == 5
        for _ in range(2):
            own_broker.restart()
            assert own_client.ends("t") == (5, 8)
            assert own_client.delete_records("t", 3) == 5  # it never moves back
            with pytest.raises(Rejected) as rejection:
                own_client.consume("t", 1, offset=4)
            assert rejection.value.code == ErrorCode.OFFSET_OUT_OF_RANGE
            assert [r.value for r in own_client.consume("t", 3, offset=5)] == [
                b"%d" % number * 1000 for number in (5, 6, 7)
            ]
        assert own_client.delete_records("t", -1) == 8
        own_broker.restart()
        assert own_client.produce("t", [Sent(b"next")]) == [8]

    def test_an_answer_under_way_is_whole_though_its_segments_are_removed(self, broker):
        """Its client has begun to read, and reads on when the files are gone."""
        name = f"under-way-{uuid.uuid4().hex[:8]}"
        client = KafkaPython(broker.bootstrap)
        client.create(name, 1, {"max.message.bytes": str(9 << 20), "segment.bytes": "1024"})
        value = os.urandom(8 << 20)
        slow = Connection(broker.bootstrap, receive_buffer_bytes=1 << 16)
        with slow, Connection(broker.bootstrap) as other:
            for _ in range(2):
                other.produce(name, batch([value]))
            slow.send(fetch_request({(name, 0): 0}), 11)
            slow.socket.recv(1, 0x2)  # MSG_PEEK: the answer has begun
            assert client.delete_records(name, 1) == 1
            (gone,) = other.fetch({(name, 0): 0})
            assert gone.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
            assert len(list((broker.data_dir / "topics" / name / "0").glob("*.log"))) == 1
            (answer,) = fetched(slow.receive(FetchResponse, 11))
            assert records(answer.records) == [(0, value)]

    def test_a_waiting_reader_is_told_when_its_offset_goes(self, broker, topic):
        with Connection(broker.bootstrap) as waiting, Connection(broker.bootstrap) as other:
            other.produce(topic, batch([b"little"]))
            waiting.send(fetch_request({(topic, 0): 0}, min_bytes=1 << 20, max_wait_ms=120_000), 11)
            other.produce(topic, batch([b"still little"]))
            KafkaPython(broker.bootstrap).delete_records(topic, 1)
            (answer,) = fetched(waiting.receive(FetchResponse, 11))
            assert answer.error_code == ErrorCode.OFFSET_OUT_OF_RANGE


class TestDeletingTopics:
    def test_waiting_readers_of_it_are_told(self, client, topic):
        codes: list[int] = []

        def read() -> None:
            with Connection(client.bootstrap) as connection:
                (answer,) = connection.fetch({(topic, 1): 0}, min_bytes=1, max_wait_ms=120_000)
                codes.append(answer.error_code)

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        time.sleep(0.2)  # lets them reach the broker; either way they must end
        client.delete(topic)
        for reader in readers:
            reader.join(DEADLINE_S)
        assert codes == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION] * 3

    def test_one_of_the_same_name_has_nothing_of_it(self, own_client, own_broker):
        for round_number in range(3):
            own_client.create("t", 2)
            sent = [Sent(b"%d" % round_number)] * (3 - round_number)
            assert own_client.produce("t", sent, idempotent=True)[-1] == len(sent) - 1
            received = own_client.consume("t", len(sent))
            assert [record.value for record in received] == [each.value for each in sent]
            own_client.delete("t")
        own_broker.restart()
        assert own_client.topics() == {}
