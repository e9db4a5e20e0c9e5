"""DescribeConfigs, AlterConfigs and IncrementalAlterConfigs: of topics; a node has no settings that
could differ from topic to topic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import partial
from typing import Any

from kafka.protocol.admin import (
    AlterConfigsResponse,
    DescribeConfigsResponse,
    IncrementalAlterConfigsResponse,
)

from connectors.broker.api.topics import outcome
from connectors.broker.configs import TOPIC_CONFIGS, ConfigType
from connectors.broker.errors import ErrorCode, Refused
from connectors.broker.protocol import Call, Reply

_Described = DescribeConfigsResponse.DescribeConfigsResult
_Setting = _Described.DescribeConfigsResourceResult

TOPIC_RESOURCE, NODE_RESOURCE = 2, 4
SET_FOR_TOPIC, DEFAULT = 1, 5  # a setting's source

Configs = Mapping[str, str]
Wanted = Mapping[str, str | None]


class Operation(IntEnum):
    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


async def describe_configs(call: Call, request: Any) -> Reply:
    described = []
    for resource in request.resources:
        code, message, settings = ErrorCode.NONE, None, []
        if resource.resource_type == TOPIC_RESOURCE:
            topic = call.broker.topics.get(resource.resource_name)
            if topic is None:
                code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                message = f"there is no topic {resource.resource_name!r}"
            else:
                settings = _settings(topic.configs, resource.configuration_keys)
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


def _settings(configs: Configs, wanted: list[str] | None) -> list[Any]:
    return [
        _Setting(
            name=name,
            value=configs.get(name, config.default),
            read_only=config.read_only,
            config_source=SET_FOR_TOPIC if name in configs else DEFAULT,
            is_sensitive=False,
            synonyms=[],
            config_type=config.type,
            documentation=None,
        )
        for name, config in TOPIC_CONFIGS.items()
        if not wanted or name in wanted
    ]


async def alter_configs(call: Call, request: Any) -> Reply:
    """A topic's own settings become those given; what is not given goes back to its default."""
    return await _alter(call, request, AlterConfigsResponse, _replaced)


async def incremental_alter_configs(call: Call, request: Any) -> Reply:
    """Only the settings named are changed."""
    return await _alter(call, request, IncrementalAlterConfigsResponse, _changed)


async def _alter(
    call: Call, request: Any, response: Any, change: Callable[[list[Any], Configs], Wanted]
) -> Reply:
    altered = []
    for resource in request.resources:
        if resource.resource_type == TOPIC_RESOURCE:
            code, message = await outcome(
                call.broker.topics.configure(
                    resource.resource_name,
                    partial(change, resource.configs),
                    only_check=request.validate_only,
                )
            )
        else:
            code, message = ErrorCode.INVALID_REQUEST, "only settings of topics can be changed"
        altered.append(
            response.AlterConfigsResourceResponse(
                error_code=code,
                error_message=message,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
            )
        )
    return Reply(response(throttle_time_ms=0, responses=altered))


def _replaced(changes: list[Any], configs: Configs) -> Wanted:
    return {change.name: change.value for change in changes}


def _changed(changes: list[Any], configs: Configs) -> Wanted:
    if len({change.name for change in changes}) < len(changes):
        raise Refused(ErrorCode.INVALID_REQUEST, "a config is named twice")
    wanted: dict[str, str | None] = dict(configs)
    for name, operation, value in ((c.name, c.config_operation, c.value) for c in changes):
        config = TOPIC_CONFIGS.get(name)
        if operation == Operation.SET or config is None:  # an unknown name is refused as one
            wanted[name] = value
        elif operation == Operation.DELETE:
            wanted.pop(name, None)
        elif config.type == ConfigType.LIST and operation in (Operation.APPEND, Operation.SUBTRACT):
            items = (wanted.get(name) or config.default).split(",")
            given = (value or "").split(",")
            if operation == Operation.APPEND:
                items += [item for item in given if item not in items]
            else:
                items = [item for item in items if item not in given]
            wanted[name] = ",".join(items)
        else:
            raise Refused(
                ErrorCode.INVALID_CONFIG, f"{name}: operation {operation} is not possible on it"
            )
    return wanted
