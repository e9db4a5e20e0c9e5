"""What an engine is: token ids in; ids, log-probs and version segments out. Two real
implementations: `hf` (transformers, in a process of its own behind HTTP) and `vllm`."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from connectors.records import FinishReason, Segment, Version


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """temperature 0 = greedy. `seed`: sample k of a request uses seed + k; None = not
    reproducible."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 64
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`request_id` includes a digest of the input ids, so a re-sent request attaches only to its
    own work. Nothing is begun below `min_version`, which it waits for, or above `max_version`, once
    passed it is VersionGone; after `deadline_s` the partials come back as `cancelled`. Requests of
    one `session` share a prefix: they gain from the same engine's cache."""

    request_id: str
    token_ids: tuple[int, ...]
    num_samples: int = 1
    sampling: Sampling = Sampling()
    min_version: Version | None = None
    max_version: Version | None = None
    deadline_s: float | None = None
    session: str = ""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """`token_ids` are the generated ids only (a stop id that was sampled is the last of them);
    `logprobs[i]` is log-softmax(logits/temperature)[token_ids[i]] before top-p (temperature 1 when
    greedy); `segments` index into token_ids."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    segments: tuple[Segment, ...]
    finish_reason: FinishReason


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The next tokens of one sample of a request, at least one; `segments` index into this part's
    token_ids."""

    sample: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    segments: tuple[Segment, ...]


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """`version` None: holds no whole version (starting, or an update was interrupted)."""

    version: Version | None
    digest: str
    epoch: int  # the highest trainer epoch that spoke to it; -1 before the first
    num_running: int
    num_queued: int
    kv_use: float  # share of the KV cache in use, 0 to 1
    num_tokens: int = 0  # generated since the start
    host: str = ""  # see connectors.engines.host
    device: str = "cpu"  # torch's name of its kind
    num_ranks: int = 1  # processes that each take the weights
    info: dict[str, Any] = {}


class EngineError(RuntimeError):
    """The engine refused or failed; the request may be sent again elsewhere."""


class RequestRefused(EngineError):
    """The request itself can never succeed (too long, unknown sampling): do not retry."""


class VersionGone(RequestRefused):
    """All that could write it is newer than the request's `max_version`."""


class EngineUnavailable(EngineError):
    """The engine cannot be reached, or it answers that it is going away: an outage, no verdict on
    the request."""


class EngineStartError(RuntimeError):
    """The engine cannot start (no model there, port taken); the message is one line."""


class Engine(Protocol):
    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        """One completion a sample, in order. Waits until the engine holds `min_version` or newer.
        EngineError on failure, RequestRefused when the request can never succeed."""

    async def attach(self, request_id: str) -> tuple[Completion, ...] | None:
        """The result of a request that was sent before (waits if it is running); None if unknown.
        Cancelled requests never attach."""

    async def cancel(self, request_id: str) -> tuple[Completion, ...]:
        """Ends the request; the partials, empty when it is unknown."""

    def held_up(self, request_id: str) -> bool:
        """Whether an outage keeps a request that is under way here from going on now."""

    async def state(self) -> EngineState: ...
