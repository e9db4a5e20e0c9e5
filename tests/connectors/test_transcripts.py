"""Files of chats: two formats, four containers, and a reason for whatever cannot be read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from connectors.config import ConfigError
from connectors.transcripts import (
    REASONS,
    BadTranscript,
    Format,
    Transcript,
    read_transcripts,
    transcript,
)

USER = {"role": "user", "content": "2+2?"}
ASSISTANT = {"role": "assistant", "content": "4"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def read(file: Path, form: Format = "auto") -> list[tuple[str, Any]]:
    """Where each row stands, and its messages or the reason why it has none."""
    return [
        (where, found.reason if isinstance(found, BadTranscript) else list(found.messages))
        for where, found in read_transcripts(file, form)
    ]


def reason(row: Any, form: Format = "auto") -> str:
    with pytest.raises(BadTranscript) as bad:
        transcript(row, form)
    assert bad.value.reason in REASONS
    return bad.value.reason


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "byte order mark"])
@pytest.mark.parametrize("is_array", [False, True], ids=["lines", "array"])
def test_rows_are_lines_or_elements_of_an_array(
    tmp_path: Path, is_array: bool, mark: bytes, packed: bool
) -> None:
    rows = [json.dumps({"messages": [USER, {**ASSISTANT, "content": text}]}) for text in "äb"]
    text = f" [{rows[0]},\n{rows[1]}]" if is_array else f"{rows[0]}\n\n \t{rows[1]}\r\n"
    file = tmp_path / "chats.data"
    content = mark + text.encode()
    file.write_bytes(gzip.compress(content) if packed else content)
    names = ["row 1", "row 2"] if is_array else ["line 1", "line 3"]
    expected = [[USER, {**ASSISTANT, "content": text}] for text in "äb"]
    assert read(file) == list(zip(names, expected, strict=True))


def test_a_bad_line_costs_itself_alone(tmp_path: Path) -> None:
    good = json.dumps({"messages": [USER, ASSISTANT]}).encode()
    bad = (b"{no", b"\xff\xfe", b'"text"', b'{"text": "x"}', b'{"messages": [{"role": "\\ud800"}]}')
    file = tmp_path / "chats.jsonl"
    file.write_bytes(b"\n".join([good, *bad, b"[" * 10_000, good]))
    found = [what for _, what in read(file)]
    assert found[0] == found[-1] == [USER, ASSISTANT]
    assert found[1:-1] == ["not_json", "not_json", "not_chat", "not_chat", "not_json", "not_json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no rows"),
        (b" \n\n", "holds no rows"),
        (b'[{"messages": []}', "is no JSON"),
        (gzip.compress(b"x" * 1000, mtime=0)[:-10], "is damaged"),
        (gzip.compress(b"x" * 1000, mtime=0)[:20] + b"\0" * 30, "is damaged"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line_that_names_it(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"chats.jsonl: {message}"):
        list(read_transcripts(file))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        list(read_transcripts(tmp_path / "none"))


def test_sharegpt_becomes_messages_with_calls_and_definitions_as_objects() -> None:
    row = {
        "system": "Be brief.",
        "tools": json.dumps([TOOL["function"]]),
        "conversations": [
            {"from": "human", "value": "2+2?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 2}}'},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "4", "weight": 0},
        ],
    }
    found = transcript(row)
    assert found.messages == (
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4", "weight": 0},
    )
    assert found.tools == (TOOL,)


def test_tool_calls_of_an_api_get_their_arguments_as_an_object() -> None:
    call = {"id": "c1", "type": "function"}
    given = {**call, "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
    answer = {"role": "tool", "content": "4", "tool_call_id": "c1"}
    turns = [USER, {"role": "assistant", "content": None, "tool_calls": [given]}, answer]
    found = transcript({"messages": turns, "tools": [TOOL]})
    expected = {"role": "assistant", "content": "", "tool_calls": [{**call, **CALL}]}
    assert found == Transcript((USER, expected, answer), (TOOL,))


def test_content_in_parts_of_text_is_joined_and_an_image_is_refused() -> None:
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    found = transcript({"messages": [{"role": "user", "content": parts}, ASSISTANT]})
    assert found.messages == (USER, ASSISTANT)
    parts.append({"type": "image_url"})
    assert reason({"messages": [{"role": "user", "content": parts}]}) == "bad_message"


@pytest.mark.parametrize(
    "turn",
    [
        {"content": "x"},
        {"role": "", "content": "x"},
        {"role": "user"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "x", "tool_calls": {"name": "f"}},
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"arguments": {}}}]},
        {"role": "assistant", "content": "x", "tool_calls": [{"name": "f", "arguments": "2"}]},
        {"role": "assistant", "content": "x", "tool_calls": [{"name": "f", "arguments": "{"}]},
        {"from": "human"},
        {"from": "narrator", "value": "x"},
        {"from": ["human"], "value": "x"},
        {"from": "function_call", "value": "not a call"},
    ],
)
def test_a_turn_without_speaker_or_text_spoils_its_row(turn: dict[str, Any]) -> None:
    assert reason({"conversations": [turn]}) == "bad_message"


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({}, "auto"),
        ({"messages": []}, "auto"),
        ({"messages": "hi"}, "auto"),
        ({"conversations": ["hi"]}, "auto"),
        ({"messages": [USER]}, "sharegpt"),
        ({"conversations": [{"from": "human", "value": "x"}]}, "messages"),
    ],
)
def test_a_row_of_another_shape_is_no_chat(row: dict[str, Any], form: Format) -> None:
    assert reason(row, form) == "not_chat"
