"""What an engine is made of: a decoder that turns sequences into tokens, and the weights it decodes
with. Each kind of engine has its own pair; requests, queueing and HTTP are the same for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

import torch

from connectors.engines.metrics import Durations
from connectors.engines.sequence import Sequence
from connectors.engines.types import Sampling
from connectors.records import Version
from connectors.weights import (
    Ack,
    FenceRequest,
    JoinRequest,
    LoadRequest,
    RelabelRequest,
    UpdateRequest,
)


class Decoder(Protocol):
    """Sequences in, tokens appended to them in place. `add`, `remove` and the callbacks belong to
    the asyncio loop that `listen` was called on."""

    kind: ClassVar[str]
    vocab_size: int
    context_tokens: int
    device: torch.device

    @property
    def num_tokens(self) -> int:
        """Generated since the start."""

    @property
    def kv_use(self) -> float:
        """Share of the KV cache in use, 0 to 1."""

    @property
    def alive(self) -> bool: ...

    def listen(
        self,
        *,
        on_finished: Callable[[Sequence], None],
        on_failed: Callable[[Sequence], None],
        on_fatal: Callable[[str], None],
    ) -> None:
        """A sequence ended by itself; what was computed for it is unusable; nothing will end any
        more."""

    def start(self) -> None:
        """Takes its memory and begins. EngineStartError when it cannot."""

    def stop(self) -> None:
        """Ends; whatever runs is dropped."""

    def refuses(self, sampling: Sampling) -> str | None:
        """Why this kind of engine cannot sample so; None when it can."""

    def add(self, sequence: Sequence) -> None:
        """Decodes it until it ends, from its prompt and the tokens it has."""

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out; tokens drawn for it from now on are dropped."""


class Weights(Protocol):
    """Methods block and may run on any thread but the asyncio loop's. `on_version` is called from
    those threads after every change of `version`. Errors are WeightsErrors."""

    on_version: Callable[[], None]
    update_durations: Durations
    pause_durations: Durations
    update_seconds: dict[str, float]
    """Where the time of the last whole update went, as far as it is known."""

    @property
    def num_ranks(self) -> int:
        """Processes that each take the weights."""

    @property
    def version(self) -> Version | None:
        """What the next token is sampled with; None while no whole version is held."""

    @property
    def digest(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    def join(self, request: JoinRequest) -> None: ...

    def update(self, request: UpdateRequest) -> Ack: ...

    def load(self, request: LoadRequest) -> Ack: ...

    def relabel(self, request: RelabelRequest) -> Ack: ...

    def fence(self, request: FenceRequest) -> None: ...

    def close(self) -> None: ...
