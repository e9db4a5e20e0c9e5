"""A sample that one engine began and another one ends."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from connectors.engines.answers import context_tokens
from connectors.engines.told import Told
from connectors.engines.types import Completion, EngineState, GenerateRequest
from connectors.records import FinishReason


def ended(told: Told, request: GenerateRequest, state: EngineState | None) -> FinishReason | None:
    """Why nothing comes after `told`, a sample of `request` at an engine in `state`; None when
    something does."""
    sampling, count = request.sampling, len(told)
    if count and told.token_ids[-1] in sampling.stop_ids:
        return "stop"
    context = None if state is None else context_tokens(state)
    whole = context is not None and len(request.token_ids) + count >= context
    return "length" if count >= sampling.max_tokens or whole else None


def continued(
    request: GenerateRequest, sample: int, told: Told, left_s: float | None
) -> GenerateRequest:
    """The rest of one sample as a request of its own. Seeds count positions, so with the same
    weights it is drawn as it would have been; versions do not go back."""
    ids, sampling = told.token_ids, request.sampling
    digest = hashlib.blake2b(np.array(ids, np.int32).tobytes(), digest_size=8).hexdigest()
    least = [v for v in (request.min_version, told.version) if v is not None]
    return replace(
        request,
        request_id=f"{request.request_id}+{sample}.{len(ids)}.{digest}",
        token_ids=(*request.token_ids, *ids),
        num_samples=1,
        sampling=replace(
            sampling,
            max_tokens=sampling.max_tokens - len(ids),
            seed=None if sampling.seed is None else sampling.seed + sample,
        ),
        min_version=max(least, default=None),
        max_version=None if ids else request.max_version,  # of what begins
        deadline_s=left_s,
    )


@dataclass(slots=True)
class Rests:
    """The samples of a stream that broke off, each on its own way: its task and its request's
    name."""

    tasks: dict[asyncio.Task[Completion], str] = field(default_factory=dict)
    cancelled: bool = False

    @property
    def running(self) -> list[str]:
        return [name for task, name in self.tasks.items() if not task.done()]
