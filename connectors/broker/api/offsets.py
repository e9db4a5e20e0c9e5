"""OffsetCommit, OffsetFetch and OffsetDelete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from kafka.protocol.consumer import (
    OffsetCommitResponse,
    OffsetDeleteResponse,
    OffsetFetchResponse,
)

from connectors.broker.errors import ErrorCode, Refused
from connectors.broker.offsets import Committed, Where
from connectors.broker.protocol import Call, Reply

_CommittedTopic = OffsetCommitResponse.OffsetCommitResponseTopic
_CommittedPartition = _CommittedTopic.OffsetCommitResponsePartition
_FetchedTopic = OffsetFetchResponse.OffsetFetchResponseTopic
_FetchedPartition = _FetchedTopic.OffsetFetchResponsePartition
_DeletedTopic = OffsetDeleteResponse.OffsetDeleteResponseTopic
_DeletedPartition = _DeletedTopic.OffsetDeleteResponsePartition

EPOCH_SINCE = 6  # version of OffsetCommit
NOTHING = Committed(-1, -1, "")


async def offset_commit(call: Call, request: Any) -> Reply:
    """Stored before it is answered. A disk that refuses is, to clients, a coordinator that is not
    available: they commit again."""
    wanted = {
        (topic.name, partition.partition_index): _to_commit(call, partition)
        for topic in request.topics
        for partition in topic.partitions
    }
    try:
        codes = await call.broker.groups.commit(
            request.group_id,
            request.generation_id_or_member_epoch,
            request.member_id,
            request.group_instance_id,
            wanted,
        )
    except Refused as refused:
        codes = dict.fromkeys(wanted, refused.code)
    except OSError:
        codes = dict.fromkeys(wanted, ErrorCode.COORDINATOR_NOT_AVAILABLE)
    topics = _by_topic(codes, _CommittedTopic, _CommittedPartition)
    return Reply(OffsetCommitResponse(throttle_time_ms=0, topics=topics))


def _to_commit(call: Call, partition: Any) -> Committed:
    epoch = partition.committed_leader_epoch if call.version >= EPOCH_SINCE else -1
    return Committed(partition.committed_offset, epoch, partition.committed_metadata or "")


def _by_topic(codes: Mapping[Where, ErrorCode], kind: Any, of_partition: Any) -> list[Any]:
    return [
        kind(
            name=name,
            partitions=[
                of_partition(partition_index=index, error_code=codes[name, index])
                for _, index in places
            ],
        )
        for name, places in groupby(codes, key=lambda where: where[0])
    ]


async def offset_fetch(call: Call, request: Any) -> Reply:
    """What is committed for the partitions asked for, or for all; offset -1 where nothing is."""
    committed = call.broker.groups.offsets(request.group_id)
    if request.topics is None:
        wanted: Iterable[Where] = sorted(committed)
    else:
        wanted = [(t.name, index) for t in request.topics for index in t.partition_indexes]
    topics = [
        _FetchedTopic(
            name=name,
            partitions=[_fetched(index, committed.get((name, index), NOTHING)) for _, index in of],
        )
        for name, of in groupby(wanted, key=lambda where: where[0])
    ]
    return Reply(OffsetFetchResponse(throttle_time_ms=0, topics=topics, error_code=ErrorCode.NONE))


def _fetched(index: int, committed: Committed) -> Any:
    return _FetchedPartition(
        partition_index=index,
        committed_offset=committed.offset,
        committed_leader_epoch=committed.leader_epoch,
        metadata=committed.metadata,
        error_code=ErrorCode.NONE,
    )


async def offset_delete(call: Call, request: Any) -> Reply:
    code = ErrorCode.NONE
    codes: dict[Where, ErrorCode] = {}
    wanted = [(t.name, each.partition_index) for t in request.topics for each in t.partitions]
    try:
        codes = await call.broker.groups.delete_offsets(request.group_id, wanted)
    except Refused as refused:
        code = refused.code
    except OSError:
        code = ErrorCode.COORDINATOR_NOT_AVAILABLE
    topics = _by_topic(codes, _DeletedTopic, _DeletedPartition)
    return Reply(OffsetDeleteResponse(error_code=code, throttle_time_ms=0, topics=topics))
