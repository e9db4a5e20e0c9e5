"""Topic configs: which there are, their defaults and allowed values, and a log's share of them.

Names, types and rules are Kafka's. What this broker cannot do is refused, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from connectors.broker.errors import ErrorCode, Refused

_INTEGER = re.compile(r"[+-]?\d+")
_LONGS = 2**63  # they end before it
LOG_APPEND_TIME = "LogAppendTime"


class ConfigType(IntEnum):
    """As DescribeConfigs gives it."""

    STRING = 2
    INT = 3
    LONG = 5
    LIST = 7


class TopicConfig(NamedTuple):
    default: str
    type: ConfigType
    allowed: tuple[str, ...] | range
    """The values, or the whole numbers."""

    @property
    def read_only(self) -> bool:
        return isinstance(self.allowed, tuple) and len(self.allowed) == 1


TOPIC_CONFIGS = {
    "cleanup.policy": TopicConfig("delete", ConfigType.LIST, ("delete",)),
    "compression.type": TopicConfig("producer", ConfigType.STRING, ("producer",)),
    "max.message.bytes": TopicConfig("1048588", ConfigType.INT, range(1, (96 << 20) + 1)),
    "message.timestamp.type": TopicConfig(
        "CreateTime", ConfigType.STRING, ("CreateTime", LOG_APPEND_TIME)
    ),
    "min.insync.replicas": TopicConfig("1", ConfigType.INT, ("1",)),
    "retention.bytes": TopicConfig("-1", ConfigType.LONG, range(-1, _LONGS)),
    "retention.ms": TopicConfig("-1", ConfigType.LONG, range(-1, _LONGS)),
    "segment.bytes": TopicConfig(str(128 << 20), ConfigType.INT, range(1024, (1 << 30) + 1)),
    "segment.ms": TopicConfig(str(7 * 86_400_000), ConfigType.LONG, range(1, _LONGS)),
}


def check_config(name: str, value: str | None) -> None:
    """Refused if there is no such config or it cannot have this value."""
    config = TOPIC_CONFIGS.get(name)
    if config is None:
        raise Refused(ErrorCode.INVALID_CONFIG, f"unknown topic config {name!r}")
    if isinstance(config.allowed, range):
        if value is None or not _INTEGER.fullmatch(value) or int(value) not in config.allowed:
            raise Refused(
                ErrorCode.INVALID_CONFIG,
                f"{name}: {config.allowed[0]} to {config.allowed[-1]} is allowed, got {value}",
            )
    elif value not in config.allowed:
        raise Refused(
            ErrorCode.INVALID_CONFIG,
            f"{name}: this broker has only {' and '.join(config.allowed)}, got {value}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What a partition's log takes from its topic's configs; -1 as retention keeps everything."""

    max_batch_bytes: int = 1 << 20
    segment_bytes: int = 128 << 20
    segment_ms: int = 7 * 86_400_000
    retention_bytes: int = -1
    retention_ms: int = -1
    append_time: bool = False

    @classmethod
    def of(cls, configs: Mapping[str, str]) -> LogConfig:
        """Of a topic's own configs, the others at their defaults."""
        values = {name: configs.get(name, config.default) for name, config in TOPIC_CONFIGS.items()}
        return cls(
            max_batch_bytes=int(values["max.message.bytes"]),
            segment_bytes=int(values["segment.bytes"]),
            segment_ms=int(values["segment.ms"]),
            retention_bytes=int(values["retention.bytes"]),
            retention_ms=int(values["retention.ms"]),
            append_time=values["message.timestamp.type"] == LOG_APPEND_TIME,
        )
