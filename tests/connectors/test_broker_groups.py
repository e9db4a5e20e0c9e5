"""Consumer groups on the wire, and what of them survives the end of the broker."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from kafka.protocol.admin import (
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    ListGroupsRequest,
    ListGroupsResponse,
)
from kafka.protocol.consumer import (
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
    SyncGroupRequest,
    SyncGroupResponse,
)
from kafka.protocol.consumer.metadata import ConsumerProtocolSubscription
from kafka.protocol.metadata import FindCoordinatorRequest, FindCoordinatorResponse

from connectors.broker.errors import ErrorCode
from connectors.broker.offsets import Committed, Offsets
from tests.broker_process import BrokerProcess
from tests.connectors.broker_clients import CLIENTS, KafkaPython, Rejected, Sent
from tests.connectors.broker_members import MEMBERS, poll_all, poll_until
from tests.connectors.broker_wire import Connection

JOIN_VERSIONS = [0, 1, 3, 4, 5, 6, 7]


@pytest.fixture
def group() -> str:
    return f"group-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def connection(broker: BrokerProcess) -> Iterator[Connection]:
    with Connection(broker.bootstrap) as connection:
        yield connection


@pytest.fixture
def topic(broker: BrokerProcess) -> str:
    name = f"groups-{uuid.uuid4().hex[:12]}"
    KafkaPython(broker.bootstrap).create(name, 2)
    return name


def join_request(
    group: str,
    member_id: str = "",
    *,
    instance: str | None = None,
    session_ms: int = 10_000,
    topic: str = "t",
) -> Any:
    subscription = ConsumerProtocolSubscription(version=0, topics=[topic], user_data=b"")
    protocol = JoinGroupRequest.JoinGroupRequestProtocol(
        name="range", metadata=bytes(subscription.encode())
    )
    return JoinGroupRequest(
        group_id=group,
        session_timeout_ms=session_ms,
        rebalance_timeout_ms=10_000,
        member_id=member_id,
        group_instance_id=instance,
        protocol_type="consumer",
        protocols=[protocol],
        reason=None,
    )


def join(connection: Connection, group: str, *, version: int = 5, **keywords: Any) -> Any:
    """Also as a member that is told its id first."""
    joined = connection.ask(join_request(group, **keywords), JoinGroupResponse, version)
    if joined.error_code == ErrorCode.MEMBER_ID_REQUIRED:
        keywords["member_id"] = joined.member_id
        joined = connection.ask(join_request(group, **keywords), JoinGroupResponse, version)
    return joined


def sync(
    connection: Connection, group: str, joined: Any, assigned: bytes = b"all", version: int = 3
) -> Any:
    assignments = [
        SyncGroupRequest.SyncGroupRequestAssignment(member_id=member.member_id, assignment=assigned)
        for member in joined.members
    ]
    request = SyncGroupRequest(
        group_id=group,
        generation_id=joined.generation_id,
        member_id=joined.member_id,
        group_instance_id=None,
        protocol_type="consumer",
        protocol_name="range",
        assignments=assignments,
    )
    return connection.ask(request, SyncGroupResponse, version)


def heartbeat(
    connection: Connection, group: str, member_id: str, generation: int, version: int = 3
) -> ErrorCode:
    request = HeartbeatRequest(
        group_id=group, generation_id=generation, member_id=member_id, group_instance_id=None
    )
    return ErrorCode(connection.ask(request, HeartbeatResponse, version).error_code)


def commit(
    connection: Connection,
    group: str,
    topic: str,
    offset: int,
    *,
    partition: int = 0,
    member_id: str = "",
    generation: int = -1,
    metadata: str | None = "",
    version: int = 7,
) -> ErrorCode:
    kind = OffsetCommitRequest.OffsetCommitRequestTopic
    wanted = kind.OffsetCommitRequestPartition(
        partition_index=partition,
        committed_offset=offset,
        committed_leader_epoch=0,
        committed_metadata=metadata,
    )
    request = OffsetCommitRequest(
        group_id=group,
        generation_id_or_member_epoch=generation,
        member_id=member_id,
        group_instance_id=None,
        retention_time_ms=-1,
        topics=[kind(name=topic, partitions=[wanted])],
    )
    answer = connection.ask(request, OffsetCommitResponse, version)
    return ErrorCode(answer.topics[0].partitions[0].error_code)


def committed(
    connection: Connection, group: str, topic: str, partition: int = 0, version: int = 5
) -> tuple[int, str]:
    """Offset and metadata."""
    request = OffsetFetchRequest(
        group_id=group,
        topics=[
            OffsetFetchRequest.OffsetFetchRequestTopic(name=topic, partition_indexes=[partition])
        ],
        require_stable=True,
    )
    answer = connection.ask(request, OffsetFetchResponse, version).topics[0].partitions[0]
    assert answer.error_code == ErrorCode.NONE
    return answer.committed_offset, answer.metadata


@pytest.mark.parametrize("version", JOIN_VERSIONS)
def test_a_member_joins_syncs_beats_commits_and_leaves_in_every_version(
    connection, group, topic, version
):
    joined = join(connection, group, version=version)
    assert joined.error_code == ErrorCode.NONE
    assert joined.leader == joined.member_id
    assert [member.member_id for member in joined.members] == [joined.member_id]
    synced = sync(connection, group, joined, version=min(version, 5))
    assert (synced.error_code, synced.assignment) == (ErrorCode.NONE, b"all")
    me, generation = joined.member_id, joined.generation_id
    assert heartbeat(connection, group, me, generation, min(version, 4)) == ErrorCode.NONE
    for number, commit_version in enumerate(range(2, 9)):
        code = commit(
            connection,
            group,
            topic,
            number,
            member_id=me,
            generation=generation,
            metadata="so far",
            version=commit_version,
        )
        assert code == ErrorCode.NONE
        for fetch_version in range(1, 8):
            assert committed(connection, group, topic, version=fetch_version) == (number, "so far")
    leaving = LeaveGroupRequest.MemberIdentity(member_id=me, group_instance_id=None, reason=None)
    request = LeaveGroupRequest(group_id=group, member_id=me, members=[leaving])
    left = connection.ask(request, LeaveGroupResponse, min(version, 5))
    assert left.error_code == ErrorCode.NONE
    assert heartbeat(connection, group, me, generation) == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_new_generation_refuses_the_old_ones_commits(broker, connection, group, topic):
    first = join(connection, group)
    sync(connection, group, first)
    with Connection(broker.bootstrap) as other:
        told = other.ask(join_request(group), JoinGroupResponse, 5)
        other.send(join_request(group, told.member_id), 5)
        while heartbeat(connection, group, first.member_id, 1) == ErrorCode.NONE:
            time.sleep(0.01)
        mine = {"member_id": first.member_id, "generation": 1}
        assert commit(connection, group, topic, 3, **mine) == ErrorCode.NONE
        again = join(connection, group, member_id=first.member_id)
        assert again.generation_id == other.receive(JoinGroupResponse, 5).generation_id == 2
        assert commit(connection, group, topic, 4, **mine) == ErrorCode.ILLEGAL_GENERATION
        sync(connection, group, again)
    assert commit(connection, group, topic, 5, **mine) == ErrorCode.ILLEGAL_GENERATION
    assert commit(connection, group, topic, 6) == ErrorCode.UNKNOWN_MEMBER_ID
    assert commit(connection, group + "2", topic, 7, **mine) == ErrorCode.ILLEGAL_GENERATION
    assert committed(connection, group, topic) == (3, "")


@pytest.mark.parametrize(
    ("name", "keywords", "code"),
    [
        ("", {}, ErrorCode.INVALID_GROUP_ID),
        ("g", {"session_ms": 5999}, ErrorCode.INVALID_SESSION_TIMEOUT),
        ("g", {"session_ms": 1_800_001}, ErrorCode.INVALID_SESSION_TIMEOUT),
        ("nobody-is-in-it", {"member_id": "someone"}, ErrorCode.UNKNOWN_MEMBER_ID),
    ],
)
def test_what_cannot_join_is_refused(connection, name, keywords, code):
    assert join(connection, name, **keywords).error_code == code


def test_a_group_without_a_name_takes_nothing(connection, topic):
    assert commit(connection, "", topic, 1) == ErrorCode.INVALID_GROUP_ID
    assert heartbeat(connection, "", "m", 1) == ErrorCode.INVALID_GROUP_ID


def test_metadata_of_more_than_4_kib_is_refused(connection, group, topic):
    assert commit(connection, group, topic, 1, metadata="m" * 4096) == ErrorCode.NONE
    code = commit(connection, group, topic, 2, metadata="m" * 4097)
    assert code == ErrorCode.OFFSET_METADATA_TOO_LARGE
    assert committed(connection, group, topic) == (1, "m" * 4096)


@pytest.mark.parametrize("version", range(4))
def test_this_broker_coordinates_every_group_and_no_transaction(broker, connection, version):
    def find(key_type: int) -> Any:
        request = FindCoordinatorRequest(key="anything", key_type=key_type)
        return connection.ask(request, FindCoordinatorResponse, version)

    found = find(0)
    assert (found.error_code, found.host, found.port) == (0, "127.0.0.1", broker.port)
    if version >= 1:
        assert find(1).error_code == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("version", range(6))
def test_groups_are_listed_and_described_in_every_version(connection, group, version):
    def described(name: str) -> Any:
        request = DescribeGroupsRequest(groups=[name], include_authorized_operations=True)
        return connection.ask(request, DescribeGroupsResponse, version).groups[0]

    def listed(states: list[str]) -> set[str]:
        request = ListGroupsRequest(states_filter=states, types_filter=[])
        answer = connection.ask(request, ListGroupsResponse, version)
        return {each.group_id for each in answer.groups}

    assert described(group).group_state == "Dead"
    joined = join(connection, group)
    assert described(group).group_state == "CompletingRebalance"
    sync(connection, group, joined, b"assigned")
    found = described(group)
    assert (found.group_state, found.protocol_data) == ("Stable", "range")
    (member,) = found.members
    assert (member.client_id, member.client_host) == ("kafka-python", "127.0.0.1")
    assert member.member_assignment == b"assigned"
    assert group in listed([])
    if version >= 4:
        assert group in listed(["Stable"])
        assert group not in listed(["Empty"])


@pytest.mark.parametrize("version", range(3))
def test_a_group_is_deleted_when_it_has_no_members(connection, group, topic, version):
    def delete(*names: str) -> list[int]:
        request = DeleteGroupsRequest(groups_names=list(names))
        answer = connection.ask(request, DeleteGroupsResponse, version)
        return [each.error_code for each in answer.results]

    assert commit(connection, group, topic, 1) == ErrorCode.NONE
    joined = join(connection, group + "-busy")
    sync(connection, group + "-busy", joined)
    assert delete(group, group + "-busy", group + "-none") == [
        ErrorCode.NONE,
        ErrorCode.NON_EMPTY_GROUP,
        ErrorCode.GROUP_ID_NOT_FOUND,
    ]
    assert committed(connection, group, topic) == (-1, "")


def test_single_offsets_are_deleted_where_nobody_reads(connection, group, topic):
    def delete(name: str, partition: int) -> tuple[int, list[int]]:
        kind = OffsetDeleteRequest.OffsetDeleteRequestTopic
        wanted = kind.OffsetDeleteRequestPartition(partition_index=partition)
        request = OffsetDeleteRequest(group_id=name, topics=[kind(name=topic, partitions=[wanted])])
        answer = connection.ask(request, OffsetDeleteResponse, 0)
        codes = [p.error_code for each in answer.topics for p in each.partitions]
        return answer.error_code, codes

    assert delete(group, 0) == (ErrorCode.GROUP_ID_NOT_FOUND, [])
    for partition in (0, 1):
        commit(connection, group, topic, 4, partition=partition)
    assert delete(group, 0) == (ErrorCode.NONE, [ErrorCode.NONE])
    assert [committed(connection, group, topic, p)[0] for p in (0, 1)] == [-1, 4]
    sync(connection, group, join(connection, group, topic=topic))
    assert delete(group, 1) == (ErrorCode.NONE, [ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC])
    assert committed(connection, group, topic, 1)[0] == 4


def test_an_acknowledged_commit_survives_kill_9(own_broker):
    KafkaPython(own_broker.bootstrap).create("t")
    acknowledged = -1
    for _ in range(2):
        stop = threading.Timer(0.5, own_broker.kill9)
        with Connection(own_broker.bootstrap) as connection:
            stop.start()
            with contextlib.suppress(ConnectionError):
                while commit(connection, "g", "t", acknowledged + 1) == ErrorCode.NONE:
                    acknowledged += 1
        stop.join()
        own_broker.restart()
        with Connection(own_broker.bootstrap) as connection:
            found, _ = committed(connection, "g", "t")
        assert acknowledged >= 0
        assert found in (acknowledged, acknowledged + 1)
        acknowledged = found


@pytest.mark.parametrize("name", MEMBERS)
def test_members_go_on_where_they_committed_after_kill_9_and_restart(own_broker, name):
    client = CLIENTS[name](own_broker.bootstrap)
    client.create("t", 2)
    members = [MEMBERS[name](own_broker.bootstrap, "g", "t") for _ in range(2)]
    with contextlib.ExitStack() as stack:
        for member in members:
            stack.callback(member.close)
        poll_until(members, lambda: sorted(m.assigned() for m in members) == [[0], [1]])
        for start in (0, 10):
            wanted = list(range(start, start + 10))
            for partition in (0, 1):
                client.produce("t", [Sent(b"%d" % n) for n in wanted], partition=partition)
            got = read_and_commit(members, wanted)
            assert got == {(partition, number) for partition in (0, 1) for number in wanted}
            assert client.committed("g") == {("t", 0): start + 10, ("t", 1): start + 10}
            own_broker.kill9()
            own_broker.restart()


def read_and_commit(members: list[Any], wanted: list[int]) -> set[tuple[int, int]]:
    """(Partition, number) of all that came until each partition was read and committed to the
    end. They may have to join again first; what they commit meanwhile is refused."""
    got: set[tuple[int, int]] = set()
    done: set[int] = set()
    deadline = time.monotonic() + 30
    while done != {0, 1}:
        assert time.monotonic() < deadline, (got, done)
        for member, came in zip(members, poll_all(members), strict=True):
            got |= {(partition, number) for partition, of in came.items() for number in of}
            for partition in member.assigned():
                if {(partition, number) for number in wanted} <= got:
                    with contextlib.suppress(Rejected):
                        member.commit(partition, wanted[-1] + 1)
                        done.add(partition)
    return got


def test_a_full_disk_refuses_commits_and_loses_none(own_broker):
    KafkaPython(own_broker.bootstrap).create("t")
    with Connection(own_broker.bootstrap) as connection:
        assert commit(connection, "g", "t", 1) == ErrorCode.NONE
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(own_broker.pid, resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        offset = 1
        while commit(connection, "g", "t", offset + 1) == ErrorCode.NONE:
            offset += 1
        code = commit(connection, "g", "t", offset + 1)
        assert code == ErrorCode.COORDINATOR_NOT_AVAILABLE
        assert committed(connection, "g", "t") == (offset, "")
        resource.prlimit(own_broker.pid, resource.RLIMIT_FSIZE, unlimited)
        assert commit(connection, "g", "t", offset + 1) == ErrorCode.NONE
    own_broker.restart()
    with Connection(own_broker.bootstrap) as connection:
        assert committed(connection, "g", "t") == (offset + 1, "")


def test_a_new_topic_has_no_offsets_of_one_whose_deletion_a_crash_cut_short(tmp_path):
    left = Offsets(tmp_path / "data" / "offsets", sync=False)
    asyncio.run(left.store("g", {("t", 0): Committed(7, 0, ""), ("u", 0): Committed(8, 0, "")}))
    broker = BrokerProcess(tmp_path / "data")
    try:
        KafkaPython(broker.bootstrap).create("t")
        with Connection(broker.bootstrap) as connection:
            assert committed(connection, "g", "t") == (-1, "")
            assert committed(connection, "g", "u") == (8, "")
    finally:
        broker.stop()


def test_whoever_waits_in_a_group_is_answered_when_the_broker_stops(own_broker):
    with Connection(own_broker.bootstrap) as leader, Connection(own_broker.bootstrap) as waiting:
        me = join(leader, "g")
        sync(leader, "g", me)
        told = waiting.ask(join_request("g"), JoinGroupResponse, 5)
        waiting.send(join_request("g", told.member_id), 5)
        while heartbeat(leader, "g", me.member_id, 1) == ErrorCode.NONE:
            time.sleep(0.01)
        assert own_broker.stop() == 0
        assert waiting.receive(JoinGroupResponse, 5).error_code == ErrorCode.NOT_COORDINATOR
