"""What no client library lets one say: limits, malformed requests, clients that do not read."""

from __future__ import annotations

import os
import struct
import threading
import uuid

import psutil
import pytest
from kafka.protocol.admin import CreateTopicsRequest, CreateTopicsResponse
from kafka.protocol.consumer import FetchResponse
from kafka.protocol.metadata import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    MetadataRequest,
    MetadataResponse,
)
from kafka.protocol.producer import InitProducerIdRequest, InitProducerIdResponse

from connectors.broker.errors import ErrorCode
from tests.broker_process import BrokerProcess
from tests.connectors.broker_clients import KafkaPython
from tests.connectors.broker_wire import (
    Connection,
    batch,
    fetch_request,
    fetched,
    produce_request,
    records,
)


@pytest.fixture
def topic(broker: BrokerProcess) -> str:
    name = f"protocol-{uuid.uuid4().hex[:12]}"
    KafkaPython(broker.bootstrap).create(name, 2, {"max.message.bytes": str(66 << 20)})
    return name


@pytest.fixture
def connection(broker: BrokerProcess):
    with Connection(broker.bootstrap) as connection:
        yield connection


def api_versions(version: int = 0):
    return ApiVersionsRequest(
        client_software_name="test", client_software_version="1", version=version
    )


class TestFetch:
    def test_limits_give_whole_batches_and_at_least_one(self, connection, topic):
        size = len(batch([b"x" * 100]))
        for _ in range(5):
            connection.produce(topic, batch([b"x" * 100]))
        for limit, num_batches in [
            (0, 1),
            (size - 1, 1),
            (size, 1),
            (2 * size, 2),
            (3 * size - 1, 2),
        ]:
            (answer,) = connection.fetch({(topic, 0): 1}, partition_max_bytes=limit)
            assert len(answer.records) == num_batches * size
            (answer,) = connection.fetch({(topic, 0): 1}, max_bytes=limit)
            assert len(answer.records) == num_batches * size
        assert answer.high_watermark == answer.last_stable_offset == 5

    def test_the_total_holds_over_partitions_but_the_first_batch_always_comes(
        self, connection, topic
    ):
        size = len(batch([b"x" * 100]))
        for partition in (0, 1):
            for _ in range(3):
                connection.produce(topic, batch([b"x" * 100]), partition=partition)
        both = {(topic, 0): 0, (topic, 1): 0}
        first, second = connection.fetch(both, max_bytes=1)
        assert (len(first.records), len(second.records)) == (size, 0)
        first, second = connection.fetch(both, max_bytes=4 * size)
        assert (len(first.records), len(second.records)) == (3 * size, size)
        # A partition whose next batch exceeds its own limit is not starved by one before it.
        first, second = connection.fetch(both, partition_max_bytes=1)
        assert (len(first.records), len(second.records)) == (size, size)

    def test_it_waits_for_min_bytes_and_gives_what_there_is_when_time_is_up(
        self, connection, topic
    ):
        connection.produce(topic, batch([b"little"]))
        (answer,) = connection.fetch({(topic, 0): 0}, min_bytes=1 << 20, max_wait_ms=50)
        assert records(answer.records) == [(0, b"little")]
        (answer,) = connection.fetch({(topic, 0): 1}, min_bytes=1, max_wait_ms=50)
        assert answer.records == b""

    def test_it_answers_when_the_bytes_of_all_its_partitions_suffice(
        self, broker, connection, topic
    ):
        size = len(batch([b"x"]))
        request = fetch_request(
            {(topic, 0): 0, (topic, 1): 0}, min_bytes=2 * size, max_wait_ms=120_000
        )
        connection.send(request, 11)
        with Connection(broker.bootstrap) as producer:
            producer.produce(topic, batch([b"x"]), partition=0)
            producer.produce(topic, batch([b"y"]), partition=1)
        first, second = fetched(connection.receive(FetchResponse, 11))
        assert (records(first.records), records(second.records)) == ([(0, b"x")], [(0, b"y")])

    def test_a_failing_partition_answers_at_once(self, connection, topic):
        answers = connection.fetch(
            {(topic, 0): 0, (topic, 7): 0, ("no-such", 0): 0, (topic, 1): 9},
            min_bytes=1,
            max_wait_ms=120_000,
        )
        assert [answer.error_code for answer in answers] == [
            ErrorCode.NONE,
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            ErrorCode.OFFSET_OUT_OF_RANGE,
        ]

    def test_deleting_the_topic_ends_the_wait(self, broker, connection, topic):
        connection.send(fetch_request({(topic, 0): 0}, min_bytes=1, max_wait_ms=120_000), 11)
        KafkaPython(broker.bootstrap).delete(topic)
        (answer,) = fetched(connection.receive(FetchResponse, 11))
        assert answer.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    def test_a_session_that_is_not_kept_is_said_so(self, connection, topic):
        request = fetch_request({(topic, 0): 0}, session_id=42)
        answer = connection.ask(request, FetchResponse, 11)
        assert answer.error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND

    @pytest.mark.parametrize("version", range(4, 12))
    def test_each_version_carries_the_records(self, connection, topic, version):
        connection.produce(topic, batch([b"a", b"b"]))
        answer = connection.ask(fetch_request({(topic, 0): 0}), FetchResponse, version)
        assert records(fetched(answer)[0].records) == [(0, b"a"), (1, b"b")]


