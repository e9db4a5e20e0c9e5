"""Spans of OpenTelemetry's GenAI conventions, as OTLP writes them in JSON.

    {"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": [{"key", "value": {...}}]}]}]}]}

A span of an inference is a call; an evaluation's event is feedback. A session is a conversation
(`gen_ai.conversation.id`) or, where no span of a trace names one, the trace. Messages are read in
their present form (`gen_ai.input.messages`, JSON or structured, on the span or on its details
event) and in that of conventions up to 1.36 (`gen_ai.prompt.N.*`). The conventions know no token
ids, so all of it is text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from connectors.imports import fields
from connectors.imports.fields import Clock, first, mapping, text, unpacked
from connectors.imports.outcome import LeftOut
from connectors.traffic import Call, Choice, Feedback

_INFERENCE: Final = ("chat", "generate_content", "text_completion")
_DETAILS: Final = "gen_ai.client.inference.operation.details"
_EVALUATION: Final = "gen_ai.evaluation.result"
_NUMBERED: Final = re.compile(r"gen_ai\.(prompt|completion)\.(\d+)\.(.+)")
_CALLED: Final = re.compile(r"tool_calls\.(\d+)\.(.+)")
_FUNCTION: Final = re.compile(r"llm\.request\.functions\.(\d+)\.(.+)")

Flat = dict[str, Any]


class Spans:
    """Of one import: remembers which conversation each trace is of."""

    def __init__(self) -> None:
        self._conversations: dict[str, str] = {}

    def read(self, row: dict[str, Any], clock: Clock) -> Iterator[Call | Feedback | LeftOut]:
        """What each span of an export request is."""
        spans = list(_spans(row))
        for span, about in spans:
            if named := _conversation(about):
                self._conversations.setdefault(text(span, "traceId", "trace_id"), named)
        for span, about in spans:
            try:
                yield from self._span(span, about, clock)
            except LeftOut as left_out:
                yield left_out
            except ValueError as error:
                yield LeftOut("bad_record", str(error))

    def _span(
        self, span: dict[str, Any], about: Flat, clock: Clock
    ) -> Iterator[Call | Feedback | LeftOut]:
        trace, number = text(span, "traceId", "trace_id"), text(span, "spanId", "span_id")
        session = _conversation(about) or self._conversations.get(trace) or trace
        called = text(about, "gen_ai.response.id") or f"{trace}-{number}".strip("-")
        is_call = about.get("gen_ai.operation.name") in _INFERENCE or _is_older(about)
        found = list(_feedback(span, session, called if is_call else None, about))
        if not is_call and not found:
            raise LeftOut("not_a_call", f"a span of {text(about, 'gen_ai.operation.name') or '?'}")
        yield from found
        if is_call:
            yield _call(span, about, session, called, clock)


def _spans(row: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Flat]]:
    """Each span with its attributes, those of its details event among them."""
    for resource in _objects(first(row, "resourceSpans", "resource_spans")):
        for scope in _objects(first(resource, "scopeSpans", "scope_spans")):
            for span in _objects(first(scope, "spans")):
                about = _attributes(span)
                for event in _objects(span.get("events")):
                    if event.get("name") == _DETAILS:
                        about |= _attributes(event)
                yield span, about


def _call(span: dict[str, Any], about: Flat, session: str, called: str, clock: Clock) -> Call:
    if mapping(span.get("status")).get("code") in (2, "STATUS_CODE_ERROR"):
        raise LeftOut("failed_call", text(about, "error.type") or "the span's status is an error")
    if not called or not session:
        raise LeftOut("bad_record", "the span has neither an id nor a trace")
    asked, answers = _messages(about)
    if not asked:
        raise LeftOut("no_messages", "the span holds no messages: its content was not captured")
    if not answers:
        raise LeftOut("no_answer", "the span holds no answer")
    tools = unpacked(first(about, "gen_ai.tool.definitions", "gen_ai.request.tools"))
    found = fields.conversation(asked, [_tool(t) for t in _objects(tools)] or _functions(about))
    fields.check_answered([*found.messages, {"role": "assistant"}])
    reasons = unpacked(first(about, "gen_ai.response.finish_reasons"))
    choices = tuple(_choice(answer, n, reasons) for n, answer in enumerate(answers))
    start = first(span, "startTimeUnixNano", "start_time_unix_nano")
    end = first(span, "endTimeUnixNano", "end_time_unix_nano")
    began, ended = clock.span(start, end)
    temperature = about.get("gen_ai.request.temperature")
    return Call(
        id=called,
        session=session,
        task=text(about, "headwater.task"),
        time=began,
        finished_at=ended,
        messages=list(found.messages),
        choices=choices,
        source="import",
        tools=list(found.tools),
        model=text(about, "gen_ai.response.model", "gen_ai.request.model"),
        temperature=float(temperature) if isinstance(temperature, int | float) else None,
        user=text(about, "user.id", "enduser.id"),
    )


def _conversation(about: Flat) -> str:
    return text(about, "gen_ai.conversation.id", "session.id")


def _feedback(
    span: dict[str, Any], session: str, called: str | None, about: Flat
) -> Iterator[Feedback | LeftOut]:
    for n, event in enumerate(_objects(span.get("events"))):
        if event.get("name") != _EVALUATION:
            continue
        said = _attributes(event)
        value = said.get("gen_ai.evaluation.score.value")
        if isinstance(value, bool) or not isinstance(value, int | float):
            yield LeftOut("score_without_number", "an evaluation has no number")
            continue
        time = first(event, "timeUnixNano", "time_unix_nano") or first(span, "endTimeUnixNano")
        yield Feedback(
            id=f"{text(span, 'traceId', 'trace_id')}-{text(span, 'spanId', 'span_id')}-{n}",
            name=text(said, "gen_ai.evaluation.name") or "evaluation",
            value=float(value),
            time=fields.seconds(time) or 0.0,
            session=session,
            call=text(said, "gen_ai.response.id") or text(about, "gen_ai.response.id") or called,
            source="otel",
            comment=text(said, "gen_ai.evaluation.explanation"),
        )


# ---------------------------------------------------------------------------------------- messages
def _messages(about: Flat) -> tuple[list[Any], list[Any]]:
    """What was asked, and the answers."""
    asked = unpacked(first(about, "gen_ai.input.messages"))
    if asked is None:
        return _older(about, "prompt"), _older(about, "completion")
    system = unpacked(first(about, "gen_ai.system_instructions"))
    parts = [{"type": "text", "content": system}] if isinstance(system, str) else system
    before = [{"role": "system", "parts": parts}] if parts else []
    said = [m for message in [*before, *_objects(asked)] for m in _message(message)]
    answers = unpacked(first(about, "gen_ai.output.messages"))
    return said, [m for message in _objects(answers) for m in _message(message)]


def _message(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A message of parts; of a tool's answers one each."""
    parts = message.get("parts")
    if parts is None:
        return [message]
    said, calls, results, thought = "", [], [], ""
    for part in _objects(parts):
        kind, content = part.get("type"), part.get("content")
        if kind == "text" and isinstance(content, str):
            said += content
        elif kind == "reasoning" and isinstance(content, str):
            thought += content
        elif kind == "tool_call":
            named = {"name": part.get("name"), "arguments": part.get("arguments")}
            calls.append({"id": part.get("id"), "function": named})
        elif kind == "tool_call_response":
            answer = part.get("response", part.get("result"))
            named = {"tool_call_id": part["id"]} if part.get("id") else {}
            results.append({"role": "tool", "content": fields.as_text(answer), **named})
        else:
            raise LeftOut("bad_message", f"a part of a message is of type {kind!r}")
    if results:
        return results
    found: dict[str, Any] = {"role": message.get("role"), "content": said}
    found |= {"tool_calls": calls} if calls else {}
    found |= {"reasoning_content": thought} if thought else {}
    return [found | {k: message[k] for k in ("finish_reason",) if message.get(k)}]


