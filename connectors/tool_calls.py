"""Tool calls as models write them into their text: <tool_call>{"name", "arguments"}</tool_call>."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

OPEN: Final = "<tool_call>"
_BLOCK: Final = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Marked:
    """A JSON object between marks, which stand at text[start:end]."""

    start: int
    end: int
    call: dict[str, Any]


def marked(text: str) -> Iterator[Marked]:
    """In order. What is no JSON object is text like any other."""
    for block in _BLOCK.finditer(text):
        if isinstance(found := _json(block[1]), dict):
            yield Marked(block.start(), block.end(), found)


def split(text: str) -> tuple[str, list[dict[str, Any]]]:
    """What is said beside the calls, and the calls as {"name", "arguments": an object}. Without
    a call all of the text is said; else blanks around each call become one. A block without a name,
    or whose arguments are no object, is text."""
    said: list[str] = []
    calls: list[dict[str, Any]] = []
    at = 0
    for found in marked(text):
        if (call := _named(found.call)) is not None:
            said.append(text[at : found.start])
            calls.append(call)
            at = found.end
    if not calls:
        return text, []
    first, *others = [*said, text[at:]]
    pieces = [first.rstrip(), *(piece.strip() for piece in others)]
    return " ".join(piece for piece in pieces if piece), calls


def certain(text: str) -> str:
    """The beginning of `text` that `split` will say, whatever follows."""
    at = text.find(OPEN)
    if at < 0:
        at = len(text) - max(n for n in range(len(OPEN)) if text.endswith(OPEN[:n]))
    return text[:at].rstrip()


def _named(call: dict[str, Any]) -> dict[str, Any] | None:
    name, arguments = call.get("name"), call.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return {"name": name, "arguments": arguments}


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
