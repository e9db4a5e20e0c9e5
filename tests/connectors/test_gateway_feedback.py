"""A body of feedback becomes one fact a session or call; sent again it says nothing new."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from connectors.gateway.errors import Refused
from connectors.gateway.feedback import read
from connectors.traffic import Feedback


def facts(at: str | None = None, /, **body: Any) -> list[Feedback]:
    return read(msgspec.json.encode(body), at)


def test_one_body_about_several_sessions_or_calls() -> None:
    assert [f.session for f in facts(sessions=["a", "b", "a"], value=1)] == ["a", "b"]
    several = facts(session="a", calls=["x", "y"], value=0.5, id="f")
    assert [(f.id, f.session, f.call) for f in several] == [("f/x", "a", "x"), ("f/y", "a", "y")]
    (one,) = facts(call="x", value=False, id="f", name="thumb", source="app", comment="c", time=5)
    assert one == Feedback(id="f", name="thumb", value=0.0, time=5.0, call="x", source="app",
                           comment="c")  # fmt: skip


def test_true_is_one_and_the_path_may_name_the_session() -> None:
    (fact,) = facts("of the path", value=True)
    assert (fact.value, fact.session, fact.name) == (1.0, "of the path", "feedback")


def test_the_id_follows_from_the_content() -> None:
    (one,), (same,), (other,) = (facts(session="a", value=v) for v in (1, 1, 0))
    assert one.id == same.id != other.id
    assert one.id != facts(session="b", value=1)[0].id


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"value": 1}, "session"),
        ({"session": "a"}, "value"),
        ({"session": "a", "value": "good"}, "value"),
        ({"session": "a", "value": None}, "value"),
        ({"session": "", "value": 1}, "session"),
        ({"session": "a", "sessions": ["b"], "value": 1}, "session"),
        ({"sessions": ["a", "b"], "call": "x", "value": 1}, "sessions"),
        ({"sessions": [], "value": 1}, "sessions"),
        ({"session": "a", "value": 1, "stars": 5}, "stars"),
    ],
    ids=str,
)
def test_what_is_no_feedback_is_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as error:
        facts(**body)
    assert (error.value.status, error.value.param) == (400, param)


def test_a_value_that_is_no_number_is_refused() -> None:
    with pytest.raises(Refused):
        read(b'{"session": "a", "value": 1e999}')
