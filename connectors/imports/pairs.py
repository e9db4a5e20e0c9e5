"""Pairs of a chat request and its response, as OpenAI's interface, vLLM and SGLang have them.

Ids are there where the server was asked for them: vLLM's `return_token_ids` (`prompt_token_ids`,
`choices[].token_ids`), SGLang's `meta_info`, or a message that carries both. Log-probs of the
chosen tokens are those of `logprobs.content`. Servers give them before temperature, so at any
temperature but 1 they are not those of the policy that sampled, and are left out; where the request
shapes the distribution otherwise (penalties, biases), so are the ids.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from connectors.imports import fields
from connectors.imports.fields import Clock, first, mapping, text
from connectors.imports.outcome import LeftOut
from connectors.records import Segment
from connectors.traffic import Call, Choice

_SHAPED: Final = ("presence_penalty", "frequency_penalty", "logit_bias", "guided_json",
                  "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
                  "min_p")  # fmt: skip
_SESSION: Final = ("session_id", "session", "conversation_id", "trace_id", "litellm_trace_id",
                   "rollout_id")  # fmt: skip
_KEPT_ID: Final = re.compile(r"token_id:(\d+)")
_VERSION: Final = re.compile(r"(\d{1,9})\.(\d{1,9})")
_OWN: Final = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def is_pair(row: Mapping[str, Any]) -> bool:
    return any(name in row for name in ("response", "choices")) or "response" in mapping(
        row.get("data")
    )


def calls(row: dict[str, Any], clock: Clock) -> Iterator[Call]:
    """The pair's call. LeftOut where it is none."""
    if "response" not in row and "data" in row:
        row = {**row, **mapping(row["data"])}
    request, response = mapping(row.get("request")), mapping(row.get("response"))
    request, response = (mapping(each.get("body")) or each for each in (request, response))
    request = request or row
    response = response or row
    if (failed := first(response, "error") or first(row, "error")) is not None:
        raise LeftOut("failed_call", str(failed)[:200])
    answers = response.get("choices")
    if not isinstance(answers, list) or not answers:
        raise LeftOut("no_answer", "the response has no choices")
    if not all(isinstance(each, dict) for each in answers):
        raise LeftOut("no_answer", "a choice is no object")
    asked = fields.conversation(request.get("messages"), request.get("tools"))
    fields.check_answered([*asked.messages, {"role": "assistant"}])
    model = text(response, "model") or text(request, "model")
    prompt_ids, temperature = _prompt_ids(request, response), _temperature(request)
    choices = tuple(_choice(each, model, temperature) for each in answers)
    if _is_shaped(request):
        prompt_ids = None
    start = first(row, "time", "timestamp", "startTime", "start_time", "created_at")
    end = first(row, "finished_at", "endTime", "end_time")
    began, ended = clock.span(start or first(response, "created"), end)
    about = [row, mapping(row.get("metadata")), mapping(request.get("metadata"))]
    named = digest = fields.digest([request.get("messages"), response])
    yield Call(
        id=text(response, "id") or text(row, "id", "request_id") or f"pair-{named}",
        session=_of(about, *_SESSION) or f"pair-{digest}",
        task=_of(about, "task"),
        time=began,
        finished_at=ended,
        messages=list(asked.messages),
        choices=choices,
        source="import",
        tools=list(asked.tools),
        model=model,
        prompt_ids=prompt_ids,
        temperature=temperature,
        user=text(request, "user") or _of(about, "user_id", "user"),
    )


def _of(rows: list[dict[str, Any]], *names: str) -> str:
    return next((found for row in rows if (found := text(row, *names))), "")


def _temperature(request: Mapping[str, Any]) -> float | None:
    given = first(request, "temperature")
    if given is None:
        given = mapping(request.get("sampling_params")).get("temperature")
    return float(given) if isinstance(given, int | float) and given >= 0 else None


def _is_shaped(request: Mapping[str, Any]) -> bool:
    form = mapping(request.get("response_format")).get("type", "text")
    repeats = request.get("repetition_penalty", 1)
    return form != "text" or repeats not in (None, 1) or any(request.get(n) for n in _SHAPED)


# ---------------------------------------------------------------------------------- ids, log-probs
def _prompt_ids(request: Mapping[str, Any], response: Mapping[str, Any]) -> tuple[int, ...] | None:
    choice = response["choices"][0]
    message, meta = mapping(choice.get("message")), mapping(choice.get("meta_info"))
    for row, name in (
        (response, "prompt_token_ids"), (choice, "prompt_token_ids"),
        (message, "prompt_token_ids"), (meta, "input_token_ids"), (request, "input_ids"),
    ):  # fmt: skip
        if (found := _ids(row.get(name))) is not None:
            return found
    return None


def _choice(choice: dict[str, Any], model: str, temperature: float | None) -> Choice:
    raw, meta = mapping(choice.get("message")), mapping(choice.get("meta_info"))
    message = fields.answer({key: raw[key] for key in raw if key not in _OWN} if raw else None)
    content = first(mapping(choice.get("logprobs")), "content") or []
    steps = first(meta, "output_token_logprobs") or []
    candidates = (
        choice.get("token_ids"), raw.get("generation_token_ids"), meta.get("output_ids"),
        [step[1] for step in steps if isinstance(step, list) and len(step) > 1],
        [_kept_id(part) for part in content],
    )  # fmt: skip
    ids = next((found for each in candidates if (found := _ids(each))), None)
    scores = None
    if ids is not None and temperature in (None, 1.0):
        scores = _scores(raw.get("generation_log_probs"), len(ids))
        scores = scores or _scores([mapping(part).get("logprob") for part in content], len(ids))
        scores = scores or _scores([s[0] for s in steps if isinstance(s, list) and s], len(ids))
    version = _VERSION.fullmatch(model)
    is_ours = version is not None and ids is not None
    if not (message["content"] or message.get("tool_calls") or ids):
        raise LeftOut("no_answer", "the answer is empty")
    reason = choice.get("finish_reason") or mapping(meta.get("finish_reason")).get("type")
    return Choice(
        message=message,
        token_ids=ids,
        logprobs=scores,
        segments=(Segment(0, len(ids or ()), int(version[1]), int(version[2])),)
        if is_ours and version is not None
        else (),
        finish_reason=str(reason or "stop"),
    )


def _ids(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not value:
        return None
    fine = all(type(each) is int and 0 <= each < 2**31 for each in value)
    return tuple(value) if fine else None


def _kept_id(part: Any) -> int | None:
    """vLLM's `return_tokens_as_token_ids`."""
    token = part.get("token") if isinstance(part, dict) else None
    found = _KEPT_ID.fullmatch(token) if isinstance(token, str) else None
    return int(found[1]) if found else None


def _scores(value: Any, num: int) -> tuple[float, ...] | None:
    """None unless there is one log-prob an id."""
    if not isinstance(value, list) or len(value) != num or not num:
        return None
    fine = all(
        isinstance(each, int | float) and math.isfinite(each) and each <= 0 for each in value
    )
    return tuple(map(float, value)) if fine else None
