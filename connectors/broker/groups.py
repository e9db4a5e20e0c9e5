"""All consumer groups: their timers, who waits in them, and what they commit.

A group that has only committed offsets has no `Group`: it is Empty. Commits, and deletions of
groups and topics, come one after another, so that what is checked still holds when it is stored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from kafka.protocol.consumer.metadata import ConsumerProtocolSubscription, ConsumerProtocolType

from connectors.broker.errors import ErrorCode, Refused
from connectors.broker.group import Group, State
from connectors.broker.members import Joined, JoinRequest, Synced
from connectors.broker.offsets import Committed, Offsets, Where
from connectors.broker.topics import Topics

MAX_METADATA_BYTES = 4096

T = TypeVar("T")


class Groups:
    def __init__(self, offsets: Offsets, topics: Topics) -> None:
        self._offsets = offsets
        self._topics = topics
        self._groups: dict[str, Group] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._storing = asyncio.Lock()

    def names(self) -> list[str]:
        return sorted({*self._groups, *self._offsets})

    def get(self, name: str) -> Group | None:
        """None, too, when it has only offsets."""
        return self._groups.get(name)

    def offsets(self, name: str) -> Mapping[Where, Committed]:
        return self._offsets.of(name)

    def _member_of(self, name: str) -> Group:
        _check_name(name)
        group = self._groups.get(name)
        if group is None:
            raise Refused(ErrorCode.UNKNOWN_MEMBER_ID, f"group {name!r} has no members")
        return group

    async def join(self, name: str, request: JoinRequest, new_id: str) -> Joined:
        """`Group.join`, waited for."""
        _check_name(name)
        if request.member_id:
            group = self._member_of(name)
        else:
            group = self._groups.setdefault(name, Group(time.monotonic))
        return await self._waited(name, lambda answer: group.join(request, new_id, answer))

    async def sync(
        self,
        name: str,
        generation: int,
        member_id: str,
        instance_id: str | None,
        protocol: tuple[str | None, str | None],
        assignments: Mapping[str, bytes],
    ) -> Synced:
        """`Group.sync`, waited for."""
        group = self._member_of(name)
        return await self._waited(
            name,
            lambda answer: group.sync(
                generation, member_id, instance_id, protocol, assignments, answer
            ),
        )

    async def _waited(self, name: str, ask: Callable[[Callable[[T | Refused], None]], None]) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def answer(result: T | Refused) -> None:
            if future.done():
                return  # the broker is stopping
            if isinstance(result, Refused):
                future.set_exception(result)
            else:
                future.set_result(result)

        try:
            ask(answer)
        finally:
            self._set_timer(name)
        return await future

    def heartbeat(
        self, name: str, generation: int, member_id: str, instance_id: str | None
    ) -> None:
        """`Group.heartbeat`."""
        group = self._member_of(name)
        try:
            group.heartbeat(generation, member_id, instance_id)
        finally:
            self._set_timer(name)

    def leave(self, name: str, member_id: str, instance_id: str | None) -> str:
        """`Group.leave`."""
        group = self._member_of(name)
        try:
            return group.leave(member_id, instance_id)
        finally:
            self._set_timer(name)

    def _set_timer(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()
        group = self._groups[name]
        due_at = group.due_at()
        if group.state is State.DEAD:
            del self._groups[name]
        elif due_at is not None:
            delay_s = max(0.0, due_at - time.monotonic())
            self._timers[name] = asyncio.get_running_loop().call_later(delay_s, self._expire, name)

    def _expire(self, name: str) -> None:
        self._groups[name].expire()
        self._set_timer(name)

    async def commit(
        self,
        name: str,
        generation: int,
        member_id: str,
        instance_id: str | None,
        wanted: Mapping[Where, Committed],
    ) -> dict[Where, ErrorCode]:
        """How each ended; those with NONE are stored. Refused when the group takes none; OSError
        when the disk refuses, then none is stored."""
        _check_name(name)
        async with self._storing:
            group = self._groups.get(name)
            if group is not None:
                group.check_commit(generation, member_id, instance_id)
                self._set_timer(name)
            elif generation >= 0:
                raise Refused(ErrorCode.ILLEGAL_GENERATION, f"group {name!r} has no members")
            codes = {where: self._check(where, committed) for where, committed in wanted.items()}
            await self._offsets.store(
                name, {where: wanted[where] for where, code in codes.items() if not code}
            )
        return codes

    def _check(self, where: Where, committed: Committed) -> ErrorCode:
        try:
            self._topics.partition(*where)
        except Refused as refused:
            return refused.code
        if len(committed.metadata.encode()) > MAX_METADATA_BYTES:
            return ErrorCode.OFFSET_METADATA_TOO_LARGE
        return ErrorCode.NONE

    async def delete(self, name: str) -> None:
        """Refused when it has members or is unknown; OSError when the disk refuses."""
        _check_name(name)
        async with self._storing:
            group = self._groups.get(name)
            if group is None and not self._offsets.of(name):
                raise Refused(ErrorCode.GROUP_ID_NOT_FOUND, f"there is no group {name!r}")
            if group is not None and group.state is not State.EMPTY:
                raise Refused(ErrorCode.NON_EMPTY_GROUP, f"group {name!r} has members")
            await self._offsets.store(name, dict.fromkeys(self._offsets.of(name)))
            if group is not None and group.state is State.EMPTY:
                self._timers.pop(name).cancel()
                del self._groups[name]

    async def delete_offsets(self, name: str, wanted: Iterable[Where]) -> dict[Where, ErrorCode]:
        """How each ended. Refused when the group is unknown, or has members that do not say which
        topics they read; OSError when the disk refuses."""
        async with self._storing:
            group = self._groups.get(name)
            if group is None and not self._offsets.of(name):
                raise Refused(ErrorCode.GROUP_ID_NOT_FOUND, f"there is no group {name!r}")
            read = _topics_read(group) if group is not None else set()
            codes = {
                where: ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC if where[0] in read else ErrorCode.NONE
                for where in wanted
            }
            await self._offsets.store(
                name,
                {
                    where: None
                    for where, code in codes.items()
                    if not code and where in self._offsets.of(name)
                },
            )
        return codes

    async def forget_topic(self, topic: str) -> None:
        """What was committed for a topic that does not exist is gone, so that nobody begins a new
        one where an old one was left. OSError when the disk refuses."""
        async with self._storing:
            if self._topics.get(topic) is not None:
                return
            for name in list(self._offsets):
                committed = self._offsets.of(name)
                await self._offsets.store(
                    name, {where: None for where in committed if where[0] == topic}
                )

    def stop(self) -> None:
        """Nobody waits any longer."""
        for group in self._groups.values():
            group.stop()


def _check_name(name: str) -> None:
    if not name:
        raise Refused(ErrorCode.INVALID_GROUP_ID, "a group has a name")


def _topics_read(group: Group) -> set[str]:
    """By the members, as they say. Refused if they say it in no way known here."""
    metadata = [m for member in group.members.values() for m in member.asked.protocols.values()]
    try:
        if metadata and group.protocol_type != ConsumerProtocolType:
            raise ValueError(group.protocol_type)
        return {t for each in metadata for t in ConsumerProtocolSubscription.decode(each).topics}
    # kafka-python's decoders raise whatever the bytes make them stumble over.
    except Exception as error:
        raise Refused(ErrorCode.NON_EMPTY_GROUP, "the group has members") from error
