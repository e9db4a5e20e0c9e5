"""Exact ids over a session's calls, whatever its client keeps of an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.engines.types import Completion
from connectors.gateway.asked import conversation
from connectors.gateway.sessions import Prompted, Sessions
from connectors.records import Segment
from connectors.text import Text
from connectors.tool_calls import split
from tests.connectors.gateway_bench import WEATHER, with_tool_template

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
ASKED = {"role": "user", "content": "how is it?"}
AGAIN = {"role": "user", "content": "and now?"}


@pytest.fixture(scope="module")
def text(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(with_tool_template(tiny_model_path, tmp_path_factory.mktemp("model") / "tools"))


class Client:
    """Keeps a conversation as clients do, and has a model that writes what the test says."""

    def __init__(self, text: Text, sessions: Sessions | None = None, owner: str = "") -> None:
        self.text, self.owner = text, owner
        self.sessions = Sessions(text, 10) if sessions is None else sessions

    def ask(
        self, messages: list[dict[str, Any]], session: str | None = "s", tools: Any = None
    ) -> Prompted:
        return self.sessions.prompt(self.owner, session, conversation(messages, tools))

    def answer(
        self, prompted: Prompted, ids: list[int], message: dict[str, Any], wrote: str | None = None
    ) -> tuple[int, ...]:
        """All ids of the conversation so far; the client gets `message`."""
        made = Completion(
            token_ids=tuple(ids),
            logprobs=(-0.5,) * len(ids),
            segments=(Segment(0, len(ids), 0, 1),),
            finish_reason="stop",
        )
        stop = self.text.encode("<|im_end|>")
        if wrote is None:
            wrote = self.text.decode(ids[:-1] if ids[-1:] == stop else ids, special=True)
        (got,) = conversation([message]).messages
        self.sessions.answered(prompted, made, got, wrote)
        return (*prompted.ids, *ids)

    def ids(self, text: str) -> list[int]:
        return self.text.encode(text)


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


class Merging:
    """A tokenizer that has one id (300) for "ab", which it always takes: decoding and encoding is
    not the identity."""

    has_template = True

    def render(self, messages: Any, tools: Any = None) -> str:
        return "".join(f"({m['role'][0]}:{m['content']})" for m in messages) + "(a:"

    def encode(self, text: str) -> list[int]:
        return [300 if piece == "\0" else ord(piece) for piece in text.replace("ab", "\0")]

    def decode(self, ids: Any, *, special: bool = False) -> str:
        return "".join("ab" if i == 300 else chr(i) for i in ids)


def test_ids_that_were_sampled_are_taken_not_those_their_text_would_encode_to() -> None:
    text: Any = Merging()
    client = Client(text)
    first = client.ask([ASKED])
    sampled = [ord(c) for c in "HabV)"]  # a and b apart
    assert text.encode(text.decode(sampled)) != sampled
    whole = client.answer(first, sampled, said("HabV"), "HabV")
    second = client.ask([ASKED, said("HabV"), AGAIN])
    assert second.ids == (*whole, *text.encode("(u:and now?)(a:"))
    assert second.new_ids == text.encode("(u:and now?)(a:")


def test_the_separator_after_a_turn_is_of_the_next_prompt(text: Text) -> None:
    client = Client(text)
    whole = client.answer(client.ask([ASKED]), client.ids("fine<|im_end|>"), said("fine"))
    second = client.ask([ASKED, said("fine"), AGAIN])
    assert second.ids[: len(whole)] == whole
    assert text.decode(second.new_ids, special=True).startswith("\n<|im_start|>user")


def test_a_thought_that_the_template_strips_begins_a_branch_of_its_own(text: Text) -> None:
    client = Client(text)
    first = client.ask([ASKED])
    wrote = "<think>hm</think>fine"
    whole = client.answer(first, client.ids(wrote + "<|im_end|>"), said(wrote))
    second = client.ask([ASKED, said(wrote), AGAIN])
    assert second.after is None
    assert second.ids[: len(whole)] != whole
    assert "hm" not in second.written


TOLD = [
    {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    for arguments in ('{"city": "Oslo"}', '{ "city":"Oslo" }')
]


@pytest.mark.parametrize(
    "kept",
    [
        said("Let me call a and get the result", tool_calls=[TOLD[0]]),
        said("Let me call a and get the result", tool_calls=[TOLD[1]], refusal=None, audio=None),
        said([{"type": "text", "text": "Let me call a and get the result"}], tool_calls=[TOLD[0]]),
    ],
    ids=["as it was", "with nulls, arguments written anew", "content in parts"],
)
def test_what_a_parser_took_apart_is_what_the_model_wrote_again(
    text: Text, kept: dict[str, Any]
) -> None:
    client = Client(text)
    wrote = f"Let me call a {CALL} and get the result"
    assert split(wrote)[0] == "Let me call a and get the result"
    first = client.ask([ASKED], tools=[WEATHER])
    got = said("Let me call a and get the result", tool_calls=[TOLD[0]])
    whole = client.answer(first, client.ids(wrote + "<|im_end|>"), got)
    result = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
    second = client.ask([ASKED, {k: v for k, v in kept.items() if v is not None}, result],
                        tools=[WEATHER])  # fmt: skip
    assert second.ids[: len(whole)] == whole


def test_an_answer_cut_by_its_length_goes_on_from_its_ids(text: Text) -> None:
    client = Client(text)
    whole = client.answer(client.ask([ASKED]), client.ids("fin"), said("fin"))
    second = client.ask([ASKED, said("fin"), AGAIN])
    assert second.ids[: len(whole)] == whole
    assert text.decode(second.new_ids, special=True).startswith("<|im_end|>\n<|im_start|>user")


def test_special_tokens_that_a_client_never_saw_are_there_again(text: Text) -> None:
    client = Client(text)
    ids = client.ids("a<|im_start|>b<|im_end|>")
    whole = client.answer(client.ask([ASKED]), ids, said(text.decode(ids)))
    assert client.ask([ASKED, said("ab"), AGAIN]).ids[: len(whole)] == whole


PIECES = st.sampled_from(
    ["fine", " ", "\n", "é😀", "\x00", CALL, "<tool_call>", "</tool_call>", "<|im_start|>", "<eos>"]
)


def kept(got: dict[str, Any], loosely: bool) -> dict[str, Any]:
    """As some clients keep a message: in parts, with arguments written anew."""
    calls = [
        call | {"function": call["function"] | {"arguments": loose(call["function"]["arguments"])}}
        for call in got.get("tool_calls", [])
    ]
    content = [{"type": "text", "text": got["content"] or ""}] if loosely else got["content"] or ""
    message = got | {"content": content} | ({"tool_calls": calls} if calls and loosely else {})
    return {key: value for key, value in message.items() if value is not None}


def loose(arguments: str) -> str:
    return json.dumps(json.loads(arguments), indent=2, sort_keys=True)


@pytest.mark.xfail(
    strict=False,
    reason="answers [], ['<|im_start|>'], []: where the model itself writes a turn's mark, the "
    "next prompt forks though it might extend",
)
@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.lists(PIECES, max_size=5), st.booleans(), st.booleans()), max_size=5))
def test_whatever_is_said_and_however_it_is_kept_each_turn_extends_the_ids_before_it(
    text: Text, turns: list[tuple[list[str], bool, bool]]
) -> None:
    client = Client(text)
    messages: list[dict[str, Any]] = [ASKED]
    before: tuple[int, ...] = ()
    for pieces, stops, loosely in turns:
        prompted = client.ask(messages, None, [WEATHER])
        assert prompted.ids[: len(before)] == before
        ids = client.ids("".join(pieces)) + (client.ids("<|im_end|>") if stops else [])
        content, calls = split(text.decode(ids))
        got = said(content)
        if calls:
            told = [
                {"id": f"{n}", "type": "function",
                 "function": {**call, "arguments": json.dumps(call["arguments"])}}
                for n, call in enumerate(calls)
            ]  # fmt: skip
            got = said(content or None, tool_calls=told)
        before = client.answer(prompted, ids, got)
        messages = [*messages, kept(got, loosely), AGAIN]


def test_a_call_without_a_name_belongs_where_its_answers_came_from(text: Text) -> None:
    client = Client(text)
    first, other = client.ask([ASKED], None), client.ask([AGAIN], None)
    assert first.session is not other.session
    client.answer(first, client.ids("fine<|im_end|>"), said("fine"))
    client.answer(other, client.ids("fine<|im_end|>"), said("fine"))
    assert client.ask([ASKED, said("fine"), AGAIN], None).session is first.session
    assert client.ask([AGAIN, said("fine"), AGAIN], None).session is other.session
    assert client.ask([ASKED, said("bad"), AGAIN], None).session.num_answers == 0


def test_of_several_answers_each_can_be_built_on(text: Text) -> None:
    client = Client(text)
    prompted = client.ask([ASKED])
    wholes = {
        word: client.answer(prompted, client.ids(f"{word}<|im_end|>"), said(word))
        for word in ("fine", "bad")
    }
    for word, whole in wholes.items():
        assert client.ask([ASKED, said(word), AGAIN]).ids[: len(whole)] == whole


def test_owners_of_keys_do_not_meet(text: Text) -> None:
    ada = Client(text, owner="ada")
    bob = Client(text, ada.sessions, owner="bob")
    prompted = ada.ask([ASKED], None)
    ada.answer(prompted, ada.ids("fine<|im_end|>"), said("fine"))
    foreign = bob.ask([ASKED, said("fine"), AGAIN], None)
    assert foreign.session is not prompted.session
    assert foreign.after is None
    assert (prompted.session.name[:4], foreign.session.name[:4]) == ("ada:", "bob:")


def test_a_session_that_was_used_longest_ago_is_encoded_from_its_text(text: Text) -> None:
    client = Client(text, Sessions(text, 2))
    for name in ("a", "b", "c"):
        client.answer(client.ask([ASKED], name), client.ids("fine<|im_end|>"), said("fine"))
    assert len(client.sessions) == 2
    assert client.ask([ASKED, said("fine"), AGAIN], "b").after is not None
    forgotten = client.ask([ASKED, said("fine"), AGAIN], "a")
    assert forgotten.after is None
    assert text.decode(forgotten.ids, special=True) == forgotten.written


def test_an_answer_to_a_forgotten_session_leaves_nothing(text: Text) -> None:
    client = Client(text)
    prompted = client.ask([ASKED])
    client.sessions.forget("s")
    client.answer(prompted, client.ids("fine<|im_end|>"), said("fine"))
    assert len(client.sessions) == 0
