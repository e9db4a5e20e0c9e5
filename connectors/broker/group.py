"""One consumer group: who belongs to it, in which generation, and what its leader assigned to whom.

Kafka's classic group protocol as a state machine without I/O: the clock is passed in, and whoever
has to wait (a JoinGroup until all have joined, a SyncGroup until the leader has assigned) passes a
function that is called once, with the answer or with the refusal.

    Empty -> PreparingRebalance -> CompletingRebalance -> Stable
                  ^    all have joined        the leader has assigned    |
                  +------- a member joins, leaves, dies or changes ------+

Every new generation refuses what members of older ones ask. Nothing here is stored: after a restart
of the broker all members join again. An empty group is Dead, to be forgotten, after some time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum

from connectors.broker.errors import ErrorCode, Refused
from connectors.broker.members import Joined, JoinRequest, Member, Synced

FIRST_JOIN_S = 300.0  # for which a new member may wait for the others without being heard
FORGET_S = 600.0  # after which an empty group is Dead


class State(StrEnum):
    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


class Group:
    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds that never go back."""
        self._clock = clock
        self.state = State.EMPTY
        self.generation = 0
        self.protocol_type = ""
        self.protocol = ""
        self.leader = ""
        self.members: dict[str, Member] = {}
        self._static: dict[str, str] = {}  # member ids by instance id
        self._told: dict[str, float] = {}  # ids told and not yet joined with, and until when
        self._deadline: float | None = None  # of joining, then of asking for the assignment
        self._empty_since = clock()

    def join(
        self, request: JoinRequest, new_id: str, answer: Callable[[Joined | Refused], None]
    ) -> None:
        """`new_id` becomes the member's id if it has none. Refused, with MEMBER_ID_REQUIRED when it
        has been told `new_id` and is to join with it."""
        self._check_protocols(request)
        if request.member_id in self._told:
            del self._told[request.member_id]
            self._add(request.member_id, request, answer)
        elif request.member_id:
            self._join_again(request, answer)
        elif request.instance_id in self._static:
            self._replace(request, new_id, answer)
        elif request.knows_its_id_first and request.instance_id is None:
            self._told[new_id] = self._clock() + request.session_timeout_s
            raise Refused(ErrorCode.MEMBER_ID_REQUIRED, f"join as {new_id!r}")
        else:
            self._add(new_id, request, answer)

    def _check_protocols(self, request: JoinRequest) -> None:
        shared = self._shared_protocols()
        fits = not self.members or (
            request.protocol_type == self.protocol_type and shared & request.protocols.keys()
        )
        if not request.protocol_type or not request.protocols or not fits:
            raise Refused(
                ErrorCode.INCONSISTENT_GROUP_PROTOCOL,
                f"the members share {self.protocol_type!r} {sorted(shared)},"
                f" got {request.protocol_type!r} {sorted(request.protocols)}",
            )

    def _shared_protocols(self) -> set[str]:
        supported = [set(member.asked.protocols) for member in self.members.values()]
        return set.intersection(*supported) if supported else set()

    def _add(
        self, member_id: str, request: JoinRequest, answer: Callable[[Joined | Refused], None]
    ) -> None:
        if request.instance_id is not None:
            self._static[request.instance_id] = member_id
        self.protocol_type = request.protocol_type
        member = Member(
            id=member_id, instance_id=request.instance_id, asked=request, joining=answer
        )
        self.members[member_id] = member
        self._hear(member)
        self._rebalance()

    def _join_again(self, request: JoinRequest, answer: Callable[[Joined | Refused], None]) -> None:
        member = self._member(request.member_id, request.instance_id)
        unchanged = member.asked.protocols == request.protocols
        missed_the_answer = unchanged and (
            self.state is State.COMPLETING
            or (self.state is State.STABLE and member.id != self.leader)
        )
        self._hear(member)
        if missed_the_answer:
            answer(self._joined(member))
            return
        member.refuse(ErrorCode.REBALANCE_IN_PROGRESS)
        member.asked, member.joining = request, answer
        self._rebalance()

    def _replace(
        self, request: JoinRequest, new_id: str, answer: Callable[[Joined | Refused], None]
    ) -> None:
        """A static member's new process takes its place, and in a stable group its assignment."""
        assert request.instance_id is not None
        old = self.members[self._static[request.instance_id]]
        old.refuse(ErrorCode.FENCED_INSTANCE_ID)
        self._static[request.instance_id] = new_id
        new = replace(old, id=new_id, asked=request)
        self.members = {
            member.id: member
            for member in (new if each is old else each for each in self.members.values())
        }
        leader = self.leader
        if leader == old.id:
            self.leader = new_id
        self._hear(new)
        if self.state is State.STABLE and old.asked.protocols == request.protocols:
            # Under the leader's former id, so that it does not assign what the others would not
            # learn of.
            answer(replace(self._joined(new), leader=leader, members=()))
            return
        new.joining = answer
        self._rebalance()

    def _rebalance(self) -> None:
        if self.state is not State.PREPARING:
            for member in self.members.values():
                if member.syncing is not None:
                    member.refuse(ErrorCode.REBALANCE_IN_PROGRESS)
                    self._hear(member)
            self.state = State.PREPARING
            self._deadline = self._clock() + self._rebalance_timeout_s()
        self._complete_if_all_joined()

    def _rebalance_timeout_s(self) -> float:
        return max((m.asked.rebalance_timeout_s for m in self.members.values()), default=0.0)

    def _complete_if_all_joined(self) -> None:
        all_joined = all(member.joining is not None for member in self.members.values())
        if self.state is State.PREPARING and all_joined and not (self._told and self.members):
            self._complete_join()

    def _complete_join(self) -> None:
        """The next generation, of those that have joined and of static members that still may."""
        for member in list(self.members.values()):
            if member.joining is None and member.instance_id is None:
                self._drop(member)
        joined = [member for member in self.members.values() if member.joining is not None]
        if self.members and not joined:
            self._deadline = self._clock() + self._rebalance_timeout_s()
            return
        self.generation += 1
        if not joined:
            self.state, self.protocol, self.leader = State.EMPTY, "", ""
            self._deadline, self._empty_since = None, self._clock()
            return
        if self.leader not in {member.id for member in joined}:
            self.leader = joined[0].id
        self.state, self.protocol = State.COMPLETING, self._vote()
        self._deadline = self._clock() + self._rebalance_timeout_s()
        for member in self.members.values():
            member.synced, member.assignment = False, b""
        for member in joined:
            answer, member.joining, member.is_new = member.joining, None, False
            self._hear(member)
            assert answer is not None
            answer(self._joined(member))

    def _vote(self) -> str:
        """Each member votes for the first of its protocols that all support."""
        shared = self._shared_protocols()
        votes = Counter(
            next(name for name in member.asked.protocols if name in shared)
            for member in self.members.values()
        )
        return votes.most_common(1)[0][0]

    def _joined(self, member: Member) -> Joined:
        members = self.members.values() if member.id == self.leader else ()
        return Joined(
            member_id=member.id,
            generation=self.generation,
            protocol_type=self.protocol_type,
            protocol=self.protocol,
            leader=self.leader,
            members=tuple(
                (each.id, each.instance_id, each.asked.protocols[self.protocol]) for each in members
            ),
        )

    def sync(
        self,
        generation: int,
        member_id: str,
        instance_id: str | None,
        protocol: tuple[str | None, str | None],
        assignments: Mapping[str, bytes],
        answer: Callable[[Synced | Refused], None],
    ) -> None:
        """`protocol` is the type and the name that the member knows, None what it does not say;
        `assignments` is the leader's, by member id. Refused."""
        member = self._current(generation, member_id, instance_id)
        ours = (self.protocol_type, self.protocol)
        if any(said not in (None, known) for said, known in zip(protocol, ours, strict=True)):
            raise Refused(
                ErrorCode.INCONSISTENT_GROUP_PROTOCOL, f"the protocol is {ours}, got {protocol}"
            )
        if self.state is State.PREPARING:
            raise Refused(ErrorCode.REBALANCE_IN_PROGRESS, "members are joining")
        member.refuse(ErrorCode.REBALANCE_IN_PROGRESS)  # an answer that it no longer waits for
        member.synced, member.syncing = True, answer
        if self.state is State.COMPLETING and member.id == self.leader:
            self.state = State.STABLE
            for each in self.members.values():
                each.assignment = assignments.get(each.id, b"")
        if self.state is State.STABLE:
            for each in self.members.values():
                self._hand_out(each)

    def _hand_out(self, member: Member) -> None:
        answer, member.syncing = member.syncing, None
        if answer is not None:
            self._hear(member)
            answer(
                Synced(
                    protocol_type=self.protocol_type,
                    protocol=self.protocol,
                    assignment=member.assignment,
                )
            )

    def heartbeat(self, generation: int, member_id: str, instance_id: str | None) -> None:
        """Refused, with REBALANCE_IN_PROGRESS when it is to join again."""
        self._hear(self._current(generation, member_id, instance_id))
        if self.state is State.PREPARING:
            raise Refused(ErrorCode.REBALANCE_IN_PROGRESS, "members are joining")

    def leave(self, member_id: str, instance_id: str | None) -> str:
        """The id of the member that left: a static one may be named by its instance id alone.
        Refused."""
        if member_id in self._told:
            del self._told[member_id]
            self._complete_if_all_joined()
            return member_id
        if instance_id is not None and not member_id:
            member_id = self._static.get(instance_id, "")
        self._drop(self._member(member_id, instance_id))
        self._rebalance()
        return member_id

    def check_commit(self, generation: int, member_id: str, instance_id: str | None) -> None:
        """Refused unless a member of this generation commits, or nobody's member to a group that
        has none."""
        if generation < 0 and self.state is State.EMPTY:
            return
        self._hear(self._current(generation, member_id, instance_id))
        if self.state is State.COMPLETING:
            raise Refused(ErrorCode.REBALANCE_IN_PROGRESS, "the leader is assigning")

    def expire(self) -> None:
        """Does what time has made due; to be called at `due_at`."""
        now = self._clock()
        for member_id in [each for each, until in self._told.items() if until <= now]:
            del self._told[member_id]
        silent = [m for m in self.members.values() if m.may_expire and m.expires_at <= now]
        if (
            self._deadline is not None
            and self._deadline <= now
            and self.state is not State.PREPARING
        ):
            silent += [m for m in self.members.values() if not m.synced and m not in silent]
            self._deadline = None
        for member in silent:
            self._drop(member)
        if silent:
            self._rebalance()
        self._complete_if_all_joined()
        if self.state is State.PREPARING and self._deadline is not None and self._deadline <= now:
            self._complete_join()
        if self.state is State.EMPTY and not self._told and self._empty_since + FORGET_S <= now:
            self.state = State.DEAD

    def due_at(self) -> float | None:
        """When to call `expire`, if nothing happens before."""
        due = [member.expires_at for member in self.members.values() if member.may_expire]
        due += self._told.values()
        if self._deadline is not None:
            due.append(self._deadline)
        if self.state is State.EMPTY and not self._told:
            due.append(self._empty_since + FORGET_S)
        return min(due, default=None)

    def stop(self) -> None:
        """Nobody waits any longer; clients then look for the group elsewhere."""
        for member in self.members.values():
            member.refuse(ErrorCode.NOT_COORDINATOR)

    def _member(self, member_id: str, instance_id: str | None) -> Member:
        if instance_id is not None and self._static.get(instance_id, member_id) != member_id:
            raise Refused(
                ErrorCode.FENCED_INSTANCE_ID, f"another process is the member {instance_id!r} now"
            )
        member = self.members.get(member_id)
        if member is None or (instance_id is not None and instance_id not in self._static):
            raise Refused(ErrorCode.UNKNOWN_MEMBER_ID, f"there is no member {member_id!r}")
        return member

    def _current(self, generation: int, member_id: str, instance_id: str | None) -> Member:
        member = self._member(member_id, instance_id)
        if generation != self.generation:
            raise Refused(
                ErrorCode.ILLEGAL_GENERATION,
                f"the generation is {self.generation}, got {generation}",
            )
        return member

    def _hear(self, member: Member) -> None:
        silence_s = FIRST_JOIN_S if member.is_new else member.asked.session_timeout_s
        member.expires_at = self._clock() + silence_s

    def _drop(self, member: Member) -> None:
        del self.members[member.id]
        if member.instance_id is not None:
            del self._static[member.instance_id]
        member.refuse(ErrorCode.UNKNOWN_MEMBER_ID)
