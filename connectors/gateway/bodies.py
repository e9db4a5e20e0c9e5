"""What clients get, in OpenAI's shapes: whole completions, chunks of a stream, lists of models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from connectors.gateway.answers import Answer, Delta
from connectors.gateway.errors import Refused
from connectors.gateway.texts import UNFINISHED

DONE: Final = b"data: [DONE]\n\n"

Spell = Callable[[Sequence[int]], str]


def completion(answer: Answer, spell: Spell) -> dict[str, Any]:
    """The whole answer; `spell` writes special tokens out."""
    choices = []
    for number, made in enumerate(answer.made):
        message = {**answer.message(number), "refusal": None}
        logprobs = _logprobs(answer, made.token_ids, made.logprobs, spell)
        choices.append(
            {
                "index": number,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": answer.finish_reason(number),
            }
        )
    return {**_head(answer, "chat.completion"), "choices": choices, "usage": _usage(answer)}


async def stream(answer: Answer, spell: Spell) -> AsyncIterator[bytes]:
    """The answer as server-sent events, as it comes. Refused when it fails on the way."""
    num = len(answer.samples)
    for number in range(num):
        yield _chunk(answer, number, {"role": "assistant", "content": ""})
    async for delta in answer.deltas():
        yield _of_delta(answer, delta, spell)
    for number in range(num):
        if calls := answer.message(number).get("tool_calls"):
            told = [{"index": k, **call} for k, call in enumerate(calls)]
            yield _chunk(answer, number, {"tool_calls": told})
        yield _chunk(answer, number, {}, finish_reason=answer.finish_reason(number))
    if answer.asked.include_usage:
        yield _event({**_head(answer, CHUNK), "choices": [], "usage": _usage(answer)})
    yield DONE


def failure(error: Refused) -> bytes:
    """In a stream that has begun."""
    return _event(error.body())


def models(names: Iterable[str], owner: str) -> dict[str, Any]:
    return {"object": "list", "data": [model(name, owner) for name in names]}


def model(name: str, owner: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": owner}


CHUNK: Final = "chat.completion.chunk"


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": answer.id,
        "object": kind,
        "created": int(answer.created),
        "model": str(answer.version),
    }


def _of_delta(answer: Answer, delta: Delta, spell: Spell) -> bytes:
    logprobs = _logprobs(answer, delta.ids, delta.logprobs, spell)
    return _chunk(answer, delta.sample, {"content": delta.text}, logprobs=logprobs)


def _chunk(
    answer: Answer,
    number: int,
    delta: dict[str, Any],
    *,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> bytes:
    choice = {
        "index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason,
    }  # fmt: skip
    usage = {"usage": None} if answer.asked.include_usage else {}
    return _event({**_head(answer, CHUNK), "choices": [choice], **usage})


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _usage(answer: Answer) -> dict[str, int]:
    asked, made = answer.num_prompt, answer.num_generated
    return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}


def _logprobs(
    answer: Answer, ids: Sequence[int], logprobs: Sequence[float], spell: Spell
) -> dict[str, Any] | None:
    """An entry a token, the one that ends the answer included: there are `completion_tokens`."""
    if not answer.asked.logprobs:
        return None
    content = []
    for token_id, logprob in zip(ids, logprobs, strict=True):
        token = spell([token_id])
        spelled = None if UNFINISHED in token else list(token.encode())
        content.append({"token": token, "logprob": logprob, "bytes": spelled, "top_logprobs": []})
    return {"content": content, "refusal": None}
