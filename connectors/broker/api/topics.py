"""CreateTopics, CreatePartitions, DeleteTopics and DeleteRecords."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from kafka.protocol.admin import (
    CreatePartitionsResponse,
    CreateTopicsResponse,
    DeleteRecordsResponse,
    DeleteTopicsResponse,
)

from connectors.broker.errors import ErrorCode, Refused
from connectors.broker.protocol import Call, Reply

_Created = CreateTopicsResponse.CreatableTopicResult
_Enlarged = CreatePartitionsResponse.CreatePartitionsTopicResult
_Deleted = DeleteTopicsResponse.DeletableTopicResult
_TrimmedTopic = DeleteRecordsResponse.DeleteRecordsTopicResult
_Trimmed = _TrimmedTopic.DeleteRecordsPartitionResult

DEFAULT_PARTITIONS = 1


async def outcome(change: Awaitable[object]) -> tuple[ErrorCode, str | None]:
    """How a change went, as an error code and a message."""
    try:
        await change
    except Refused as refused:
        return refused.code, refused.message
    except OSError as error:
        return ErrorCode.KAFKA_STORAGE_ERROR, error.strerror
    return ErrorCode.NONE, None


async def create_topics(call: Call, request: Any) -> Reply:
    created = []
    for wanted in request.topics:
        num_partitions = (
            wanted.num_partitions if wanted.num_partitions != -1 else DEFAULT_PARTITIONS
        )
        code, message = await outcome(
            _create(call, wanted, num_partitions, only_check=request.validate_only)
        )
        created.append(
            _Created(
                name=wanted.name,
                error_code=code,
                error_message=message,
                topic_config_error_code=ErrorCode.NONE,
                num_partitions=num_partitions,
                replication_factor=1,
                configs=[],
            )
        )
    return Reply(CreateTopicsResponse(throttle_time_ms=0, topics=created))


async def _create(call: Call, wanted: Any, num_partitions: int, *, only_check: bool) -> None:
    _refuse_assignments(wanted)
    if wanted.replication_factor not in (1, -1):
        raise Refused(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            f"this broker keeps 1 replica, got {wanted.replication_factor}",
        )
    configs = {config.name: config.value for config in wanted.configs}
    call.broker.topics.check_new(wanted.name, num_partitions, configs)
    if not only_check:
        # Deleting one of that name may have been cut short.
        await call.broker.groups.forget_topic(wanted.name)
        await call.broker.topics.create(wanted.name, num_partitions, configs)


def _refuse_assignments(wanted: Any) -> None:
    if wanted.assignments:
        raise Refused(ErrorCode.INVALID_REQUEST, "replica assignments are not supported")


async def create_partitions(call: Call, request: Any) -> Reply:
    results = []
    for wanted in request.topics:
        code, message = await outcome(_enlarge(call, wanted, only_check=request.validate_only))
        results.append(_Enlarged(name=wanted.name, error_code=code, error_message=message))
    return Reply(CreatePartitionsResponse(throttle_time_ms=0, results=results))


async def _enlarge(call: Call, wanted: Any, *, only_check: bool) -> None:
    _refuse_assignments(wanted)
    await call.broker.topics.add_partitions(wanted.name, wanted.count, only_check=only_check)


async def delete_topics(call: Call, request: Any) -> Reply:
    deleted = []
    for name in request.topic_names:
        code, message = await outcome(_delete(call, name))
        deleted.append(_Deleted(name=name, error_code=code, error_message=message))
    return Reply(DeleteTopicsResponse(throttle_time_ms=0, responses=deleted))


async def _delete(call: Call, name: str) -> None:
    await call.broker.topics.delete(name)
    await call.broker.groups.forget_topic(name)


async def delete_records(call: Call, request: Any) -> Reply:
    topics = []
    for topic in request.topics:
        trimmed = [await _trim(call, topic.name, wanted) for wanted in topic.partitions]
        topics.append(_TrimmedTopic(name=topic.name, partitions=trimmed))
    return Reply(DeleteRecordsResponse(throttle_time_ms=0, topics=topics))


async def _trim(call: Call, topic: str, wanted: Any) -> Any:
    code, start_offset = ErrorCode.NONE, -1
    try:
        partition = call.broker.topics.partition(topic, wanted.partition_index)
        start_offset = await partition.trim(wanted.offset)
    except Refused as refused:
        code = refused.code
    except OSError:
        code = ErrorCode.KAFKA_STORAGE_ERROR
    return _Trimmed(
        partition_index=wanted.partition_index, low_watermark=start_offset, error_code=code
    )