def _choice(message: dict[str, Any], number: int, reasons: Any) -> Choice:
    reason = message.pop("finish_reason", None)
    if reason is None and isinstance(reasons, list) and number < len(reasons):
        reason = reasons[number]
    said = fields.answer(message)
    if not said["content"] and not said.get("tool_calls"):
        raise LeftOut("no_answer", "the answer is empty")
    return Choice(message=said, finish_reason=str(reason or "stop"))


# ------------------------------------------------------------------------- conventions up to 1.36
def _is_older(about: Flat) -> bool:
    return "gen_ai.prompt.0.role" in about


def _older(about: Flat, side: str) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    calls: dict[int, dict[int, dict[str, Any]]] = {}
    for name, value in about.items():
        if (at := _NUMBERED.fullmatch(name)) is None or at[1] != side:
            continue
        number = int(at[2])
        message = found.setdefault(number, {"role": "assistant", "content": ""})
        if called := _CALLED.fullmatch(at[3]):
            named = calls.setdefault(number, {}).setdefault(int(called[1]), {})
            named[called[2]] = value
        else:
            message[at[3]] = value
    for number, made in calls.items():
        found[number]["tool_calls"] = [made[n] for n in sorted(made)]
    return [found[n] for n in sorted(found)]


def _functions(about: Flat) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for name, value in about.items():
        if at := _FUNCTION.fullmatch(name):
            found.setdefault(int(at[1]), {})[at[2]] = unpacked(value)
    return [found[n] for n in sorted(found)]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in tool.items() if k != "type"} if "function" not in tool else tool


# -------------------------------------------------------------------------------- typed attributes
def _attributes(holder: Mapping[str, Any]) -> Flat:
    found = holder.get("attributes")
    if isinstance(found, dict):
        return dict(found)
    return {str(each.get("key")): _value(each.get("value")) for each in _objects(found)}


def _value(typed: Any) -> Any:
    """Of an AnyValue: 64-bit integers are written as text."""
    if not isinstance(typed, dict) or not typed:
        return None
    kind, value = next(iter(typed.items()))
    if kind in ("intValue", "int_value"):
        return int(value) if str(value).lstrip("-").isdigit() else None
    if kind in ("arrayValue", "array_value"):
        return [_value(each) for each in _objects(mapping(value).get("values"))]
    if kind in ("kvlistValue", "kvlist_value"):
        pairs = _objects(mapping(value).get("values"))
        return {str(each.get("key")): _value(each.get("value")) for each in pairs}
    return value


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
