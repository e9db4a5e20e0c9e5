"""Chat transcripts from a file: what people have of conversations becomes `messages` and `tools`.

    .jsonl or .json, plain or gzip ─▶ values ─▶ Transcript, or BadTranscript with a reason

Two formats, told apart row by row:

messages  {"messages": [{"role", "content", "tool_calls"?, ...}], "tools"?}, as chat APIs take them
sharegpt  {"conversations": [{"from", "value"}], "system"?, "tools"?}; `function_call` is a turn of
          the model whose value is {"name", "arguments"} (or a list), `observation` a tool's answer
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, cast

import msgspec

from connectors.config import ConfigError

Format = Literal["auto", "messages", "sharegpt"]
FORMATS: Final[tuple[Format, ...]] = ("auto", "messages", "sharegpt")

REASONS: Final = (
    "not_json", "not_chat", "bad_message", "nothing_to_learn", "template_refuses",
    "template_unclear", "template_drops_tools", "tokens_differ", "too_long",
)  # fmt: skip
"""Why a row is not learnt from (`BadTranscript.reason`)."""

_SPEAKERS: Final = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "model": "assistant", "system": "system", "tool": "tool",
    "observation": "tool", "function_response": "tool", "function_call": "assistant",
}  # fmt: skip


_BLANK: Final = b"\xef\xbb\xbf \t\r\n"
_NO_JSON: Final = (msgspec.DecodeError, UnicodeError, RecursionError)


class BadTranscript(ValueError):
    """The row is left out; `reason` is one of REASONS."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Transcript:
    """`messages` as a chat template takes them: content is text (an absent one is ""), a tool
    call's arguments are an object."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()


def read_transcripts(
    path: Path, form: Format = "auto"
) -> Iterator[tuple[str, Transcript | BadTranscript]]:
    """(where it stands, what it is) of each row: a line that is not blank, or an element of a JSON
    array. ConfigError when the file cannot be read."""
    for where, value in _values(path):
        try:
            yield where, value if isinstance(value, BadTranscript) else transcript(value, form)
        except BadTranscript as bad:
            yield where, bad


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with _opened(path) as file:
            content = (line.lstrip(_BLANK) for line in file)
            first = next((n, line) for n, line in enumerate(content, 1) if line)
            if first[1].startswith(b"["):
                rows = msgspec.json.decode(first[1] + file.read())
                yield from ((f"row {n}", row) for n, row in enumerate(rows, 1))
                return
            for n, line in chain([first], enumerate(content, first[0] + 1)):
                if line:
                    yield f"line {n}", _line(line)
    except StopIteration as empty:
        raise ConfigError(f"{path}: holds no rows") from empty
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path}: is damaged: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except _NO_JSON as error:  # of the array: a line is one row
        raise ConfigError(f"{path}: is no JSON: {error}") from error


def _opened(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path) if packed else path.open("rb"))


def _line(line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except _NO_JSON as error:
        return BadTranscript("not_json", str(error))


def transcript(row: Any, form: Format = "auto") -> Transcript:
    """The row's conversation; BadTranscript when it is none of the format."""
    if not isinstance(row, dict):
        raise BadTranscript("not_chat", "the row is no JSON object")
    key = "messages" if "messages" in row else "conversations"
    turns = row.get(key)
    if not isinstance(turns, list) or not turns or not all(isinstance(t, dict) for t in turns):
        raise BadTranscript("not_chat", "neither messages nor conversations is a list of turns")
    is_sharegpt = "from" in turns[0]
    if form != "auto" and is_sharegpt != (form == "sharegpt"):
        raise BadTranscript("not_chat", f"the row is not of the format {form}")
    messages = [_said(turn) if is_sharegpt else _message(turn) for turn in turns]
    if is_sharegpt and isinstance(row.get("system"), str) and row["system"]:
        messages.insert(0, {"role": "system", "content": row["system"]})
    return Transcript(tuple(messages), _tools(row.get("tools")))


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn of a chat API. Keys of their own reach the template, which may know them."""
    role, content, calls = turn.get("role"), turn.get("content"), turn.get("tool_calls")
    if not isinstance(role, str) or not role:
        raise BadTranscript("bad_message", f"a message has the role {role!r}")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else None  # an image, say
    elif content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise BadTranscript("bad_message", f"the content of a message of {role} is no text")
    message = {**turn, "role": role, "content": content}
    if calls:
        if not isinstance(calls, list):
            raise BadTranscript("bad_message", "tool_calls is no list")
        message["tool_calls"] = [_call(call) for call in calls]
    else:
        message.pop("tool_calls", None)
    return message


def _said(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn of ShareGPT."""
    speaker, value = turn.get("from"), turn.get("value")
    role = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None or not isinstance(value, str):
        raise BadTranscript("bad_message", f"a turn is from {speaker!r} or its value is no text")
    message: dict[str, Any] = {"role": role, "content": value}
    if "weight" in turn:
        message["weight"] = turn["weight"]
    if speaker == "function_call":
        found = _json(value, "a function_call")
        calls = found if isinstance(found, list) else [found]
        message |= {"content": "", "tool_calls": [_call(call) for call in calls]}
    return message


def _call(call: Any) -> dict[str, Any]:
    """A tool call as templates take it: {"type", "function": {"name", "arguments": an object}}."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadTranscript("bad_message", "a tool call has no name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _json(arguments, f"the arguments of {function['name']}")
    if not isinstance(arguments, dict):
        raise BadTranscript("bad_message", f"the arguments of {function['name']} are no object")
    named = {"name": function["name"], "arguments": arguments}
    given = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"type": "function", **given, "function": named}


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Definitions as templates take them: {"type": "function", "function": {"name", ...}}."""
    if isinstance(tools, str) and tools.strip():
        tools = _json(tools, "tools")
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadTranscript("bad_message", "tools is no list of definitions")
    return tuple(
        tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
    )


def _json(text: str, what: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except _NO_JSON as error:
        raise BadTranscript("bad_message", f"{what}: {error}") from error
