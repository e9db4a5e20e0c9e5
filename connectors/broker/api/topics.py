"""CreateTopics, DeleteTopics, DeleteRecords and DescribeConfigs."""

from __future__ import annotations

from typing import Any

from kafka.protocol.admin import (
    CreateTopicsResponse,
    DeleteRecordsResponse,
    DeleteTopicsResponse,
    DescribeConfigsResponse,
)

from connectors.broker.errors import ErrorCode, Refused
from connectors.broker.protocol import Call, Reply
from connectors.broker.topics import DEFAULT_CONFIGS

_Created = CreateTopicsResponse.CreatableTopicResult
_Deleted = DeleteTopicsResponse.DeletableTopicResult
_TrimmedTopic = DeleteRecordsResponse.DeleteRecordsTopicResult
_Trimmed = _TrimmedTopic.DeleteRecordsPartitionResult
_Described = DescribeConfigsResponse.DescribeConfigsResult
_Setting = _Described.DescribeConfigsResourceResult

DEFAULT_PARTITIONS = 1
TOPIC_RESOURCE, NODE_RESOURCE = 2, 4
SET_FOR_TOPIC, DEFAULT = 1, 5  # a setting's source


async def create_topics(call: Call, request: Any) -> Reply:
    created = []
    for wanted in request.topics:
        code, message = ErrorCode.NONE, None
        num_partitions = (
            wanted.num_partitions if wanted.num_partitions != -1 else DEFAULT_PARTITIONS
        )
        configs = {config.name: config.value for config in wanted.configs}
        try:
            if wanted.assignments:
                raise Refused(ErrorCode.INVALID_REQUEST, "replica assignments are not supported")
            if wanted.replication_factor not in (1, -1):
                raise Refused(
                    ErrorCode.INVALID_REPLICATION_FACTOR,
                    f"this broker keeps 1 replica, got {wanted.replication_factor}",
                )
            if request.validate_only:
                call.broker.topics.check_new(wanted.name, num_partitions, configs)
            else:
                call.broker.topics.create(wanted.name, num_partitions, configs)
        except Refused as refused:
            code, message = refused.code, refused.message
        except OSError as error:
            code, message = ErrorCode.KAFKA_STORAGE_ERROR, error.strerror
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


async def delete_topics(call: Call, request: Any) -> Reply:
    deleted = []
    for name in request.topic_names:
        code, message = ErrorCode.NONE, None
        try:
            call.broker.topics.delete(name)
        except Refused as refused:
            code, message = refused.code, refused.message
        except OSError as error:
            code, message = ErrorCode.KAFKA_STORAGE_ERROR, error.strerror
        deleted.append(_Deleted(name=name, error_code=code, error_message=message))
    return Reply(DeleteTopicsResponse(throttle_time_ms=0, responses=deleted))


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


async def describe_configs(call: Call, request: Any) -> Reply:
    """Settings of topics; a node has none that could differ from topic to topic."""
    described = []
    for resource in request.resources:
        code, message, settings = ErrorCode.NONE, None, []
        if resource.resource_type == TOPIC_RESOURCE:
            topic = call.broker.topics.get(resource.resource_name)
            if topic is None:
                code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                message = f"there is no topic {resource.resource_name!r}"
            else:
                settings = _settings(dict(topic.configs), resource.configuration_keys)
        elif resource.resource_type != NODE_RESOURCE:
            code, message = ErrorCode.INVALID_REQUEST, "only topics and nodes have settings"
        described.append(
            _Described(
                error_code=code,
                error_message=message,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
                configs=settings,
            )
        )
    return Reply(DescribeConfigsResponse(throttle_time_ms=0, results=described))


def _settings(configs: dict[str, str], wanted: list[str] | None) -> list[Any]:
    values = DEFAULT_CONFIGS | configs
    return [
        _Setting(
            name=name,
            value=value,
            read_only=False,
            config_source=SET_FOR_TOPIC if name in configs else DEFAULT,
            is_sensitive=False,
            synonyms=[],
            config_type=0,
            documentation=None,
        )
        for name, value in values.items()
        if not wanted or name in wanted
    ]
