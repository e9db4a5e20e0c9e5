"""The `llm` an agent holds: one trajectory's conversation with the engine, in exact ids.

`chat` renders the messages as text, finds the latest earlier turn that text extends, and sends
that turn's ids plus the encoded rest. A template that rewrites earlier turns (drops their
thoughts, trims them) leaves no such turn, or only an earlier one: the conversation forks there.

An agent may run on a loop other than the engine's; requests always run on the engine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from connectors.branches import Conversation, End, Row
from connectors.engines.types import (
    Completion,
    Engine,
    EngineError,
    GenerateRequest,
    Sampling,
)
from connectors.records import Prompt, Version
from operators.agents import ContextFull, Message

T = TypeVar("T")
CANCEL_S: Final = 5.0


class Text(Protocol):
    """The tokenizer's edge (`connectors.text.Text`; injected, because operators import no
    connector)."""

    vocab_size: int
    stop_ids: tuple[int, ...]

    def encode_prompt(self, prompt: Prompt) -> tuple[int, ...]: ...
    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> str: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int] | NDArray[np.int32], *, special: bool = False) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What all requests of one trajectory share.

    name      group_id/k, with the attempt when an agent is tried again and the version that it may
              start from: request ids begin with it
    group_id  what all trajectories of a prompt share: their requests gain from one engine's cache
    seed      of the trajectory; each request derives its own
    attach    ask the engine first for a result it may still hold (work resubmitted after a crash)
    """

    name: str
    group_id: str
    seed: int
    sampling: Sampling
    context_tokens: int
    min_version: Version | None
    attach: bool = False


class Requests:
    """What a session has at the engine. Use it on the engine's loop."""

    def __init__(self, engine: Engine, session: Session) -> None:
        self._engine, self._session = engine, session
        self._in_flight: set[str] = set()
        self._cancelled = False
        self._num = 0

    def make(self, ids: Sequence[int], sampling: Sampling, num_samples: int = 1) -> GenerateRequest:
        """The session's next one, `sampling` with a seed of its own."""
        session, number = self._session, self._num
        self._num += 1
        digest = hashlib.blake2b(np.array(ids, np.int32).tobytes(), digest_size=8).hexdigest()
        return GenerateRequest(
            request_id=f"{session.name}/{number}/{digest}",
            token_ids=tuple(ids),
            num_samples=num_samples,
            sampling=msgspec.structs.replace(sampling, seed=derive_seed(session.seed, number)),
            min_version=session.min_version,
            session=session.group_id,
        )

    async def send(self, request: GenerateRequest) -> tuple[Completion, ...]:
        """Whole completions. EngineError as the engine, and for one that did not end by itself."""
        if self._cancelled:
            raise EngineError("the trajectory is over")
        self._in_flight.add(request.request_id)
        made = None
        if self._session.attach:
            made = await self._engine.attach(request.request_id)
        if not made or not all(c.finish_reason in ("stop", "length") for c in made):
            made = await self._engine.generate(request)
        self._in_flight.discard(request.request_id)  # one that failed may still run: `cancel` it
        for one in made:
            if one.finish_reason in ("cancelled", "error"):
                raise EngineError(f"request {request.request_id} ended as {one.finish_reason}")
        return made

    @property
    def held_up(self) -> bool:
        """Whether an outage keeps a request from going on."""
        return any(self._engine.held_up(request_id) for request_id in self._in_flight)

    async def cancel(self) -> None:
        """Ends those in flight, and lets none begin: the agent may not have noticed yet that it is
        over."""
        self._cancelled = True
        for request_id in tuple(self._in_flight):
            # An engine that is gone or stopped takes the request with it.
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(CANCEL_S):
                    await self._engine.cancel(request_id)


class EngineLLM:
    """Implements `LLM`. Create it on the engine's loop; `prompt_ids` are what `generate` starts
    from."""

    def __init__(
        self, engine: Engine, text: Text, session: Session, prompt_ids: Sequence[int]
    ) -> None:
        self._text, self._session = text, session
        self._prompt_ids = tuple(prompt_ids)
        self._loop = asyncio.get_running_loop()
        self._conversation = Conversation(partial(text.decode, special=True))
        self.requests = Requests(engine, session)
        self.messages: list[dict[str, Any]] = []  # of the last chat, its answer included
        self.full = False  # the context ended the trajectory

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **sampling: Any,
    ) -> Message:
        """The model's answer. ContextFull when the messages leave no room; ValueError when the
        template refuses them; EngineError when the engine failed for good."""
        written = self._text.render(messages, tools)
        after = self._conversation.continues(written)
        known = len(self._conversation.text(after)) if after else 0
        new_ids = self._text.encode(written[known:])
        made = await self._complete(after, new_ids, sampling)
        self._conversation.add(after, new_ids, made, written)
        message = Message(role="assistant", content=self._text.decode(self._unstopped(made)))
        self.messages = [*(dict(m) for m in messages), dict(message)]
        return message

    async def generate(self, new_ids: Sequence[int], **sampling: Any) -> Completion:
        """What follows the last turn (or the prompt) and `new_ids`. Errors as in `chat`."""
        after = self._conversation.tip
        added = [*(() if after else self._prompt_ids), *new_ids]
        made = await self._complete(after, added, sampling)
        self._conversation.add(after, added, made)
        return made

    def rows(self) -> list[Row]:
        """What became of it: one row a branch; empty when nothing was generated."""
        return self._conversation.rows()

    def _unstopped(self, made: Completion) -> Sequence[int]:
        stopped = made.finish_reason == "stop" and made.token_ids
        return made.token_ids[:-1] if stopped else made.token_ids

    async def _complete(
        self, after: End | None, new_ids: Sequence[int], overrides: Mapping[str, Any]
    ) -> Completion:
        ids = (*(after.branch.ids[: after.length] if after else ()), *new_ids)
        room = self._session.context_tokens - len(ids)
        if room <= 0:
            self.full = True
            raise ContextFull(f"{len(ids)} of {self._session.context_tokens} tokens are used")
        request = self.requests.make(ids, self._sampling(overrides, room))
        (made,) = await self._on_engine_loop(self.requests.send(request))
        return made

    def _sampling(self, overrides: Mapping[str, Any], room: int) -> Sampling:
        fields = msgspec.structs.asdict(self._session.sampling) | dict(overrides)
        unknown = set(overrides) - {"max_tokens", "top_p", "stop_ids"}
        if unknown - {"temperature"}:
            raise ValueError(f"unknown sampling option {sorted(unknown)[0]}")
        if fields["temperature"] != self._session.sampling.temperature:
            raise ValueError(
                f"temperature is the run's ({self._session.sampling.temperature}), because the "
                f"trainer computes log-probs at it; got {fields['temperature']}"
            )
        fields["max_tokens"] = min(fields["max_tokens"], room)
        fields["stop_ids"] = tuple(fields["stop_ids"])
        return Sampling(**fields)

    async def _on_engine_loop(self, work: Coroutine[Any, Any, T]) -> T:
        if asyncio.get_running_loop() is self._loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


def derive_seed(*parts: object) -> int:
    """A 48-bit seed that depends on all parts, equal in every process."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "big")
