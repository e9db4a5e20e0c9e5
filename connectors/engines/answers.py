"""What an engine answered is taken only if it makes sense: it would be trained on as it is."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import Any, Final

import numpy as np

from connectors.engines.told import Told
from connectors.engines.types import Completion, EngineState, GenerateRequest, Part
from connectors.records import Version

LOGPROB_MARGIN: Final = 1e-3
"""By so much rounding may lift the log of a probability above 0."""
SMALLEST: Final = float(np.finfo(np.float32).min)
MAX_ID: Final = 2**31 - 1


def nonsense(
    completions: tuple[Completion, ...], request: GenerateRequest | None, state: EngineState
) -> str | None:
    """Why `completions` are no answer (to `request`, where that is known) of an engine in `state`;
    None when they are one."""
    if request is not None and len(completions) != request.num_samples:
        return f"{len(completions)} completions for {request.num_samples} samples"
    for done in completions:
        why = _wrong_ids(done, state) or _wrong_versions(done, request, state)
        if why is None:
            why = _wrong_end(done, request, state)
        if why is not None:
            return why
    return None


def misfit(
    part: Part, told: Sequence[Told], request: GenerateRequest, state: EngineState
) -> str | None:
    """Why `part` is not what an engine in `state` tells of `request` after `told`, one for each
    sample; None when it is."""
    if not 0 <= part.sample < len(told):
        return f"a part of sample {part.sample} of {len(told)}"
    if not part.token_ids:
        return "a part without ids"
    before, sampling = told[part.sample], request.sampling
    why = _wrong_ids(part, state) or _wrong_versions(part, request, state, before.version)
    if why is not None:
        return why
    inner = (*before.token_ids[-1:], *part.token_ids[:-1])
    stop = next((i for i in inner if i in sampling.stop_ids), None)
    if stop is not None:
        return f"ids after {stop}, which is a stop id"
    count, most = len(before) + len(part.token_ids), sampling.max_tokens
    return f"{count} ids, asked for were at most {most}" if count > most else None


def context_tokens(state: EngineState) -> int | None:
    """Of the engine's context, if it tells."""
    return _number(state, "context_tokens")


def _wrong_ids(done: Completion | Part, state: EngineState) -> str | None:
    num_ids, num_logprobs = len(done.token_ids), len(done.logprobs)
    if num_ids != num_logprobs:
        return f"{num_ids} ids and {num_logprobs} log-probs"
    if not num_ids:
        return None
    size = _number(state, "vocab_size") or MAX_ID + 1
    if min(done.token_ids) < 0 or max(done.token_ids) >= size:
        token = next(i for i in done.token_ids if not 0 <= i < size)
        return f"token id {token} is outside the vocabulary of {size}"
    lowest, highest, total = min(done.logprobs), max(done.logprobs), sum(done.logprobs)
    if lowest >= SMALLEST and highest <= LOGPROB_MARGIN and not isnan(total):
        return None
    # Written so that NaN is wrong.
    wrong = (p for p in done.logprobs if not SMALLEST <= p <= LOGPROB_MARGIN)
    return next((f"a log-prob is {p}" for p in wrong), None)


def _wrong_versions(
    done: Completion | Part,
    request: GenerateRequest | None,
    state: EngineState,
    before: Version | None = None,
) -> str | None:
    """`before` wrote what came before."""
    end, least = 0, None if request is None else request.min_version
    most = None if request is None or before is not None else request.max_version
    if most is not None and done.segments and (first := done.segments[0].version) > most:
        return f"begun by version {first}, asked for was {most} or older"
    for segment in done.segments:
        version = segment.version
        if segment.start != end or segment.end <= segment.start:
            return f"segment [{segment.start}, {segment.end}) does not go on at {end}"
        if least is not None and version < least:
            return f"ids of version {version}, asked for was {least} or newer"
        if state.version is None and state.epoch < 0:
            return f"ids of version {version}, the engine never held one"
        # None later on is a moment between two versions: it wrote this before.
        if state.version is not None and version > state.version:
            return f"ids of version {version}, the engine holds {state.version}"
        if before is not None and version < before:
            return f"ids of version {version} after ids of version {before}"
        end, before = segment.end, version
    num_ids = len(done.token_ids)
    return None if end == num_ids else f"segments cover {end} of {num_ids} ids"


def _wrong_end(done: Completion, request: GenerateRequest | None, state: EngineState) -> str | None:
    """Whether it ended where, and because of what, it says."""
    ids, reason = done.token_ids, done.finish_reason
    if reason in ("stop", "length") and not ids:
        return f"ended by {reason} without an id"
    if request is None:
        return None
    most, stop_ids = request.sampling.max_tokens, request.sampling.stop_ids
    if len(ids) > most:
        return f"{len(ids)} ids, asked for were at most {most}"
    if reason == "stop" and ids[-1] not in stop_ids:
        return f"ended by stop, but {ids[-1]} is no stop id"
    if reason == "length":
        if ids[-1] in stop_ids:
            return f"ended by length, but {ids[-1]} is a stop id"
        context = context_tokens(state)
        whole = context is not None and len(request.token_ids) + len(ids) >= context
        if len(ids) < most and not whole:
            return f"ended by length after {len(ids)} of {most} ids, the context is {context}"
    return None


def _number(state: EngineState, key: str) -> int | None:
    """What the engine tells of itself, if it does."""
    told: Any = state.info.get(key)
    return told if isinstance(told, int) else None
