"""Tool calls in a model's text: taken out, and never shown by half."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from connectors.tool_calls import certain, marked, split

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
WEATHER = {"name": "weather", "arguments": {"city": "Oslo"}}


def test_a_call_in_the_middle_leaves_what_is_said_around_it() -> None:
    said, calls = split(f"Let me call a {CALL} and get the result")
    assert (said, calls) == ("Let me call a and get the result", [WEATHER])


def test_text_without_a_call_is_said_as_it_is() -> None:
    none = (
        "no json",
        "[1]",
        '{"name": "x", "arguments": {"a": NaN}}',
        '{"name": "\\ud800"}',
        '{"arguments": {}}',
        '{"name": "x", "arguments": 3}',
    )
    blocks = [f"<tool_call>{content}</tool_call>" for content in none]
    for text in ("", "  two  blanks ", *blocks, '<tool_call>{"name": "x"}'):
        assert split(text) == (text, [])


def test_several_calls_come_in_order_and_arguments_may_be_text_or_missing() -> None:
    text = (
        f'{CALL}\n<tool_call>{{"name": "now"}}</tool_call><tool_call>{{"name": "at", '
        '"arguments": "{\\"hour\\": 3}"}</tool_call>'
    )
    said, calls = split(text)
    assert said == ""
    assert calls == [
        WEATHER,
        {"name": "now", "arguments": {}},
        {"name": "at", "arguments": {"hour": 3}},
    ]


def test_a_broken_call_beside_a_good_one_is_text() -> None:
    said, calls = split(f"a <tool_call>{{</tool_call> b {CALL}")
    assert (said, calls) == ("a <tool_call>{</tool_call> b", [WEATHER])


def test_what_agents_see_are_all_objects_between_marks() -> None:
    text = f'{CALL}<tool_call>{{"other": 1}}</tool_call><tool_call>3</tool_call>'
    assert [found.call for found in marked(text)] == [WEATHER, {"other": 1}]


PIECES = st.lists(
    st.sampled_from(
        [CALL, "<tool_call>", "</tool_call>", "<tool", "<", " ", "\n", "word", "{", "é"]
    ),
    max_size=8,
)


@given(PIECES)
def test_what_is_certain_of_a_beginning_is_the_beginning_of_what_is_said(pieces: list[str]) -> None:
    text = "".join(pieces)
    said, _ = split(text)
    for end in range(len(text) + 1):
        assert said.startswith(certain(text[:end]))
