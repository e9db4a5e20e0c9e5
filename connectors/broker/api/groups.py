"""FindCoordinator, JoinGroup, SyncGroup, Heartbeat, LeaveGroup; for administrators DescribeGroups,
ListGroups and DeleteGroups."""

from __future__ import annotations

import uuid
from typing import Any

from kafka.protocol.admin import (
    DeleteGroupsResponse,
    DescribeGroupsResponse,
    ListGroupsResponse,
)
from kafka.protocol.consumer import (
    HeartbeatResponse,
    JoinGroupResponse,
    LeaveGroupResponse,
    SyncGroupResponse,
)
from kafka.protocol.metadata import FindCoordinatorResponse

from connectors.broker.api.metadata import NODE_ID
from connectors.broker.errors import ErrorCode, Refused
from connectors.broker.group import Group, State
from connectors.broker.members import Joined, JoinRequest, Synced
from connectors.broker.protocol import Call, Reply

_JoinedMember = JoinGroupResponse.JoinGroupResponseMember
_Left = LeaveGroupResponse.MemberResponse
_Described = DescribeGroupsResponse.DescribedGroup
_Listed = ListGroupsResponse.ListedGroup
_DescribedMember = _Described.DescribedGroupMember
_Deleted = DeleteGroupsResponse.DeletableGroupResult

GROUP_COORDINATOR = 0
MIN_SESSION_MS, MAX_SESSION_MS = 6_000, 1_800_000  # Kafka's defaults
MIN_REBALANCE_MS = 1_000  # in less no member joins again
TWO_STEPS_SINCE = 4  # version of JoinGroup: a new member is told its id first
MANY_MEMBERS_SINCE = 3  # version of LeaveGroup
CLASSIC = "classic"
NOT_ASKED = frozenset({31})  # of authorized operations
NO_GENERATION = -1


async def find_coordinator(call: Call, request: Any) -> Reply:
    code, message = ErrorCode.NONE, None
    node_id, host, port = NODE_ID, call.host, call.port
    if call.version >= 1 and request.key_type != GROUP_COORDINATOR:
        code, message = ErrorCode.INVALID_REQUEST, "this broker has no transactions"
        node_id, host, port = -1, "", -1
    return Reply(
        FindCoordinatorResponse(
            throttle_time_ms=0,
            error_code=code,
            error_message=message,
            node_id=node_id,
            host=host,
            port=port,
        )
    )


async def join_group(call: Call, request: Any) -> Reply:
    instance_id = request.group_instance_id
    new_id = f"{instance_id or call.client_id}-{uuid.uuid4()}"
    code = ErrorCode.NONE
    joined = Joined(
        member_id=request.member_id,
        generation=NO_GENERATION,
        protocol_type="",
        protocol="",
        leader="",
        members=(),
    )
    try:
        if not MIN_SESSION_MS <= request.session_timeout_ms <= MAX_SESSION_MS:
            raise Refused(
                ErrorCode.INVALID_SESSION_TIMEOUT,
                f"session timeout: {MIN_SESSION_MS} to {MAX_SESSION_MS} ms is allowed",
            )
        joined = await call.broker.groups.join(
            request.group_id, _join_request(call, request), new_id
        )
    except Refused as refused:
        code = refused.code
    return Reply(
        JoinGroupResponse(
            throttle_time_ms=0,
            error_code=code,
            generation_id=joined.generation,
            protocol_type=joined.protocol_type,
            protocol_name=joined.protocol,
            leader=joined.leader,
            member_id=new_id if code == ErrorCode.MEMBER_ID_REQUIRED else joined.member_id,
            members=[
                _JoinedMember(member_id=member_id, group_instance_id=instance, metadata=metadata)
                for member_id, instance, metadata in joined.members
            ],
        )
    )


def _join_request(call: Call, request: Any) -> JoinRequest:
    rebalance_timeout_ms = (
        request.session_timeout_ms if call.version == 0 else request.rebalance_timeout_ms
    )
    return JoinRequest(
        member_id=request.member_id,
        instance_id=request.group_instance_id,
        client_id=call.client_id,
        client_host=call.client_host,
        session_timeout_s=request.session_timeout_ms / 1000,
        rebalance_timeout_s=max(rebalance_timeout_ms, MIN_REBALANCE_MS) / 1000,
        protocol_type=request.protocol_type,
        protocols={protocol.name: protocol.metadata for protocol in request.protocols},
        knows_its_id_first=call.version >= TWO_STEPS_SINCE,
    )


