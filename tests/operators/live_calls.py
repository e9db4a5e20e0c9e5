"""Calls and feedback as the gateway would record them, small enough to reason about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from connectors.records import Segment
from connectors.traffic import Call, Choice, Feedback

EOS = 2


def choice(
    ids: Sequence[int] | None,
    *,
    text: str = "",
    version: int | None = 0,
    logprobs: bool = True,
    segments: tuple[Segment, ...] | None = None,
) -> Choice:
    """Token i has log-prob -(i + 1) / 8, all of version 0.`version`."""
    num = 0 if ids is None else len(ids)
    if segments is None:
        segments = (Segment(0, num, 0, version),) if version is not None and num else ()
    return Choice(
        message={"role": "assistant", "content": text},
        token_ids=None if ids is None else tuple(ids),
        logprobs=tuple(-(i + 1) / 8 for i in range(num)) if logprobs and ids is not None else None,
        segments=segments,
    )


def call(
    id: str,
    prompt: Sequence[int] | None,
    *answers: Choice | Sequence[int],
    time: float = 0.0,
    **changes: Any,
) -> Call:
    """One of session `s`, at temperature 1. `answers`: ids, of version 0.0."""
    choices = tuple(a if isinstance(a, Choice) else choice(a) for a in answers)
    fields: dict[str, Any] = {
        "session": "s",
        "task": "t",
        "finished_at": time,
        "messages": [{"role": "user", "content": f"{list(prompt or ())}"}],
        "temperature": 1.0,
        "model": "0.0",
    }
    return Call(
        id=id,
        time=time,
        prompt_ids=None if prompt is None else tuple(prompt),
        choices=choices,
        **(fields | changes),
    )


def said(id: str, value: float, *, time: float = 0.0, **changes: Any) -> Feedback:
    """About session `s`."""
    fields: dict[str, Any] = {"session": "s", "name": "thumb"}
    if "call" in changes and "session" not in changes:
        fields["session"] = ""
    return Feedback(id=id, value=value, time=time, **(fields | changes))


def words(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    """A tokeniser of one id a character, 1 after each message; what an assistant said is learnt
    unless its weight is 0."""
    ids: list[int] = []
    mask: list[bool] = []
    for message in messages:
        new = [*map(ord, message["content"]), 1]
        learnt = message["role"] == "assistant" and message.get("weight") != 0
        ids += new
        mask += [learnt] * len(new)
    if not any(mask):
        raise ValueError("nothing to learn")
    return [(np.array(ids, np.int32), np.array(mask, np.bool_))]
