"""What must not be in the log, taken out of calls and feedback before they are written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from connectors.config import ConfigError
from connectors.traffic import Call, Choice

MARK: Final = "[redacted]"

T = TypeVar("T")


class Redaction:
    """By regular expressions, in every text: of messages, tools, answers, metadata, comments."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """ConfigError for what is no regular expression."""
        self._patterns: list[re.Pattern[str]] = []
        for pattern in patterns:
            try:
                self._patterns.append(re.compile(pattern))
            except re.error as error:
                raise ConfigError(
                    f"gateway.redact: {pattern!r} is no regular expression: {error}"
                ) from error

    def text(self, value: str) -> str:
        for pattern in self._patterns:
            value = pattern.sub(MARK, value)
        return value

    def within(self, value: T) -> T:
        """The texts of a JSON value; keys of objects stay."""
        return self._within(value) if self._patterns else value

    def call(self, call: Call, written: str) -> Call:
        """Where anything of its messages, tools or answers changes, or of `written`, the prompt as
        the model got it, its token ids are left out: they would spell it."""
        if not self._patterns:
            return call
        clean = replace(
            call,
            messages=self.within(call.messages),
            tools=self.within(call.tools),
            choices=tuple(self._choice(choice) for choice in call.choices),
            metadata=self.within(call.metadata),
        )
        said = (call.messages, call.tools, call.choices)
        is_same = said == (clean.messages, clean.tools, clean.choices)
        return clean if is_same and self.text(written) == written else _without_ids(clean)

    def _choice(self, choice: Choice) -> Choice:
        text = None if choice.text is None else self.text(choice.text)
        return replace(choice, message=self.within(choice.message), text=text)

    def _within(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self._within(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._within(item) for item in value]
        return value


def _without_ids(call: Call) -> Call:
    choices = (replace(c, token_ids=None, logprobs=None, segments=()) for c in call.choices)
    return replace(call, prompt_ids=None, choices=tuple(choices))
