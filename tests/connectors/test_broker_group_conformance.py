"""What the members of consumer groups may expect of the broker: one contract, two clients, and any
Kafka that HEADWATER_TEST_KAFKA names (see conftest.py)."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from connectors.broker.errors import ErrorCode
from tests.connectors.broker_clients import Client, Rejected, Sent, soon
from tests.connectors.broker_members import (
    MEMBERS,
    SESSION_S,
    Member,
    MemberProcess,
    Numbers,
    poll_until,
)

TEN = list(range(10))
Join = Callable[..., Member]


@pytest.fixture
def group() -> str:
    return f"group-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def join(client: Client, topic: str) -> Iterator[Join]:
    """Joins a group that reads `topic`, whose two partitions hold ten numbers each."""
    for partition in (0, 1):
        client.produce(topic, [Sent(b"%d" % n) for n in TEN], partition=partition)
    with contextlib.ExitStack() as stack:

        def joined(group: str, instance_id: str | None = None) -> Member:
            member = MEMBERS[client.name](client.bootstrap, group, topic, instance_id)
            stack.callback(member.close)
            return member

        yield joined


def read_all(member: Member) -> Numbers:
    """What it gets of both partitions, up to the ends."""
    got: Numbers = {}
    deadline = time.monotonic() + 30
    while got.get(0, [])[-1:] != [9] or got.get(1, [])[-1:] != [9]:
        assert time.monotonic() < deadline, got
        for partition, numbers in member.poll().items():
            got.setdefault(partition, []).extend(numbers)
    return got


def share(*members: Member) -> None:
    """Until each of two members has a partition."""
    poll_until(members, lambda: sorted(m.assigned() for m in members) == [[0], [1]])


def test_a_member_goes_on_where_its_group_has_committed(client, topic, group, join):
    first = join(group)
    assert read_all(first) == {0: TEN, 1: TEN}
    first.commit(0, 4)
    first.commit(0, 7)
    first.close()
    assert client.committed(group) == {(topic, 0): 7}
    assert read_all(join(group)) == {0: [7, 8, 9], 1: TEN}


def test_two_members_share_the_partitions_and_one_takes_all_when_the_other_leaves(group, join):
    first, second = join(group), join(group)
    share(first, second)
    second.close()
    poll_until([first], lambda: first.assigned() == [0, 1])


def test_a_dead_member_is_replaced_and_what_it_commits_later_is_refused(client, topic, group, join):
    dead = MemberProcess(client.name, client.bootstrap, group, topic)
    with contextlib.closing(dead):
        poll_until([dead], lambda: dead.assigned() == [0, 1])
        dead.commit(0, 1)
        dead.pause()
        paused_at = time.monotonic()
        heir = join(group)
        poll_until([heir], lambda: heir.assigned() == [0, 1])
        assert time.monotonic() - paused_at > SESSION_S / 2
        heir.commit(0, 5)
        dead.resume()
        with pytest.raises(Rejected):
            dead.commit(0, 2)
    assert client.committed(group) == {(topic, 0): 5}


def test_groups_read_and_commit_independently(client, topic, group, join):
    members = [join(group), join(group + "-other")]
    assert [read_all(member) for member in members] == [{0: TEN, 1: TEN}] * 2
    members[0].commit(1, 3)
    members[1].commit(1, 8)
    assert client.committed(group) == {(topic, 1): 3}
    assert client.committed(group + "-other") == {(topic, 1): 8}


def test_a_static_member_that_starts_again_has_its_partitions_at_once(group, join):
    first, second = join(group, "first"), join(group, "second")
    share(first, second)
    before = first.assigned(), second.assigned()
    second.close()
    again = join(group, "second")

    def is_back() -> bool:
        assert first.assigned() == before[0]
        return again.assigned() == before[1]

    poll_until([first, again], is_back)


def test_a_group_is_listed_described_and_deleted_with_its_offsets(client, topic, group, join):
    first, second = join(group), join(group)
    share(first, second)
    first.commit(0, 4) if first.assigned() == [0] else second.commit(0, 4)
    assert group in client.groups()
    assert client.group(group) == ("Stable", [[0], [1]])
    with pytest.raises(Rejected) as rejection:
        client.delete_group(group)
    assert rejection.value.code == ErrorCode.NON_EMPTY_GROUP
    first.close()
    second.close()
    assert client.group(group) == ("Empty", [])
    client.delete_group(group)
    assert group not in client.groups()
    assert client.committed(group) == {}
    with pytest.raises(Rejected) as rejection:
        client.delete_group(group)
    assert rejection.value.code == ErrorCode.GROUP_ID_NOT_FOUND


def test_offsets_are_set_from_outside_while_a_group_has_no_members(client, topic, group, join):
    client.commit(group, topic, {0: 6, 1: 9})
    assert client.committed(group) == {(topic, 0): 6, (topic, 1): 9}
    member = join(group)
    assert read_all(member) == {0: [6, 7, 8, 9], 1: [9]}
    with pytest.raises(Rejected) as rejection:
        client.commit(group, topic, {0: 1})
    assert rejection.value.code == ErrorCode.UNKNOWN_MEMBER_ID
    assert client.committed(group)[topic, 0] == 6


def test_nothing_is_committed_for_a_partition_that_does_not_exist(client, topic, group):
    with pytest.raises(Rejected) as rejection:
        client.commit(group, topic, {5: 1})
    assert rejection.value.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert client.committed(group) == {}


def test_a_topics_offsets_go_with_it(client, topic, group):
    client.create(topic + "-kept")
    client.commit(group, topic, {0: 3, 1: 4})
    client.commit(group, topic + "-kept", {0: 5})
    client.delete(topic)
    client.create(topic, 2)
    assert soon(lambda: client.committed(group) == {(topic + "-kept", 0): 5})
