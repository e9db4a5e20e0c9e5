"""Fetch and ListOffsets."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

from kafka.protocol.consumer import FetchResponse, ListOffsetsResponse

from connectors.broker.errors import ErrorCode, Refused
from connectors.broker.partition import Partition
from connectors.broker.protocol import Call, Reply

_FetchedTopic = FetchResponse.FetchableTopicResponse
_Fetched = _FetchedTopic.PartitionData
_ListedTopic = ListOffsetsResponse.ListOffsetsTopicResponse
_Listed = _ListedTopic.ListOffsetsPartitionResponse

LATEST, EARLIEST, NEWEST = -1, -2, -3  # the last offset, the first, that of the latest time
NEWEST_SINCE_VERSION = 7
READ_COMMITTED = 1
MAX_FETCH_BYTES = 1 << 30  # the frame's length is an int32


@dataclass(slots=True)
class _Gathering:
    """One pass over the partitions of a Fetch request."""

    reply: Reply = field(default_factory=Reply)
    num_bytes: int = 0
    failed: bool = False
    watched: list[Partition] = field(default_factory=list)


async def fetch(call: Call, request: Any) -> Reply:
    """Answers when `min_bytes` are there, when a partition fails or after `max_wait_ms`, whichever
    is first. At most `max_bytes` in all and `partition_max_bytes` a partition, but whole batches,
    and at least one wherever the total allows; the first with data always gives one. Sessions are
    not kept: every answer says so, and clients then send whole requests."""
    if request.session_id != 0:
        code = ErrorCode.FETCH_SESSION_ID_NOT_FOUND
        return Reply(FetchResponse(throttle_time_ms=0, error_code=code, session_id=0, responses=[]))
    loop = asyncio.get_running_loop()
    deadline = loop.time() + request.max_wait_ms / 1000
    while True:
        gathered = _gather(call, request)
        left_s = deadline - loop.time()
        enough = gathered.num_bytes >= request.min_bytes or gathered.failed
        if enough or left_s <= 0 or call.broker.stopping or not gathered.watched:
            return gathered.reply
        await _any_change(gathered.watched, left_s)


async def _any_change(partitions: list[Partition], timeout_s: float) -> None:
    change = asyncio.get_running_loop().create_future()
    for partition in partitions:
        partition.watch(change)
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(change, timeout_s)
    finally:
        for partition in partitions:
            partition.unwatch(change)


def _gather(call: Call, request: Any) -> _Gathering:
    gathered = _Gathering()
    topics = [
        _FetchedTopic(
            topic=topic.topic,
            partitions=[
                _read(call, gathered, request, topic.topic, wanted) for wanted in topic.partitions
            ],
        )
        for topic in request.topics
    ]
    gathered.reply.message = FetchResponse(
        throttle_time_ms=0, error_code=ErrorCode.NONE, session_id=0, responses=topics
    )
    return gathered


def _read(call: Call, gathered: _Gathering, request: Any, topic: str, wanted: Any) -> Any:
    code, start_offset, end_offset, data = ErrorCode.NONE, -1, -1, None
    try:
        partition = call.broker.topics.partition(topic, wanted.partition)
        start_offset, end_offset = partition.log.start_offset, partition.log.end_offset
        left_bytes = min(request.max_bytes, MAX_FETCH_BYTES) - gathered.num_bytes
        data = partition.log.read(
            wanted.fetch_offset, max(0, min(wanted.partition_max_bytes, left_bytes))
        )
        if data is not None and gathered.num_bytes and data.num_bytes > left_bytes:
            data = None
        if data is not None:
            gathered.num_bytes += data.num_bytes
        gathered.watched.append(partition)
    except Refused as refused:
        code = refused.code
        gathered.failed = True
    return _Fetched(
        partition_index=wanted.partition,
        error_code=code,
        high_watermark=end_offset,
        last_stable_offset=end_offset,
        log_start_offset=start_offset,
        aborted_transactions=[] if request.isolation_level == READ_COMMITTED else None,
        preferred_read_replica=-1,
        records=gathered.reply.stand_in(data),
    )


async def list_offsets(call: Call, request: Any) -> Reply:
    topics = []
    for topic in request.topics:
        listed = [await _list(call, topic.name, wanted) for wanted in topic.partitions]
        topics.append(_ListedTopic(name=topic.name, partitions=listed))
    return Reply(ListOffsetsResponse(throttle_time_ms=0, topics=topics))


async def _list(call: Call, topic: str, wanted: Any) -> Any:
    code, offset, timestamp_ms = ErrorCode.NONE, -1, -1
    try:
        log = call.broker.topics.partition(topic, wanted.partition_index).log
        if wanted.timestamp == LATEST:
            offset = log.end_offset
        elif wanted.timestamp == EARLIEST:
            offset = log.start_offset
        elif wanted.timestamp == NEWEST and call.version >= NEWEST_SINCE_VERSION:
            found = await asyncio.to_thread(log.newest)
            offset, timestamp_ms = found or (-1, -1)
        elif wanted.timestamp >= 0:
            found = await asyncio.to_thread(log.first_since, wanted.timestamp)
            offset, timestamp_ms = found or (-1, -1)
        else:
            raise Refused(
                ErrorCode.UNSUPPORTED_VERSION,
                f"{wanted.timestamp} is no time that this broker knows",
            )
    except Refused as refused:
        code = refused.code
    return _Listed(
        partition_index=wanted.partition_index,
        error_code=code,
        timestamp=timestamp_ms,
        offset=offset,
        leader_epoch=0 if offset >= 0 else -1,
    )
