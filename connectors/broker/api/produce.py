"""Produce and InitProducerId."""

from __future__ import annotations

from typing import Any

from kafka.protocol.producer import InitProducerIdResponse, ProduceResponse

from connectors.broker.errors import ErrorCode, Refused
from connectors.broker.protocol import Call, MalformedRequest, Reply

_Topic = ProduceResponse.TopicProduceResponse
_Partition = _Topic.PartitionProduceResponse

NO_ACKS = 0
SUPPORTED_ACKS = (NO_ACKS, 1, -1)


async def produce(call: Call, request: Any) -> Reply | None:
    """Stores each partition's batch, in the request's order, before it answers. With acks = 0 there
    is no answer; as a client has no other way to learn of a failure, it then ends the
    connection."""
    topics = []
    failed = False
    for topic in request.topic_data:
        partitions = []
        for data in topic.partition_data:
            stored = await _store(call, request.acks, topic.name, data)
            failed = failed or stored.error_code != ErrorCode.NONE
            partitions.append(stored)
        topics.append(_Topic(name=topic.name, partition_responses=partitions))
    if request.acks != NO_ACKS:
        return Reply(ProduceResponse(responses=topics, throttle_time_ms=0))
    if failed:
        raise MalformedRequest("a batch was refused that was sent with acks = 0")
    return None


async def _store(call: Call, acks: int, topic: str, data: Any) -> Any:
    start_offset = base_offset = append_ms = -1
    code, message = ErrorCode.NONE, None
    try:
        if acks not in SUPPORTED_ACKS:
            raise Refused(ErrorCode.INVALID_REQUIRED_ACKS, f"acks is 0, 1 or all, got {acks}")
        partition = call.broker.topics.partition(topic, data.index)
        start_offset = partition.log.start_offset
        if partition.log.config.append_time:
            append_ms = call.broker.topics.now_ms()
        base_offset = await partition.append(data.records or b"", append_ms)
    except Refused as refused:
        code, message = refused.code, refused.message
    except OSError as error:
        # Clients take this code for passing and send again, so a full disk loses nothing.
        code, message = ErrorCode.KAFKA_STORAGE_ERROR, error.strerror
    return _Partition(
        index=data.index,
        error_code=code,
        base_offset=base_offset,
        log_append_time_ms=append_ms,
        log_start_offset=start_offset,
        record_errors=[],
        error_message=message,
    )


async def init_producer_id(call: Call, request: Any) -> Reply:
    """A new id each time. A producer that asks for its next epoch gets a new id too, as from Kafka:
    its sequence numbers start at 0 either way."""
    code, producer_id, epoch = ErrorCode.NONE, -1, -1
    if request.transactional_id is not None:
        code = ErrorCode.INVALID_REQUEST
    else:
        try:
            producer_id, epoch = call.broker.producer_ids.allocate(), 0
        except OSError:
            code = ErrorCode.KAFKA_STORAGE_ERROR
    return Reply(
        InitProducerIdResponse(
            throttle_time_ms=0, error_code=code, producer_id=producer_id, producer_epoch=epoch
        )
    )
