"""The table of APIs: what the broker announces in ApiVersions and answers."""

from __future__ import annotations

from kafka.protocol.admin import (
    AlterConfigsRequest,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteGroupsRequest,
    DeleteRecordsRequest,
    DeleteTopicsRequest,
    DescribeConfigsRequest,
    DescribeGroupsRequest,
    IncrementalAlterConfigsRequest,
    ListGroupsRequest,
)
from kafka.protocol.consumer import (
    FetchRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    LeaveGroupRequest,
    ListOffsetsRequest,
    OffsetCommitRequest,
    OffsetDeleteRequest,
    OffsetFetchRequest,
    SyncGroupRequest,
)
from kafka.protocol.metadata import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    FindCoordinatorRequest,
    MetadataRequest,
)
from kafka.protocol.producer import InitProducerIdRequest, ProduceRequest
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from connectors.broker.api import configs, fetch, groups, metadata, offsets, produce, sasl, topics
from connectors.broker.errors import ErrorCode
from connectors.broker.protocol import Api, Call, Reply

API_VERSIONS_KEY: int = ApiVersionsRequest.API_KEY
BEFORE_AUTHENTICATION: frozenset[int] = frozenset(
    (API_VERSIONS_KEY, SaslHandshakeRequest.API_KEY, SaslAuthenticateRequest.API_KEY)
)
"""The APIs that a client may use to say who it is."""


async def api_versions(call: Call, request: object) -> Reply:
    return Reply(_announcement(ErrorCode.NONE))


async def unsupported_api_versions() -> Reply:
    """The answer, in version 0, to an ApiVersions request of an unknown version."""
    return Reply(_announcement(ErrorCode.UNSUPPORTED_VERSION))


def _announcement(code: ErrorCode) -> ApiVersionsResponse:
    ranges = [
        ApiVersionsResponse.ApiVersion(
            api_key=key, min_version=api.min_version, max_version=api.max_version
        )
        for key, api in sorted(APIS.items())
    ]
    return ApiVersionsResponse(error_code=code, api_keys=ranges, throttle_time_ms=0)


# Fetch ends at 11: from 12 on the length before record data is a varint, which a stand-in cannot
# take. Produce ends at 8 and Metadata at 9: later versions name topics by id, or need what those
# need. FindCoordinator ends at 3 and OffsetFetch at 7: later versions ask for many groups at once.
# JoinGroup ends at 7, OffsetCommit at 8: what follows is for features that are not here.
_TABLE = [
    Api(ProduceRequest, 3, 8, produce.produce),
    Api(FetchRequest, 4, 11, fetch.fetch),
    Api(ListOffsetsRequest, 1, 7, fetch.list_offsets),
    Api(MetadataRequest, 0, 9, metadata.metadata),
    Api(ApiVersionsRequest, 0, 3, api_versions),
    Api(CreateTopicsRequest, 2, 6, topics.create_topics),
    Api(CreatePartitionsRequest, 0, 3, topics.create_partitions),
    Api(DeleteTopicsRequest, 1, 5, topics.delete_topics),
    Api(DeleteRecordsRequest, 0, 2, topics.delete_records),
    Api(InitProducerIdRequest, 0, 4, produce.init_producer_id),
    Api(DescribeConfigsRequest, 1, 4, configs.describe_configs),
    Api(AlterConfigsRequest, 0, 2, configs.alter_configs),
    Api(IncrementalAlterConfigsRequest, 0, 1, configs.incremental_alter_configs),
    Api(FindCoordinatorRequest, 0, 3, groups.find_coordinator),
    Api(JoinGroupRequest, 0, 7, groups.join_group),
    Api(SyncGroupRequest, 0, 5, groups.sync_group),
    Api(HeartbeatRequest, 0, 4, groups.heartbeat),
    Api(LeaveGroupRequest, 0, 5, groups.leave_group),
    Api(DescribeGroupsRequest, 0, 5, groups.describe_groups),
    Api(ListGroupsRequest, 0, 5, groups.list_groups),
    Api(DeleteGroupsRequest, 0, 2, groups.delete_groups),
    Api(OffsetCommitRequest, 2, 8, offsets.offset_commit),
    Api(OffsetFetchRequest, 1, 7, offsets.offset_fetch),
    Api(OffsetDeleteRequest, 0, 0, offsets.offset_delete),
    Api(SaslHandshakeRequest, 1, 1, sasl.handshake),
    Api(SaslAuthenticateRequest, 0, 2, sasl.authenticate),
]
APIS: dict[int, Api] = {api.request.API_KEY: api for api in _TABLE}
