"""One consumer group as a state machine, in a time of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.broker.errors import ErrorCode, Refused
from connectors.broker.group import FIRST_JOIN_S, FORGET_S, Group, State
from connectors.broker.members import Joined, JoinRequest, Synced

SESSION_S, REBALANCE_S = 10.0, 60.0
TELL = ErrorCode.MEMBER_ID_REQUIRED
RANGE = {"range": b"topics"}


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Answers:
    """What one waiting member is answered; at most once."""

    got: list[Joined | Synced | Refused] = field(default_factory=list)

    def __call__(self, answer: Joined | Synced | Refused) -> None:
        assert not self.got
        self.got.append(answer)

    @property
    def code(self) -> ErrorCode | None:
        """None while it waits."""
        if not self.got:
            return None
        return self.got[0].code if isinstance(self.got[0], Refused) else ErrorCode.NONE

    @property
    def joined(self) -> Joined:
        assert isinstance(self.got[0], Joined), self.got
        return self.got[0]

    @property
    def assignment(self) -> bytes:
        assert isinstance(self.got[0], Synced), self.got
        return self.got[0].assignment


class Scene:
    """A group, its clock, and short ways to ask."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.group = Group(self.clock)
        self.num_ids = 0

    def join(
        self,
        member_id: str = "",
        *,
        instance: str | None = None,
        protocols: dict[str, bytes] | None = None,
        protocol_type: str = "consumer",
        told_first: bool = False,
        rebalance_s: float = REBALANCE_S,
    ) -> Answers:
        """A new member's id is a, b, c, ... in the order of asking."""
        answers = Answers()
        request = JoinRequest(
            member_id=member_id,
            instance_id=instance,
            client_id="client",
            client_host="host",
            session_timeout_s=SESSION_S,
            rebalance_timeout_s=rebalance_s,
            protocol_type=protocol_type,
            protocols=protocols or RANGE,
            knows_its_id_first=told_first,
        )
        new_id = "abcdefghijklmnopqrstuvwxyz"[self.num_ids % 26]
        if not member_id:
            self.num_ids += 1
        self.group.join(request, new_id, answers)
        return answers

    def sync(
        self, member_id: str, assignments: dict[str, bytes] | None = None, *, back: int = 0
    ) -> Answers:
        answers = Answers()
        self.group.sync(
            self.group.generation - back, member_id, None, (None, None), assignments or {}, answers
        )
        return answers

    def beat(self, *member_ids: str) -> None:
        for member_id in member_ids:
            self.group.heartbeat(self.group.generation, member_id, None)

    def later(self, seconds: float) -> None:
        """Time passes, and what becomes due is done when it is due."""
        end = self.clock.now + seconds
        while (due := self.group.due_at()) is not None and due <= end:
            self.clock.now = max(due, self.clock.now)
            self.group.expire()
            if self.group.state is State.DEAD:
                break
        self.clock.now = end

    def stable(self, *instances: str | None) -> list[str]:
        """Members that join together, the first of which leads; each is assigned its own name."""
        answers = [self.join(instance=instance) for instance in instances]
        for answer in answers[:-1]:
            if answer.got:
                answers.append(self.join(answer.joined.member_id, instance=instances[0]))
        ids = list(self.group.members)
        for member_id in ids:
            self.sync(member_id, {each: each.encode() for each in ids})
        assert self.group.state is State.STABLE
        return ids


@pytest.fixture
def scene() -> Scene:
    return Scene()


def refusal(call, *arguments, **keywords) -> ErrorCode:
    with pytest.raises(Refused) as refused:
        call(*arguments, **keywords)
    return refused.value.code


def test_the_first_member_leads_and_assigns_to_itself(scene):
    joined = scene.join().joined
    assert (joined.generation, joined.leader, joined.protocol) == (1, "a", "range")
    assert joined.members == (("a", None, b"topics"),)
    assert scene.sync("a", {"a": b"all"}).assignment == b"all"
    assert scene.group.state is State.STABLE


def test_a_second_member_waits_until_the_first_has_joined_again(scene):
    scene.stable(None)
    second = scene.join()
    assert second.code is None
    assert refusal(scene.beat, "a") == ErrorCode.REBALANCE_IN_PROGRESS
    first = scene.join("a")
    assert {first.joined.generation, second.joined.generation} == {2}
    assert [each[0] for each in first.joined.members] == ["a", "b"]
    assert second.joined.members == ()
    waiting = scene.sync("b")
    assert waiting.code is None
    assert scene.sync("a", {"a": b"1", "b": b"2"}).assignment == b"1"
    assert waiting.assignment == b"2"