class TestProduce:
    @pytest.mark.parametrize(
        ("data", "code"),
        [
            pytest.param(batch([b"x"])[:-1] + b"?", ErrorCode.CORRUPT_MESSAGE, id="changed"),
            pytest.param(b"", ErrorCode.CORRUPT_MESSAGE, id="nothing"),
            pytest.param(batch([b"x"]) * 2, ErrorCode.INVALID_RECORD, id="two batches"),
        ],
    )
    def test_a_damaged_batch_is_refused_and_not_stored(self, connection, topic, data, code):
        answer = connection.produce(topic, data)
        assert (answer.error_code, answer.base_offset) == (code, -1)
        assert connection.produce(topic, batch([b"next"])).base_offset == 0

    def test_other_acks_are_refused(self, connection, topic):
        answer = connection.produce(topic, batch([b"x"]), acks=2)
        assert answer.error_code == ErrorCode.INVALID_REQUIRED_ACKS
        assert connection.produce(topic, batch([b"next"])).base_offset == 0

    def test_a_refusal_nobody_waits_for_ends_the_connection(self, connection, topic):
        connection.send(produce_request(topic, b"damaged", acks=0), 8)
        assert connection.hung_up()

    def test_requests_sent_ahead_are_answered_in_order(self, connection, topic):
        for number in range(20):
            data = batch([b"%d" % number], producer_id=1, epoch=0, sequence=number)
            connection.send(produce_request(topic, data, acks=0), 8)
        (answer,) = connection.fetch({(topic, 0): 0})
        assert [value for _, value in records(answer.records)] == [b"%d" % n for n in range(20)]


def test_producer_ids_are_never_given_twice(own_broker):
    given = []
    for _ in range(2):
        with Connection(own_broker.bootstrap) as connection:
            for version in range(5):
                request = InitProducerIdRequest(
                    transactional_id=None,
                    transaction_timeout_ms=0,
                    producer_id=given[0] if given else -1,
                    producer_epoch=0,
                )
                answer = connection.ask(request, InitProducerIdResponse, version)
                assert (answer.error_code, answer.producer_epoch) == (ErrorCode.NONE, 0)
                given.append(answer.producer_id)
        own_broker.restart()
    assert len(set(given)) == 10


@pytest.mark.parametrize("version", range(4))
def test_the_announced_versions_are_those_answered(connection, version):
    answer = connection.ask(api_versions(), ApiVersionsResponse, version)
    announced = {api.api_key: (api.min_version, api.max_version) for api in answer.api_keys}
    assert announced[ApiVersionsRequest.API_KEY] == (0, 3)
    low, high = announced[MetadataRequest.API_KEY]
    for metadata_version in range(low, high + 1):
        request = MetadataRequest(topics=[], allow_auto_topic_creation=False)
        assert connection.ask(request, MetadataResponse, metadata_version).brokers
    low, high = announced[CreateTopicsRequest.API_KEY]
    for create_version in range(low, high + 1):
        wanted = CreateTopicsRequest.CreatableTopic(
            name=f"v{create_version}",
            num_partitions=-1,
            replication_factor=-1,
            assignments=[],
            configs=[],
        )
        request = CreateTopicsRequest(topics=[wanted], timeout_ms=1000, validate_only=True)
        answer = connection.ask(request, CreateTopicsResponse, create_version)
        assert answer.topics[0].error_code == ErrorCode.NONE


