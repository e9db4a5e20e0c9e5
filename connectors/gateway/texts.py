"""Token ids as they come, text as it can be shown: never half a character, never part of a tool
call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from connectors import tool_calls

UNFINISHED: Final = "\ufffd"
"""What decoders write for bytes that are no character, or none yet."""


class Detokeniser:
    """Text of a growing sequence of ids. A character may be spread over several: what they spell is
    given once it is complete. Ids are decoded with those of the character before, because what a
    tokenizer writes for an id may depend on it."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._num_given = 0  # of the ids at hand

    def add(self, ids: Sequence[int], *, last: bool = False) -> str:
        """The text that is new; with `last`, all that is left of it."""
        self._ids += ids
        before = self._decode(self._ids[: self._num_given]) if self._num_given else ""
        text = self._decode(self._ids) if self._ids else ""
        if len(text) <= len(before) or (text.endswith(UNFINISHED) and not last):
            return ""
        self._ids = self._ids[self._num_given :]
        self._num_given = len(self._ids)
        return text[len(before) :]


class Spoken:
    """What a client sees of one answer. `text` is all that was written, `shown` all that a client
    was to see of it so far; `calls` its tool calls, once it has ended."""

    def __init__(self, decode: Callable[[Sequence[int]], str], *, hears_tools: bool) -> None:
        self._detokeniser = Detokeniser(decode)
        self._hears_tools = hears_tools
        self.text = ""
        self.shown = ""
        self.calls: list[dict[str, Any]] = []

    def add(self, ids: Sequence[int]) -> str:
        """What more can be shown now."""
        self.text += self._detokeniser.add(ids)
        return self._show(tool_calls.certain(self.text) if self._hears_tools else self.text)

    def end(self, ids: Sequence[int]) -> str:
        """The rest, after the last `ids`."""
        self.text += self._detokeniser.add(ids, last=True)
        said = self.text
        if self._hears_tools:
            said, self.calls = tool_calls.split(self.text)
        return self._show(said)

    def _show(self, said: str) -> str:
        more = said[len(self.shown) :]
        self.shown += more
        return more
