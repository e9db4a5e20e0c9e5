"""The body of a chat request: what of OpenAI's interface is served, and what is refused, by name.

Refused is what would change the answer and cannot be kept here; hints that change nothing a client
could see are taken and ignored. Unknown fields are refused, as OpenAI does.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from connectors.engines.types import Sampling
from connectors.gateway.errors import invalid, unsupported
from connectors.transcripts import BadTranscript, Transcript, transcript

MAX_SAMPLES: Final = 128
Count = Annotated[int, Meta(ge=1)]

_PLACE: Final = re.compile(r" - at `\$\.?(.*)`$")
_FIELD: Final = re.compile(r"(?:unknown|required) field `([^`]*)`")


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Null is as good as absent."""

    model: str
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: int | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    # Served only as what they are by default.
    stop: Any = None
    response_format: Any = None
    parallel_tool_calls: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None

    # Hints.
    store: Any = None
    service_tier: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that can be served.

    said          messages as the client sent them, without nulls
    conversation  as a chat template takes them, with the tools
    hears_tools   tool calls are read from the answers
    digest        of all of the body: equal bodies have equal ones
    """

    model: str
    said: list[dict[str, Any]]
    conversation: Transcript
    hears_tools: bool
    num_samples: int
    sampling: Sampling
    logprobs: bool
    stream: bool
    include_usage: bool
    user: str
    metadata: dict[str, str]
    digest: bytes


def read(data: bytes, default: Sampling) -> Asked:
    """The request in `data`; what it leaves open is as in `default`. Refused (400) when it makes no
    sense or asks for what is not served."""
    body = _body(data)
    _check_supported(body)
    said = [_cleaned(message) for message in body.messages]
    return Asked(
        model=body.model,
        said=said,
        conversation=_conversation(said, body.tools),
        hears_tools=bool(body.tools) and body.tool_choice != "none",
        num_samples=body.n or 1,
        sampling=_sampling(body, default),
        logprobs=bool(body.logprobs),
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        user=body.user or "",
        metadata=body.metadata or {},
        digest=hashlib.blake2b(msgspec.json.encode(body, order="sorted"), digest_size=16).digest(),
    )


def decoded(data: bytes, kind: Any) -> Any:
    """A client's JSON as `kind`. Refused (400) with the field that is wrong."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        said = str(error)
        at, field = _PLACE.search(said), _FIELD.search(said)
        param = ".".join(part[1] for part in (at, field) if part and part[1]) or None
        message = _PLACE.sub("", said)
        if "unknown field" in said:
            raise invalid(f"Unknown parameter: '{param}'", param, "unknown_parameter") from error
        if "required field" in said:
            message = f"Missing required parameter: '{param}'"
            raise invalid(message, param, "missing_required_parameter") from error
        where = "" if param is None else f" for '{param}'"
        raise invalid(f"Invalid value{where}: {message}", param) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"We could not parse the JSON body of your request: {error}"
        raise invalid(message, code="malformed_body") from error
    except ValueError as error:  # a rule of the record itself
        raise invalid(str(error)) from error


def _body(data: bytes) -> Body:
    body: Body = decoded(data, Body)
    return body


def _check_supported(body: Body) -> None:
    if body.top_logprobs:
        raise unsupported("top_logprobs", "the engines give the log-prob of the chosen token only")
    if body.stop:
        raise unsupported(
            "stop", "an answer ends where the model ends it, at its stop ids (sampling.stop_ids)"
        )
    form = body.response_format
    if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
        raise unsupported("response_format", "what the model writes is not constrained; take text")
    if body.tool_choice not in (None, "auto", "none"):
        raise unsupported("tool_choice", "no call can be forced; take auto or none")
    if body.parallel_tool_calls is False:
        raise unsupported("parallel_tool_calls", "the model's calls are not limited to one")
    for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
        if getattr(body, name):
            raise unsupported(name, "log-probs would no more be those of the policy")
    if body.modalities not in (None, [], ["text"]):
        raise unsupported("modalities", "answers are text")
    for name in ("audio", "prediction", "web_search_options", "functions", "function_call"):
        if getattr(body, name) is not None:
            raise unsupported(name, "it is not of this interface")


def _sampling(body: Body, default: Sampling) -> Sampling:
    limits = (body.max_tokens, body.max_completion_tokens)
    if None not in limits:
        raise invalid("give max_completion_tokens or max_tokens, not both", "max_tokens")
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "max_tokens": limits[0] or limits[1],
        # Sample k is drawn with seed + k, from 64 bits.
        "seed": None if body.seed is None else body.seed % 2**62,
    }
    return msgspec.structs.replace(default, **{k: v for k, v in given.items() if v is not None})


def _cleaned(message: dict[str, Any]) -> dict[str, Any]:
    """Without nulls, which clients send or leave out as they like; under the role that chat
    templates know."""
    said = {key: value for key, value in message.items() if value is not None}
    return said | {"role": "system"} if said.get("role") == "developer" else said


def _conversation(said: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Transcript:
    try:
        return conversation(said, tools)
    except BadTranscript as error:
        param = "tools" if str(error).startswith("tools") else "messages"
        raise invalid(f"Invalid '{param}': {error}", param) from error


def conversation(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> Transcript:
    """As a chat template takes it; an answer may be empty. BadTranscript when it is none."""
    said = [{"content": "", **m} if m.get("role") == "assistant" else m for m in messages]
    return transcript({"messages": said, "tools": tools}, "messages")
