"""A session's rows as a group: what rides along, what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from connectors.branches import CALLS, TRANSCRIPT
from connectors.records import Closed, Group, Origin, Trajectory
from connectors.traffic import Call
from operators.labels import Label
from operators.live_groups import CUT, LEFT_OUT, WHY, Episode, Room, group_of, value_id, value_key
from operators.traces import assemble
from tests.operators.live_calls import EOS, call, words

ORIGIN = Origin("x.agent-traffic", 1, 7)


def made(calls: Sequence[Call], *, cap: int | None = None, **changes: Any) -> Group | Closed:
    rows, _ = assemble(calls, temperature=1.0, tokenise=words)
    fields: dict[str, Any] = {
        "group_id": str(ORIGIN),
        "origin": ORIGIN,
        "session": "s",
        "task": "t",
        "user": "",
        "calls": calls,
        "rows": rows,
        "label": Label(1.0, "final"),
    }
    room = Room(context_tokens=20, tokens_per_session=cap)
    return group_of(Episode(**(fields | changes)), room)


def trajectories(ended: Group | Closed) -> tuple[Trajectory, ...]:
    assert isinstance(ended, Group), ended
    return ended.trajectories


FORKED = [call("a", [10], [7, EOS]), call("b", [20], [8, EOS], time=1)]


def test_later_branches_beyond_the_cap_are_left_out_and_counted() -> None:
    (row,) = trajectories(made(FORKED, cap=3))
    assert row.metadata[LEFT_OUT] == "1"
    assert row.metadata[CALLS] == "a b"  # both end here
    assert len(trajectories(made(FORKED, cap=4))) == 2


def test_a_first_branch_beyond_the_cap_closes_the_session() -> None:
    ended = made(FORKED, cap=1)
    assert isinstance(ended, Closed)
    assert ended.reason == "capped"


def test_a_row_longer_than_the_context_is_left_out() -> None:
    long = call("long", list(range(10, 30)), [7, EOS], time=1)
    (row,) = trajectories(made([FORKED[0], long]))
    assert row.metadata[LEFT_OUT] == "1"
    ended = made([long])
    assert isinstance(ended, Closed)
    assert (ended.reason, ended.message) == ("too_long", "a row has 22 tokens and the context 20")


def test_a_retry_that_is_not_trained_still_ends_in_the_group() -> None:
    calls = [call("lost", [10], [7, EOS]), call("kept", [10], [8, EOS], time=1)]
    (row,) = trajectories(made(calls))
    assert row.metadata[CALLS] == "kept lost"


def test_rows_say_why_they_are_not_exact_and_a_label_what_it_was_cut_from() -> None:
    warm = call("a", [10], [7, EOS], temperature=0.5)
    (row,) = trajectories(made([warm], label=Label(1.0, "final", 3.0)))
    assert row.metadata[WHY] == "its log-probs are at 0.5, not at temperature 1"
    assert row.metadata[CUT] == "3.0"


def test_a_conversation_of_several_turns_carries_what_was_said() -> None:
    asked = [{"role": "user", "content": "q"}]
    answer = {"role": "assistant", "content": ""}
    more = [*asked, answer, {"role": "user", "content": "r"}]
    calls = [
        call("a", [10], [7, EOS], messages=asked),
        call("b", [10, 7, EOS, 20], [8, EOS], time=1, messages=more),
    ]
    (row,) = trajectories(made(calls))
    said = msgspec.json.decode(row.metadata[TRANSCRIPT])
    assert said == [answer, {"role": "user", "content": "r"}, answer]


@pytest.mark.parametrize(
    ("value_of", "key", "known"),
    [("task", "", "*"), ("user", "", "u"), ("prompt", "", None), ("task", "mine", "mine")],
)
def test_a_value_is_of_what_the_configuration_says_unless_the_call_says(
    value_of: Any, key: str, known: str | None
) -> None:
    one = call("a", [10], [7], user="u", key=key)
    assert value_id(one, value_of) == known
    assert value_key(one, value_of) == (known or value_key(call("b", [10], [8]), "prompt"))
