"""Metadata: this one node leads every partition."""

from __future__ import annotations

from typing import Any

from kafka.protocol.metadata import MetadataResponse

from connectors.broker.errors import ErrorCode
from connectors.broker.protocol import Call, Reply
from connectors.broker.topics import Topic

NODE_ID = 0

_Node = MetadataResponse.MetadataResponseBroker
_Topic = MetadataResponse.MetadataResponseTopic
_Partition = _Topic.MetadataResponsePartition


async def metadata(call: Call, request: Any) -> Reply:
    """Topics are never created by asking for them: a mistyped name is an error."""
    topics = call.broker.topics
    if request.topics is None or (call.version == 0 and not request.topics):
        described = [_describe(topic) for topic in topics]
    else:
        described = [_find(call, wanted.name) for wanted in request.topics]
    node = _Node(node_id=NODE_ID, host=call.host, port=call.port, rack=None)
    return Reply(
        MetadataResponse(
            throttle_time_ms=0,
            brokers=[node],
            cluster_id=call.broker.cluster_id,
            controller_id=NODE_ID,
            topics=described,
        )
    )


def _find(call: Call, name: str) -> Any:
    topic = call.broker.topics.get(name)
    if topic is not None:
        return _describe(topic)
    code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    return _Topic(error_code=code, name=name, is_internal=False, partitions=[])


def _describe(topic: Topic) -> Any:
    partitions = [
        _Partition(
            error_code=ErrorCode.NONE,
            partition_index=index,
            leader_id=NODE_ID,
            leader_epoch=0,
            replica_nodes=[NODE_ID],
            isr_nodes=[NODE_ID],
            offline_replicas=[],
        )
        for index in range(len(topic.partitions))
    ]
    return _Topic(
        error_code=ErrorCode.NONE, name=topic.name, is_internal=False, partitions=partitions
    )