def test_members_that_do_not_join_again_in_time_are_left_out(scene):
    scene.stable(None, None)
    joining, again = scene.join(), scene.join("a")
    for _ in range(int(REBALANCE_S / 5)):
        assert joining.code is again.code is None
        assert refusal(scene.beat, "b") == ErrorCode.REBALANCE_IN_PROGRESS
        scene.later(5)
    assert [each[0] for each in again.joined.members] == ["a", "c"]
    assert joining.code == ErrorCode.NONE
    assert refusal(scene.beat, "b") == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_silent_member_is_dropped_after_its_session(scene):
    scene.stable(None, None)
    for _ in range(3):
        scene.later(SESSION_S - 1)
        scene.beat("a", "b")
    scene.later(SESSION_S - 1)
    scene.beat("a")
    scene.later(1)
    assert refusal(scene.beat, "b") == ErrorCode.UNKNOWN_MEMBER_ID
    assert refusal(scene.beat, "a") == ErrorCode.REBALANCE_IN_PROGRESS
    assert scene.join("a").joined.members == (("a", None, b"topics"),)


def test_a_member_that_waits_for_others_needs_no_heartbeat(scene):
    scene.stable(None, None)
    joining = scene.join("a")
    for _ in range(3):
        scene.later(SESSION_S - 1)
        assert refusal(scene.beat, "b") == ErrorCode.REBALANCE_IN_PROGRESS
    assert joining.code is None
    scene.join("b")
    assert joining.code == ErrorCode.NONE


def test_a_new_member_that_waits_very_long_is_taken_for_dead(scene):
    scene.join(rebalance_s=2 * FIRST_JOIN_S)
    scene.sync("a", {})
    joining = scene.join()
    while joining.code is None:
        scene.later(5)
        assert refusal(scene.beat, "a") == ErrorCode.REBALANCE_IN_PROGRESS
    assert joining.code == ErrorCode.UNKNOWN_MEMBER_ID
    assert scene.clock.now == 1000 + FIRST_JOIN_S


def test_a_member_that_never_asks_for_its_assignment_is_dropped(scene):
    scene.stable(None)
    scene.join()
    scene.join("a")
    scene.sync("a", {})
    for _ in range(int(REBALANCE_S / 5)):
        scene.beat("a", "b")
        scene.later(5)
    assert refusal(scene.beat, "b") == ErrorCode.UNKNOWN_MEMBER_ID
    assert refusal(scene.beat, "a") == ErrorCode.REBALANCE_IN_PROGRESS


def test_a_leader_that_never_assigns_is_replaced(scene):
    scene.stable(None, None)
    scene.join("a")
    scene.join("b")
    waiting = scene.sync("b")
    scene.later(SESSION_S)
    assert waiting.code == ErrorCode.REBALANCE_IN_PROGRESS
    assert scene.join("b").joined.leader == "b"
    assert refusal(scene.beat, "a") == ErrorCode.UNKNOWN_MEMBER_ID


def test_what_an_older_generation_asks_is_refused(scene):
    scene.stable(None, None)
    old = scene.group.generation - 1
    assert refusal(scene.group.heartbeat, old, "a", None) == ErrorCode.ILLEGAL_GENERATION
    assert refusal(scene.group.check_commit, old, "a", None) == ErrorCode.ILLEGAL_GENERATION
    assert refusal(scene.sync, "a", back=1) == ErrorCode.ILLEGAL_GENERATION
    assert refusal(scene.join, "z") == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_commit_is_a_members_of_this_generation_or_nobodys_in_an_empty_group(scene):
    scene.group.check_commit(-1, "", None)
    joined = scene.join().joined
    check = scene.group.check_commit
    assert refusal(check, 1, "a", None) == ErrorCode.REBALANCE_IN_PROGRESS
    scene.sync("a", {"a": b""})
    check(joined.generation, "a", None)
    assert refusal(check, -1, "", None) == ErrorCode.UNKNOWN_MEMBER_ID
    scene.join()
    check(joined.generation, "a", None)  # before it joins again it may
    scene.group.leave("a", None)
    scene.group.leave("b", None)
    assert refusal(check, joined.generation, "a", None) == ErrorCode.UNKNOWN_MEMBER_ID
    check(-1, "", None)


