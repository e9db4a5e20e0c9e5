"""Fields of foreign rows: names in either spelling, times of every kind, JSON kept as text."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from connectors.imports.outcome import LeftOut
from connectors.transcripts import BadTranscript, Transcript, transcript

_NO_JSON: Final = (msgspec.DecodeError, UnicodeError, RecursionError)
STEP_S: Final = 0.001
"""Between calls of a file that has no times."""


def first(row: Mapping[str, Any], *names: str) -> Any:
    """The first of these fields that is there and not empty; None: none is."""
    for name in names:
        if (value := row.get(name)) not in (None, "", [], {}):
            return value
    return None


def text(row: Mapping[str, Any], *names: str) -> str:
    """As `first`, of names and ids; "" where there is none."""
    value = first(row, *names)
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""


def unpacked(value: Any) -> Any:
    """A JSON object or array that is kept as text; else the value itself."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return msgspec.json.decode(value)
        except _NO_JSON:
            return value
    return value


def mapping(value: Any) -> dict[str, Any]:
    """The object, also one kept as text; empty where it is none."""
    found = unpacked(value)
    return found if isinstance(found, dict) else {}


def seconds(value: Any) -> float | None:
    """Unix seconds of a number (s, ms, µs or ns, told by its size), of digits, of ISO 8601, or of
    `YYYY-MM-DD HH:MM:SS.ffffff`, which is UTC; None where it is no time."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            try:
                value = datetime.fromisoformat(value.strip())
            except ValueError:
                return None
    if isinstance(value, datetime):
        value = (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    for unit in (1e18, 1e15, 1e12):  # later than 2001 in ns, µs, ms
        if value >= unit * 0.9:
            return float(value) / (unit / 1e9)
    return float(value) if value > 0 else None


class Clock:
    """Times of one file's calls: those without one come `STEP_S` after what stands before them."""

    def __init__(self) -> None:
        self._last = 0.0
        self.num_missing = self.num_backwards = 0

    def span(self, start: Any, end: Any) -> tuple[float, float]:
        """(asked, answered): never answered before it was asked."""
        began, ended = seconds(start), seconds(end)
        if began is None:
            began = ended
        if began is None:
            self.num_missing += 1
            began = self._last + STEP_S
        if ended is not None and ended < began:
            self.num_backwards += 1
        self._last = began
        return began, max(began, ended or began)


def conversation(messages: Any, tools: Any = None) -> Transcript:
    """As a chat template takes it. LeftOut where it is none, or where a tool was called before the
    last turn and did not answer."""
    if isinstance(messages, list):
        messages = [_cleaned(message) for message in messages]
    try:
        found = transcript({"messages": messages, "tools": unpacked(tools)})
    except BadTranscript as error:
        raise LeftOut(error.reason, str(error)) from error
    check_answered(found.messages)
    return found


def answer(message: Any, tools: Any = None) -> dict[str, Any]:
    """What an assistant said. LeftOut where it said nothing."""
    if isinstance(message, str):
        message = {"content": message}
    if not isinstance(message, dict):
        raise LeftOut("no_answer", "the answer is no message")
    (said,) = conversation([{"content": "", **_cleaned(message), "role": "assistant"}]).messages
    return said


def check_answered(messages: Any) -> None:
    """LeftOut where a tool's answer is missing."""
    for n, message in enumerate(messages[:-1]):
        wanted = len(message.get("tool_calls", ()))
        if wanted and sum(m["role"] == "tool" for m in messages[n + 1 : n + 1 + wanted]) < wanted:
            raise LeftOut("tool_unanswered", f"message {n} calls tools that do not answer")


def _cleaned(message: Any) -> Any:
    """Without nulls, which clients send or leave out as they like."""
    if not isinstance(message, dict):
        return message
    said = {key: value for key, value in message.items() if value is not None}
    return said | {"role": "system"} if said.get("role") == "developer" else said


def digest(value: Any) -> str:
    content = msgspec.json.encode(value, order="sorted", enc_hook=str)
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def as_text(value: Any) -> str:
    """For a message: what is no text, as JSON; nothing as nothing."""
    if value is None or isinstance(value, str):
        return value or ""
    return msgspec.json.encode(value, enc_hook=str).decode()
