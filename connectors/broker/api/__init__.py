"""The table of APIs: what the broker announces in ApiVersions and answers."""

from __future__ import annotations

from kafka.protocol.admin import (
    CreateTopicsRequest,
    DeleteRecordsRequest,
    DeleteTopicsRequest,
    DescribeConfigsRequest,
)
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest
from kafka.protocol.metadata import ApiVersionsRequest, ApiVersionsResponse, MetadataRequest
from kafka.protocol.producer import InitProducerIdRequest, ProduceRequest

from connectors.broker.api import fetch, metadata, produce, topics
from connectors.broker.errors import ErrorCode
from connectors.broker.protocol import Api, Call, Reply

API_VERSIONS_KEY: int = ApiVersionsRequest.API_KEY


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
# need.
_TABLE = [
    Api(ProduceRequest, 3, 8, produce.produce),
    Api(FetchRequest, 4, 11, fetch.fetch),
    Api(ListOffsetsRequest, 1, 5, fetch.list_offsets),
    Api(MetadataRequest, 0, 9, metadata.metadata),
    Api(ApiVersionsRequest, 0, 3, api_versions),
    Api(CreateTopicsRequest, 2, 6, topics.create_topics),
    Api(DeleteTopicsRequest, 1, 5, topics.delete_topics),
    Api(DeleteRecordsRequest, 0, 2, topics.delete_records),
    Api(InitProducerIdRequest, 0, 4, produce.init_producer_id),
    Api(DescribeConfigsRequest, 1, 4, topics.describe_configs),
]
APIS: dict[int, Api] = {api.request.API_KEY: api for api in _TABLE}