async def sync_group(call: Call, request: Any) -> Reply:
    code = ErrorCode.NONE
    synced = Synced(protocol_type="", protocol="", assignment=b"")
    try:
        synced = await call.broker.groups.sync(
            request.group_id,
            request.generation_id,
            request.member_id,
            request.group_instance_id,
            (request.protocol_type, request.protocol_name),
            {each.member_id: each.assignment for each in request.assignments},
        )
    except Refused as refused:
        code = refused.code
    return Reply(
        SyncGroupResponse(
            throttle_time_ms=0,
            error_code=code,
            protocol_type=synced.protocol_type,
            protocol_name=synced.protocol,
            assignment=synced.assignment,
        )
    )


async def heartbeat(call: Call, request: Any) -> Reply:
    code = ErrorCode.NONE
    try:
        call.broker.groups.heartbeat(
            request.group_id,
            request.generation_id,
            request.member_id,
            request.group_instance_id,
        )
    except Refused as refused:
        code = refused.code
    return Reply(HeartbeatResponse(throttle_time_ms=0, error_code=code))


async def leave_group(call: Call, request: Any) -> Reply:
    """One member, or several with a code each."""
    if call.version < MANY_MEMBERS_SINCE:
        left = _leave(call, request.group_id, request.member_id, None)
        return Reply(LeaveGroupResponse(throttle_time_ms=0, error_code=left.error_code))
    members = [
        _leave(call, request.group_id, member.member_id, member.group_instance_id)
        for member in request.members
    ]
    return Reply(LeaveGroupResponse(throttle_time_ms=0, error_code=ErrorCode.NONE, members=members))


def _leave(call: Call, group_id: str, member_id: str, instance_id: str | None) -> Any:
    code = ErrorCode.NONE
    try:
        member_id = call.broker.groups.leave(group_id, member_id, instance_id)
    except Refused as refused:
        code = refused.code
    return _Left(member_id=member_id, group_instance_id=instance_id, error_code=code)


async def describe_groups(call: Call, request: Any) -> Reply:
    """A group that does not exist is Dead."""
    groups = [_describe(call, name) for name in request.groups]
    return Reply(DescribeGroupsResponse(throttle_time_ms=0, groups=groups))


def _describe(call: Call, name: str) -> Any:
    group = call.broker.groups.get(name)
    return _Described(
        error_code=ErrorCode.NONE,
        group_id=name,
        group_state=_state(call, name),
        protocol_type=group.protocol_type if group is not None else "",
        protocol_data=group.protocol if group is not None and _is_stable(group) else "",
        members=_describe_members(group) if group is not None else [],
        authorized_operations=NOT_ASKED,
    )


def _state(call: Call, name: str) -> State:
    group = call.broker.groups.get(name)
    if group is not None:
        return group.state
    return State.EMPTY if call.broker.groups.offsets(name) else State.DEAD


def _is_stable(group: Group) -> bool:
    return group.state is State.STABLE


def _describe_members(group: Group) -> list[Any]:
    """What they chose and were assigned is known in a stable group alone."""
    stable = _is_stable(group)
    return [
        _DescribedMember(
            member_id=member.id,
            group_instance_id=member.instance_id,
            client_id=member.asked.client_id,
            client_host=member.asked.client_host,
            member_metadata=member.asked.protocols[group.protocol] if stable else b"",
            member_assignment=member.assignment if stable else b"",
        )
        for member in group.members.values()
    ]


async def list_groups(call: Call, request: Any) -> Reply:
    states = set(request.states_filter or ()) if call.version >= 4 else set()
    types = set(request.types_filter or ()) if call.version >= 5 else set()
    listed = []
    for name in call.broker.groups.names():
        group = call.broker.groups.get(name)
        state = _state(call, name)
        if (not states or state in states) and (not types or CLASSIC in types):
            listed.append(
                _Listed(
                    group_id=name,
                    protocol_type=group.protocol_type if group is not None else "",
                    group_state=state,
                    group_type=CLASSIC,
                )
            )
    return Reply(ListGroupsResponse(throttle_time_ms=0, error_code=ErrorCode.NONE, groups=listed))


async def delete_groups(call: Call, request: Any) -> Reply:
    deleted = []
    for name in request.groups_names:
        code = ErrorCode.NONE
        try:
            await call.broker.groups.delete(name)
        except Refused as refused:
            code = refused.code
        except OSError:
            code = ErrorCode.COORDINATOR_NOT_AVAILABLE
        deleted.append(_Deleted(group_id=name, error_code=code))
    return Reply(DeleteGroupsResponse(throttle_time_ms=0, results=deleted))
