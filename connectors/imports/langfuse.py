"""Langfuse's exports: observations and scores, as JSON lines, JSON, CSV or Parquet.

An observation of type GENERATION is a call, a numeric or boolean score is feedback. A session is
what `session_id` names or, where a trace has none, the trace. A score names a trace, seldom its
session; so scores of traces that nobody has named yet are kept to the end of the import.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec.structs import replace

from connectors.imports import fields
from connectors.imports.fields import Clock, first, mapping, text, unpacked
from connectors.imports.outcome import LeftOut
from connectors.traffic import Call, Choice, Feedback

_TYPES: Final = (
    "SPAN", "EVENT", "GENERATION", "AGENT", "TOOL", "CHAIN", "RETRIEVER", "EVALUATOR",
    "EMBEDDING", "GUARDRAIL",
)  # fmt: skip
_TRACE: Final = ("trace_id", "traceId")
_SESSION: Final = ("session_id", "sessionId")


def is_langfuse(row: Mapping[str, Any]) -> bool:
    return (
        row.get("type") in _TYPES
        or any(name in row for name in (*_TRACE, *_SESSION))
        or isinstance(row.get("observations"), list)
        or _is_score(row)
    )


class Observations:
    """Of one import: remembers which session each trace is of, and the scores that wait for it."""

    def __init__(self) -> None:
        self._sessions: dict[str, str] = {}
        self._traces: set[str] = set()
        self._waiting: list[tuple[str, Feedback]] = []

    def read(self, row: dict[str, Any], clock: Clock) -> Iterator[Call | Feedback | LeftOut]:
        """An observation, a score, or a trace with those it holds."""
        for each in self._opened(row):
            try:
                if (found := self._one(each, clock)) is not None:
                    yield found
            except LeftOut as left_out:
                yield left_out
            except ValueError as error:
                yield LeftOut("bad_record", str(error))

    def rest(self) -> Iterator[Feedback]:
        """The scores of traces that came later, or not at all."""
        for trace, said in self._waiting:
            yield replace(said, session=self._sessions.get(trace, trace))
        self._waiting.clear()

    def _opened(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        held = [unpacked(row.get(name)) for name in ("observations", "scores")]
        for rows in held:
            for each in rows if isinstance(rows, list) else ():
                if isinstance(each, dict):
                    named = {"session_id": text(row, *_SESSION), "user_id": text(row, "userId")}
                    yield {"trace_id": row.get("id"), **named, **each}
        if not any(isinstance(rows, list) for rows in held):
            yield row

    def _one(self, row: dict[str, Any], clock: Clock) -> Call | Feedback | None:
        trace, session = text(row, *_TRACE), text(row, *_SESSION)
        if _is_score(row):
            return self._score(row, trace, session)
        if trace or session:
            self._learn(trace or text(row, "id"), session)
        if row.get("type") != "GENERATION":
            kind = text(row, "type") or "no type"
            raise LeftOut("not_a_call", f"an observation of {kind}")
        if row.get("level") == "ERROR":
            raise LeftOut("failed_call", text(row, "status_message", "statusMessage") or "an error")
        return _call(row, session or self._sessions.get(trace, trace), clock)

    def _learn(self, trace: str, session: str) -> None:
        if session:
            self._sessions.setdefault(trace, session)
        else:
            self._traces.add(trace)

    def _score(self, row: dict[str, Any], trace: str, session: str) -> Feedback | None:
        if not (trace or session):
            raise LeftOut("score_of_nothing", "a score names neither a trace nor a session")
        said = Feedback(
            id=text(row, "id") or f"score-{fields.digest(row)}",
            name=text(row, "name") or "score",
            value=_number(row),
            time=fields.seconds(first(row, "timestamp", "created_at", "createdAt")) or 0.0,
            session=session or self._sessions.get(trace, trace),
            call=text(row, "observation_id", "observationId") or None,
            source=text(row, "source"),
            comment=text(row, "comment"),
        )
        if session or trace in self._sessions or trace in self._traces:
            return said
        self._waiting.append((trace, said))
        return None


def _is_score(row: Mapping[str, Any]) -> bool:
    if "type" in row:
        return False
    return "name" in row and any(name in row for name in ("data_type", "dataType", "value"))


def _number(row: Mapping[str, Any]) -> float:
    kind, value = text(row, "data_type", "dataType"), row.get("value")
    if kind in ("", "NUMERIC", "BOOLEAN"):
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):
            return float(value.strip().lower() == "true")
        try:
            return float(value) if value is not None else float("x")
        except (TypeError, ValueError):
            pass
    raise LeftOut("score_without_number", f"a score of type {kind or '?'} is no number")


# -------------------------------------------------------------------------------------------- calls
def _call(row: dict[str, Any], session: str, clock: Clock) -> Call:
    asked, tools = _asked(unpacked(row.get("input")))
    tools = unpacked(first(row, "tool_definitions", "toolDefinitions")) or tools
    found = fields.conversation(asked, _tools(tools))
    fields.check_answered([*found.messages, {"role": "assistant"}])
    said, reason = _answered(unpacked(row.get("output")), row)
    if not said["content"] and not said.get("tool_calls"):
        raise LeftOut("no_answer", "the answer is empty")
    start, end = first(row, "start_time", "startTime"), first(row, "end_time", "endTime")
    began, ended = clock.span(start, end)
    given = mapping(first(row, "model_parameters", "modelParameters")).get("temperature")
    temperature = _float(given)
    about = mapping(row.get("metadata"))
    called = text(row, "id") or f"observation-{fields.digest(row)}"
    return Call(
        id=called,
        session=session or called,
        task=text(about, "task"),
        time=began,
        finished_at=ended,
        messages=list(found.messages),
        choices=(Choice(message=said, finish_reason=reason),),
        source="import",
        tools=list(found.tools),
        model=text(row, "provided_model_name", "providedModelName", "model"),
        temperature=temperature,
        user=text(row, "user_id", "userId"),
    )


def _asked(given: Any) -> tuple[Any, Any]:
    """(messages, tools) of an observation's input."""
    if isinstance(given, dict) and "messages" in given:
        return unpacked(given["messages"]), given.get("tools")
    if isinstance(given, dict) and "role" in given:
        return [given], None
    if isinstance(given, str) and given:
        return [{"role": "user", "content": given}], None
    if not given:
        raise LeftOut("no_messages", "the observation has no input")
    return given, None


def _answered(given: Any, row: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """(message, why it ended) of an observation's output."""
    reason = "stop"
    if isinstance(given, list) and given:
        given = given[0]
    if isinstance(given, dict) and isinstance(given.get("choices"), list) and given["choices"]:
        given = given["choices"][0]
    if isinstance(given, dict) and "message" in given:
        reason, given = str(given.get("finish_reason") or reason), given["message"]
    if given in (None, "") and not row.get("tool_calls"):
        raise LeftOut("no_answer", "the observation has no output")
    message = given if isinstance(given, dict) else {"content": fields.as_text(given)}
    calls = unpacked(first(row, "tool_calls", "toolCalls"))
    if isinstance(calls, list) and not message.get("tool_calls"):
        message = {**message, "tool_calls": [unpacked(call) for call in calls]}
    return fields.answer(message), reason


def _tools(tools: Any) -> Any:
    """A list, or an object of definitions by name, each perhaps as text."""
    if isinstance(tools, dict):
        tools = [{"name": n, **mapping(d)} for n, d in tools.items()]
    return [unpacked(tool) for tool in tools] if isinstance(tools, list) else None


def _float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
