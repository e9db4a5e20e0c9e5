"""Record batches and a bare connection, for tests that need to say exactly what is sent."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from kafka.protocol.consumer import FetchRequest, FetchResponse
from kafka.protocol.producer import ProduceRequest, ProduceResponse
from kafka.record.default_records import DefaultRecordBatchBuilder
from kafka.record.memory_records import MemoryRecords

READ_UNCOMMITTED = 0
FIRST_MS = 1_700_000_000_000


def batch(
    values: Sequence[bytes],
    *,
    producer_id: int = -1,
    epoch: int = -1,
    sequence: int = -1,
    timestamps_ms: Sequence[int] | None = None,
    transactional: bool = False,
    compression: int = 0,
) -> bytes:
    """One record batch as a producer sends it; `compression` is Kafka's number for the codec."""
    times = timestamps_ms or range(FIRST_MS, FIRST_MS + len(values))
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=compression,
        is_transactional=transactional,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        batch_size=1 << 30,
    )
    for index, (value, at_ms) in enumerate(zip(values, times, strict=True)):
        builder.append(index, timestamp=at_ms, key=None, value=value, headers=[])
    return bytes(builder.build())


def records(data: bytes) -> list[tuple[int, bytes]]:
    """(offset, value) of every record in whole batches; raises when a checksum is wrong."""
    found = []
    batches = MemoryRecords(data)
    while (stored := batches.next_batch()) is not None:
        assert stored.validate_crc()
        found += [(record.offset, record.value) for record in stored]
    return found


class Connection:
    """One TCP connection; `ask` sends one request and waits for its answer."""

    def __init__(self, bootstrap: str, *, receive_buffer_bytes: int | None = None) -> None:
        host, port = bootstrap.split(":")
        self.socket = socket.socket()
        self.socket.settimeout(60)
        if receive_buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.connect((host, int(port)))
        self._num_sent = 0

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.socket.close()

    def send(self, request: Any, version: int) -> None:
        self._num_sent += 1
        request.API_VERSION = version
        request.with_header(correlation_id=self._num_sent)
        self.socket.sendall(request.encode(header=True, framed=True))

    def send_frame(self, frame: bytes) -> None:
        self.socket.sendall(struct.pack(">i", len(frame)) + frame)

    def receive(self, response: Any, version: int) -> Any:
        """The next answer, decoded; ConnectionError if the broker hangs up."""
        (num_bytes,) = struct.unpack(">i", self._exactly(4))
        message = response.decode(self._exactly(num_bytes), version=version, header=True)
        assert message.header.correlation_id == self._num_sent
        return message

    def ask(self, request: Any, response: Any, version: int) -> Any:
        self.send(request, version)
        return self.receive(response, version)

    def hung_up(self) -> bool:
        """Waits for the broker to send something or to end the connection; whether it ended it."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def _exactly(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            piece = self.socket.recv(min(num_bytes - len(data), 1 << 20))
            if not piece:
                raise ConnectionError("the broker ended the connection")
            data += piece
        return bytes(data)

    def produce(self, topic: str, data: bytes, *, partition: int = 0, acks: int = -1) -> Any:
        """The answer for the one partition: error_code, base_offset, ..."""
        message = self.ask(produce_request(topic, data, partition, acks), ProduceResponse, 8)
        return message.responses[0].partition_responses[0]

    def fetch(self, offsets: dict[tuple[str, int], int], **limits: int) -> list[Any]:
        """The answers for the partitions, in the order of `offsets`."""
        return fetched(self.ask(fetch_request(offsets, **limits), FetchResponse, 11))


def produce_request(topic: str, data: bytes, partition: int = 0, acks: int = -1) -> Any:
    kind = ProduceRequest.TopicProduceData
    part = kind.PartitionProduceData(index=partition, records=data)
    return ProduceRequest(
        transactional_id=None,
        acks=acks,
        timeout_ms=10_000,
        topic_data=[kind(name=topic, partition_data=[part])],
    )


def fetch_request(
    offsets: dict[tuple[str, int], int],
    *,
    min_bytes: int = 0,
    max_wait_ms: int = 0,
    max_bytes: int = 1 << 30,
    partition_max_bytes: int = 1 << 30,
    session_id: int = 0,
) -> Any:
    kind = FetchRequest.FetchTopic
    topics = [
        kind(
            topic=topic,
            partitions=[
                kind.FetchPartition(
                    partition=partition,
                    current_leader_epoch=-1,
                    fetch_offset=offset,
                    log_start_offset=-1,
                    partition_max_bytes=partition_max_bytes,
                )
            ],
        )
        for (topic, partition), offset in offsets.items()
    ]
    return FetchRequest(
        replica_id=-1,
        max_wait_ms=max_wait_ms,
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        isolation_level=READ_UNCOMMITTED,
        session_id=session_id,
        session_epoch=-1,
        topics=topics,
        forgotten_topics_data=[],
        rack_id="",
    )


def fetched(message: Any) -> list[Any]:
    return [partition for topic in message.responses for partition in topic.partitions]