def test_most_members_prefer_the_protocol_that_is_used(scene):
    scene.join(protocols={"sticky": b"1", "range": b"1"})
    scene.join(protocols={"range": b"2", "sticky": b"2", "other": b"2"})
    third = scene.join(protocols={"other": b"3", "range": b"3", "sticky": b"3"})
    scene.join("a", protocols={"sticky": b"1", "range": b"1"})
    scene.join("b", protocols={"range": b"2", "sticky": b"2", "other": b"2"})
    assert third.joined.protocol == "range"


@pytest.mark.parametrize(
    "odd",
    [{"protocols": {"other": b""}}, {"protocol_type": "connect"}, {"protocol_type": ""}],
)
def test_a_member_that_shares_no_protocol_is_refused(scene, odd):
    scene.stable(None)
    assert refusal(scene.join, **odd) == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert scene.group.state is State.STABLE


def test_a_protocol_named_wrongly_by_a_member_is_refused(scene):
    scene.join()
    code = refusal(scene.group.sync, 1, "a", None, ("consumer", "sticky"), {}, Answers())
    assert code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    scene.group.sync(1, "a", None, ("consumer", "range"), {}, Answers())


def test_a_member_is_told_its_id_and_joins_with_it(scene):
    assert refusal(scene.join, told_first=True) == TELL
    assert scene.group.state is State.EMPTY
    assert scene.join("a", told_first=True).joined.leader == "a"


def test_an_id_that_nobody_uses_holds_the_others_up_for_a_session_only(scene):
    assert refusal(scene.join, told_first=True) == TELL
    joining = scene.join()
    scene.later(SESSION_S - 1)
    assert joining.code is None
    scene.later(1)
    assert joining.joined.members == (("b", None, b"topics"),)


def test_an_id_that_was_told_may_be_given_back(scene):
    assert refusal(scene.join, told_first=True) == TELL
    joining = scene.join()
    scene.group.leave("a", None)
    assert joining.code == ErrorCode.NONE


def test_a_follower_that_joins_again_unchanged_is_told_what_it_missed(scene):
    scene.stable(None, None)
    generation = scene.group.generation
    assert scene.join("b").joined.generation == generation
    assert scene.group.state is State.STABLE


@pytest.mark.parametrize("who", ["leader", "changed follower"])
def test_others_that_join_again_begin_a_new_generation(scene, who):
    scene.stable(None, None)
    if who == "leader":
        waiting = scene.join("a")
    else:
        waiting = scene.join("b", protocols={"range": b"other topics"})
    assert waiting.code is None
    assert scene.group.state is State.PREPARING


def test_a_join_sent_twice_is_answered_twice(scene):
    scene.stable(None, None)
    lost = scene.join("a")
    again = scene.join("a")
    scene.join("b")
    assert lost.code == ErrorCode.REBALANCE_IN_PROGRESS
    assert again.code == ErrorCode.NONE


def test_a_member_that_leaves_makes_the_others_join_again_and_the_last_one_empties_the_group(scene):
    scene.stable(None, None)
    assert scene.group.leave("b", None) == "b"
    assert refusal(scene.beat, "a") == ErrorCode.REBALANCE_IN_PROGRESS
    scene.group.leave("a", None)
    assert scene.group.state is State.EMPTY
    assert refusal(scene.group.leave, "a", None) == ErrorCode.UNKNOWN_MEMBER_ID
    scene.later(FORGET_S - 1)
    assert scene.group.state is State.EMPTY
    scene.later(1)
    assert scene.group.state is State.DEAD


def test_a_static_members_new_process_takes_its_place_without_a_rebalance(scene):
    scene.stable("one", "two")
    generation = scene.group.generation
    again = scene.join(instance="two")
    new_id = again.joined.member_id
    assert again.joined.generation == generation
    assert scene.sync(new_id).assignment == b"b"
    assert refusal(scene.group.heartbeat, generation, "b", "two") == ErrorCode.FENCED_INSTANCE_ID
    assert refusal(scene.group.check_commit, generation, "b", "two") == (
        ErrorCode.FENCED_INSTANCE_ID
    )
    scene.group.heartbeat(generation, "a", "one")


