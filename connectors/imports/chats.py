"""Transcripts (messages, ShareGPT) as calls: each turn of the assistant answers what stands before
it. A row is a session of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from connectors.imports import fields
from connectors.imports.fields import Clock, first, mapping, text
from connectors.imports.outcome import LeftOut
from connectors.traffic import Call, Choice
from connectors.transcripts import BadTranscript, Format, transcript


def calls(row: dict[str, Any], form: Format, clock: Clock) -> Iterator[Call]:
    """LeftOut where it is no conversation, or nobody answers in it."""
    try:
        found = transcript(row, form)
    except BadTranscript as error:
        raise LeftOut(error.reason, str(error)) from error
    fields.check_answered(found.messages)
    said, digest = found.messages, fields.digest(row)
    turns = [
        n
        for n, message in enumerate(said)
        if n and message["role"] == "assistant" and message.get("weight") != 0
        if message["content"] or message.get("tool_calls")
    ]
    if not turns:
        raise LeftOut("no_answer", "no turn of the assistant answers anything")
    about = {**mapping(row.get("metadata")), **row}
    began, _ = clock.span(first(about, "time", "timestamp", "created_at"), None)
    for number, n in enumerate(turns):
        at = began + number * fields.STEP_S
        yield Call(
            id=f"chat-{digest}-{number}",
            session=text(about, "session_id", "conversation_id") or f"chat-{digest}",
            task=text(about, "task"),
            time=at,
            finished_at=at,
            messages=[_unweighed(message) for message in said[:n]],
            choices=(Choice(message=_unweighed(said[n])),),
            source="import",
            tools=list(found.tools),
            model=text(about, "model"),
            user=text(about, "user_id", "user"),
        )


def _unweighed(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "weight"}