def test_an_unknown_version_of_api_versions_is_answered_with_the_known_ones(connection):
    connection.send_frame(struct.pack(">hhih", ApiVersionsRequest.API_KEY, 99, 7, -1))
    connection._num_sent = 7
    answer = connection.receive(ApiVersionsResponse, 0)
    assert answer.error_code == ErrorCode.UNSUPPORTED_VERSION
    assert answer.api_keys


def framed(num_bytes: int, api_key: int, version: int, body: bytes = b"") -> bytes:
    return struct.pack(">ihhih", num_bytes, api_key, version, 1, -1) + body


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(struct.pack(">i", -5), id="a negative length"),
        pytest.param(struct.pack(">i", 0), id="no length"),
        pytest.param(struct.pack(">i", (1 << 31) - 1), id="a length beyond the limit"),
        pytest.param(struct.pack(">i", 3) + b"abc", id="shorter than a header"),
        pytest.param(framed(10, 3, 99), id="an unknown version"),
        pytest.param(framed(10, 777, 0), id="an unknown API"),
        pytest.param(framed(20, 1, 11, bytes(10)), id="a Fetch that ends early"),
        pytest.param(framed(60, 0, 8, b"\xff" * 50), id="a Produce of noise"),
        pytest.param(framed(60, 18, 3, b"\xff" * 50), id="endless tagged fields"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", id="HTTP"),
    ],
)
def test_what_is_no_request_ends_its_connection_and_no_other(broker, connection, sent):
    with Connection(broker.bootstrap) as stranger:
        stranger.socket.sendall(sent)
        assert stranger.hung_up()
    assert connection.ask(api_versions(), ApiVersionsResponse, 0).error_code == ErrorCode.NONE
    assert broker.alive


def test_clients_that_do_not_read_cost_no_memory_and_hold_up_nobody(own_broker):
    """Eight of them ask for 64 MiB each and read none of it."""
    client = KafkaPython(own_broker.bootstrap)
    client.create("large", 1, {"max.message.bytes": str(66 << 20)})
    with Connection(own_broker.bootstrap) as producer:
        value = os.urandom(1 << 20) * 8
        for _ in range(8):
            assert producer.produce("large", batch([value])).error_code == ErrorCode.NONE
    process = psutil.Process(own_broker.pid)
    before_bytes = process.memory_info().rss
    slow = [Connection(own_broker.bootstrap, receive_buffer_bytes=1 << 16) for _ in range(8)]
    try:
        for connection in slow:
            connection.send(fetch_request({("large", 0): 0}), 11)
            connection.socket.recv(1)  # the answer has begun
        with Connection(own_broker.bootstrap) as other:
            (answer,) = other.fetch({("large", 0): 7})
            assert len(answer.records) > len(value)
        assert process.memory_info().rss - before_bytes < 64 << 20
    finally:
        for connection in slow:
            connection.socket.close()
    assert own_broker.stop() == 0
    assert own_broker.log_file.read_text() == ""


def test_others_are_served_while_large_messages_are_written_and_read(broker, topic):
    """A connection asks for metadata over and over while 64 MiB go in and out on another."""
    done = threading.Event()
    failures: list[Exception] = []
    data = batch([os.urandom(1 << 20) * 63])

    def move() -> None:
        try:
            with Connection(broker.bootstrap) as large:
                assert large.produce(topic, data).error_code == ErrorCode.NONE
                (answer,) = large.fetch({(topic, 0): 0})
                assert len(answer.records) == len(data)
        except Exception as error:
            failures.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=move)
    thread.start()
    num_answered = 0
    with Connection(broker.bootstrap) as small:
        while not done.is_set():
            small.ask(api_versions(), ApiVersionsResponse, 0)
            num_answered += 1
    thread.join()
    assert not failures
    assert num_answered > 20
