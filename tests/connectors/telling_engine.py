"""Steps of a scripted engine that stream tokens which can be worked out: each follows from its
position and its sample's seed, so that a sample begun here and ended there is one that is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from connectors.engines.types import Completion, GenerateRequest, Part, Sampling
from connectors.engines.wire import Last
from connectors.records import FinishReason, Segment, Version
from tests.connectors.scripted_engine import Answer, ScriptedEngine, until

PROMPT = (1, 2, 3)
NUM_TOKENS = 8
FIRST = Version(0, 1)


def asked(name: str = "r", **changes: Any) -> GenerateRequest:
    """Of NUM_TOKENS ids a sample, with seed 5."""
    sampling = {"max_tokens": NUM_TOKENS, "seed": 5} | {
        key: changes.pop(key) for key in ("max_tokens", "seed", "stop_ids") if key in changes
    }
    return GenerateRequest(
        request_id=name, token_ids=PROMPT, sampling=Sampling(**sampling), **changes
    )


def token_at(position: int, seed: int) -> int:
    """Of prompt and tokens together, counted from 0."""
    return 10 + (7 * position + 13 * seed) % 80


def logprob_at(position: int, seed: int) -> float:
    return -((3 * position + seed) % 50 + 1) / 64


def span(request: GenerateRequest, sample: int, start: int, end: int, version: Version) -> Part:
    """Tokens [start, end) of a sample."""
    seed = (request.sampling.seed or 0) + sample
    positions = range(len(request.token_ids) + start, len(request.token_ids) + end)
    return Part(
        sample=sample,
        token_ids=tuple(token_at(p, seed) for p in positions),
        logprobs=tuple(logprob_at(p, seed) for p in positions),
        segments=(Segment(0, end - start, version.incarnation, version.number),),
    )


def whole(
    request: GenerateRequest,
    sample: int = 0,
    *ends: tuple[int, Version],
    reason: FinishReason = "length",
) -> Completion:
    """Its completion, written up to each of `ends` by that version."""
    ends = ends or ((request.sampling.max_tokens, FIRST),)
    parts = span(request, sample, 0, ends[-1][0], FIRST)
    starts = (0, *(end for end, _ in ends))
    return Completion(
        token_ids=parts.token_ids,
        logprobs=parts.logprobs,
        segments=tuple(
            Segment(start, end, version.incarnation, version.number)
            for start, (end, version) in zip(starts, ends, strict=False)
        ),
        finish_reason=reason,
    )


def line(value: object) -> bytes:
    return msgspec.json.encode(value) + b"\n"


async def opened(http: web.Request) -> web.StreamResponse:
    stream = web.StreamResponse()
    await stream.prepare(http)
    return stream


def streams(*lines: object) -> Answer:
    """These lines, and no more."""

    async def answer(http: web.Request) -> web.StreamResponse:
        stream = await opened(http)
        for value in lines:
            await stream.write(value if isinstance(value, bytes) else line(value))
        return stream

    return answer


def tells(engine: ScriptedEngine, *, size: int = 1) -> Answer:
    """All tokens of all samples, and the end."""

    async def answer(http: web.Request) -> web.StreamResponse:
        request = msgspec.json.decode(await http.read(), type=GenerateRequest)
        num = request.sampling.max_tokens
        stream = await _told(http, engine, [num] * request.num_samples, size)
        version = engine.version or FIRST
        done = [whole(request, k, (num, version)) for k in range(request.num_samples)]
        await stream.write(line(Last(done=tuple(done))))
        return stream

    return answer


def breaks_off(engine: ScriptedEngine, *counts: int, size: int = 1, last: object = None) -> Answer:
    """So many tokens of each sample, then `last` and the end of the line."""

    async def answer(http: web.Request) -> web.StreamResponse:
        stream = await _told(http, engine, counts, size)
        if last is not None:
            await stream.write(line(last))
        return stream

    return answer


def dies_after(engine: ScriptedEngine, *counts: int) -> Answer:
    """So many tokens of each sample; from then on it is not healthy."""

    async def answer(http: web.Request) -> web.StreamResponse:
        stream = await _told(http, engine, counts, 1)
        engine.ill = True
        return stream

    return answer


def until_cancelled(engine: ScriptedEngine, *counts: int) -> Answer:
    """So many tokens of each sample, at least one, and the end once it is cancelled."""

    async def answer(http: web.Request) -> web.StreamResponse:
        request = msgspec.json.decode(await http.read(), type=GenerateRequest)
        stream = await _told(http, engine, counts, 1)
        ends = [(count, engine.version or FIRST) for count in counts]
        done = tuple(whole(request, k, end, reason="cancelled") for k, end in enumerate(ends))
        engine.finished[request.request_id] = done
        await until(lambda: request.request_id in engine.cancelled)
        await stream.write(line(Last(done=done)))
        return stream

    return answer


async def _told(
    http: web.Request, engine: ScriptedEngine, counts: Sequence[int], size: int
) -> web.StreamResponse:
    request = msgspec.json.decode(await http.read(), type=GenerateRequest)
    stream = await opened(http)
    for start in range(0, max(counts, default=0), size):
        for sample, count in enumerate(counts):
            if start < count:
                end = min(start + size, count)
                part = span(request, sample, start, end, engine.version or FIRST)
                await stream.write(line(part))
    return stream