def test_a_static_leaders_new_process_does_not_assign(scene):
    scene.stable("one", "two")
    again = scene.join(instance="one")
    assert again.joined.leader == "a"
    assert again.joined.member_id != "a"
    assert again.joined.members == ()
    assert scene.sync(again.joined.member_id).assignment == b"a"


def test_a_static_member_whose_process_reads_otherwise_makes_all_join_again(scene):
    scene.stable("one", "two")
    assert scene.join(instance="two", protocols={"range": b"other"}).code is None
    assert scene.group.state is State.PREPARING


def test_a_static_member_keeps_its_place_for_its_session_while_others_join(scene):
    scene.stable("one")
    joining = scene.join()
    scene.later(SESSION_S - 1)
    assert joining.code is None
    scene.later(1)
    assert joining.joined.members == (("b", None, b"topics"),)


def test_a_static_members_process_that_still_waits_is_fenced(scene):
    scene.stable("one", None)
    waiting = scene.join("a", instance="one")
    scene.join(instance="one")
    assert waiting.code == ErrorCode.FENCED_INSTANCE_ID


def test_a_static_member_may_leave_by_its_instance_id(scene):
    scene.stable("one", "two")
    assert scene.group.leave("", "two") == "b"
    assert refusal(scene.group.leave, "", "two") == ErrorCode.UNKNOWN_MEMBER_ID
    assert refusal(scene.group.leave, "z", "one") == ErrorCode.FENCED_INSTANCE_ID


def test_nobody_waits_for_a_group_that_stops(scene):
    scene.stable(None, None)
    joining = scene.join("a")
    scene.group.stop()
    assert joining.code == ErrorCode.NOT_COORDINATOR


MEMBER = st.sampled_from(["a", "b", "c", "d"])
STEP = st.one_of(
    st.tuples(st.just("join"), st.sampled_from(["", "", "a", "b", "c", "d"])),
    st.tuples(st.just("static"), st.sampled_from(["one", "two"])),
    st.tuples(st.just("ask for an id"), st.none()),
    st.tuples(st.sampled_from(["sync", "beat", "leave"]), MEMBER),
    st.tuples(st.just("later"), st.sampled_from([0.5, 5.0, REBALANCE_S, FORGET_S - 1])),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(STEP, max_size=60))
def test_whatever_members_do_a_generation_has_one_leader_and_one_assignment(steps):
    scene = Scene()
    waiting: list[Answers] = []
    generations: list[int] = [0]
    joined: list[Joined] = []
    asked: list[tuple[int, Answers]] = []
    for what, argument in steps:
        answers: Answers | None = None
        try:
            if what == "join":
                answers = scene.join(argument)
            elif what == "static":
                answers = scene.join(instance=argument)
            elif what == "ask for an id":
                scene.join(told_first=True)
            elif what == "sync":
                generation = scene.group.generation
                answers = scene.sync(argument, dict.fromkeys("abcdefgh", b"%d" % generation))
                asked.append((generation, answers))
            elif what == "beat":
                scene.beat(argument)
            elif what == "leave":
                scene.group.leave(argument, None)
            else:
                scene.later(argument)
        except Refused:
            pass
        if scene.group.state is State.DEAD:
            break
        due_at = scene.group.due_at()
        assert due_at is not None
        assert due_at > scene.clock.now or what != "later"
        if answers is not None:
            waiting.append(answers)
        generations.append(scene.group.generation)
        joined += [a.joined for a in waiting if a.got and isinstance(a.got[0], Joined)]
        waiting = [a for a in waiting if not a.got]
        # Whoever waits is a member that the group knows to wait, and nobody else.
        known = [m.joining or m.syncing for m in scene.group.members.values()]
        assert sorted(map(id, waiting)) == sorted(id(each) for each in known if each)
        assert (scene.group.state is State.EMPTY) == (not scene.group.members)
    assert generations == sorted(generations)
    for generation, answers in asked:
        if answers.code == ErrorCode.NONE:
            assert answers.assignment in (b"%d" % generation, b"")
    leaders: dict[int, set[str]] = {}
    for each in joined:
        if each.members:
            leaders.setdefault(each.generation, set()).add(each.leader)
    assert all(len(each) == 1 for each in leaders.values())
    scene.group.stop()
    assert all(answers.got for answers in waiting)
