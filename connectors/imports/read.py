"""Foreign logs as records of live traffic, row by row.

    files ─▶ rows ─▶ Call, Feedback (Found), or what is left out and why (Passed)

Nothing is grouped here: each call names its session, and the near-line stage puts sessions
together. Ids follow from the content, so reading a file again gives the same records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from connectors.imports import chats, langfuse, pairs
from connectors.imports.fields import Clock
from connectors.imports.outcome import LeftOut
from connectors.imports.rows import files, rows
from connectors.imports.spans import Spans
from connectors.traffic import Call, Feedback

Format = Literal["auto", "openai", "otel", "langfuse", "messages", "sharegpt"]
FORMATS: Final[tuple[Format, ...]] = (
    "auto", "openai", "otel", "langfuse", "messages", "sharegpt",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """A record, or why there is none. `where`: `FILE line 3`. `at`: bytes read of the file."""

    where: str
    record: Call | Feedback | LeftOut
    form: Format | None
    file: Path
    at: int


class Import:
    """One reading of all files. `clocks`: of each file that was begun."""

    def __init__(self, path: Path, form: Format = "auto") -> None:
        self.files, self._form = files(path), form
        self.clocks: list[Clock] = []
        self._spans, self._observations = Spans(), langfuse.Observations()

    def __iter__(self) -> Iterator[Found]:
        file, at = Path(), 0
        for file in self.files:
            clock = Clock()
            self.clocks.append(clock)
            for row in rows(file):
                at, where = row.at, f"{file.name} {row.where}"
                form = None if isinstance(row.value, LeftOut) else format_of(row.value)
                for record in self._read(row.value, form, clock):
                    yield Found(where, record, form, file, at)
        for said in self._observations.rest():
            yield Found(f"score {said.id}", said, "langfuse", file, at)

    def _read(
        self, value: Any, form: Format | None, clock: Clock
    ) -> Iterator[Call | Feedback | LeftOut]:
        if isinstance(value, LeftOut):
            yield value
        elif form is None:
            yield LeftOut("unknown_format", "the row is of no format known here")
        elif self._form not in ("auto", form):
            yield LeftOut("other_format", f"the row looks like {form}")
        else:
            try:
                yield from self._records(value, form, clock)
            except LeftOut as left_out:
                yield left_out
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                yield LeftOut("bad_record", f"{type(error).__name__}: {error}")

    def _records(
        self, row: dict[str, Any], form: Format, clock: Clock
    ) -> Iterable[Call | Feedback | LeftOut]:
        match form:
            case "otel":
                return self._spans.read(row, clock)
            case "openai":
                return pairs.calls(row, clock)
            case "langfuse":
                return self._observations.read(row, clock)
            case "messages" | "sharegpt":
                return chats.calls(row, form, clock)
            case _:
                return ()


def format_of(row: Any) -> Format | None:
    """By the fields that only one format has."""
    if not isinstance(row, Mapping):
        return None
    if "resourceSpans" in row or "resource_spans" in row:
        return "otel"
    if pairs.is_pair(row):
        return "openai"
    if isinstance(row.get("conversations"), list):
        return "sharegpt"
    if isinstance(row.get("messages"), list):
        return "messages"
    return "langfuse" if langfuse.is_langfuse(row) else None
