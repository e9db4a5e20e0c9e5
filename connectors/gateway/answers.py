"""One answer on its way, for however many connections ask for it.

    engine ─parts▶ Answer ─deltas▶ follower, follower that came later (a client's retry), ...
                     └─(ended, recorded)─▶ followers' last lines

It goes on without followers: what was generated is recorded once, whether or not it was delivered.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from connectors.engines.types import Completion, Part
from connectors.gateway.asked import Asked
from connectors.gateway.errors import Refused
from connectors.gateway.texts import Spoken
from connectors.records import Version
from connectors.transcripts import Transcript


@dataclass(frozen=True, slots=True)
class Delta:
    """What more there is of one sample: text, and the ids with their log-probs since the last."""

    sample: int
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(slots=True, eq=False)
class Sample:
    spoken: Spoken
    num_ids: int = 0
    ids: list[int] = field(default_factory=list)  # that no delta has
    logprobs: list[float] = field(default_factory=list)

    def add(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self.num_ids += len(ids)
        self.ids += ids
        self.logprobs += logprobs


class Answer:
    """`session` is as the client knows it; `num_prompt` counts the prompt's ids. `made` are the
    completions, once it has ended."""

    def __init__(
        self,
        call_id: str,
        session: str,
        asked: Asked,
        num_prompt: int,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self.id, self.session, self.asked, self.num_prompt = call_id, session, asked, num_prompt
        self.created = time.time()
        self.samples = [
            Sample(Spoken(decode, hears_tools=asked.hears_tools)) for _ in range(asked.num_samples)
        ]
        self.version: Version | None = None  # that wrote the latest token
        self.made: tuple[Completion, ...] = ()
        self.delivered = False  # whole, to anybody
        self.error: Refused | None = None
        self.ended_at: float | None = None  # time.monotonic()
        self._deltas: list[Delta] = []
        self._news = asyncio.Event()
        self._followers: list[Callable[[], bool]] = []

    # -------------------------------------------------------------------- who generates
    def told(self, part: Part) -> None:
        """More tokens of one sample."""
        sample = self.samples[part.sample]
        sample.add(part.token_ids, part.logprobs)
        self.version = part.segments[-1].version
        # The id that ends an answer is no text.
        text = sample.spoken.add(self._unstopped(part.token_ids))
        if text:
            self._push(part.sample, text)

    def complete(self, made: tuple[Completion, ...]) -> None:
        """All tokens are here; nobody is told the end before `end`."""
        self.made = made
        for number, (sample, done) in enumerate(zip(self.samples, made, strict=True)):
            ids = done.token_ids[sample.num_ids :]
            sample.add(ids, done.logprobs[sample.num_ids :])
            text = sample.spoken.end(self._unstopped(ids))
            if text or sample.ids:
                self._push(number, text)
        self.version = max((s.version for m in made for s in m.segments), default=self.version)

    def end(self, error: Refused | None = None) -> None:
        self.ended_at, self.error = time.monotonic(), error
        self._wake()
        self._pack()

    def message(self, number: int) -> dict[str, Any]:
        """As the client got it."""
        spoken = self.samples[number].spoken
        message: dict[str, Any] = {"role": "assistant", "content": spoken.shown}
        if spoken.calls:
            message["content"] = spoken.shown or None
            message["tool_calls"] = [
                {
                    "id": f"call_{self.id.removeprefix('chatcmpl-')}-{number}-{k}",
                    "type": "function",
                    "function": {
                        "name": call["name"],
                        "arguments": json.dumps(call["arguments"], ensure_ascii=False),
                    },
                }
                for k, call in enumerate(spoken.calls)
            ]
        return message

    def finish_reason(self, number: int) -> str:
        reason = self.made[number].finish_reason
        return "tool_calls" if self.samples[number].spoken.calls and reason == "stop" else reason

    @property
    def has_ended(self) -> bool:
        return self.ended_at is not None

    @property
    def num_generated(self) -> int:
        return sum(sample.num_ids for sample in self.samples)

    def _unstopped(self, ids: Sequence[int]) -> Sequence[int]:
        return ids[:-1] if ids and ids[-1] in self.asked.sampling.stop_ids else ids

    def _push(self, number: int, text: str) -> None:
        sample = self.samples[number]
        self._deltas.append(Delta(number, text, tuple(sample.ids), tuple(sample.logprobs)))
        sample.ids.clear()
        sample.logprobs.clear()
        self._wake()

    def _pack(self) -> None:
        """What is only kept for a client that asks again needs neither the question nor pieces."""
        if not self.has_ended or self._followers:
            return
        self.asked = replace(self.asked, said=[], conversation=Transcript(()))
        if self.made:
            self._deltas = [
                Delta(number, sample.spoken.shown, made.token_ids, made.logprobs)
                for number, (sample, made) in enumerate(zip(self.samples, self.made, strict=True))
            ]

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    # -------------------------------------------------------------------- who follows
    async def begun(self) -> None:
        """Something can be shown, or it has ended. Refused when it failed before that."""
        while not self._deltas and not self.has_ended:
            await self._news.wait()
        if not self._deltas and self.error is not None:
            raise self.error

    async def deltas(self) -> AsyncIterator[Delta]:
        """All of them from the first on, as they come; ends when the answer is recorded. Refused
        when it failed."""
        at = 0
        while True:
            while at < len(self._deltas):
                yield self._deltas[at]
                at += 1
            if self.has_ended:
                break
            await self._news.wait()
        if self.error is not None:
            raise self.error

    async def ended(self) -> None:
        """Refused when it failed."""
        while not self.has_ended:
            await self._news.wait()
        if self.error is not None:
            raise self.error

    @contextmanager
    def followed(self, is_gone: Callable[[], bool]) -> Iterator[None]:
        """By a connection, inside."""
        self._followers.append(is_gone)
        try:
            yield
        finally:
            self._followers.remove(is_gone)
            self._pack()

    @property
    def is_followed(self) -> bool:
        """Whether a connection is open on which it is to be delivered."""
        return any(not is_gone() for is_gone in self._followers)
