"""One engine request for a group whose trajectories all ask the same, once.

    session 0 ── generate ──┐                               ┌──▶ sample 0
    session 1 ── generate ──┼─▶ one request of n samples ───┼──▶ sample 1
    session n-1 ─ generate ─┘                               └──▶ sample n-1

The engine and the way there cost a request once instead of n times. The request begins with the
first session that asks, and each gets its sample when all are there, which a group waits for
anyway. Its id follows from the group's, so work that is resubmitted finds it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from connectors.engines.types import Completion, Engine, EngineState, GenerateRequest

Completions = tuple[Completion, ...]


@dataclass(slots=True)
class _Asked:
    """What several sessions wait for."""

    task: asyncio.Future[Completions | None] | None = None
    num_waiting: int = 0

    async def answer(self, ask: Callable[[], Awaitable[Completions | None]]) -> Completions | None:
        if self.task is None:
            self.task = asyncio.ensure_future(ask())
        self.num_waiting += 1
        try:
            return await asyncio.shield(self.task)
        finally:
            self.num_waiting -= 1
            if not self.num_waiting:  # the last one that leaves takes the call along
                self.task.cancel()


class OneRequest:
    """An `Engine` for the `num` sessions of a group that each ask once. `name` begins its
    request's id, instead of a session's own name; ids end in /NUMBER/DIGEST. A session that asks
    again, as an agent that is tried anew does, has a request of its own."""

    def __init__(self, engine: Engine, name: str, num: int) -> None:
        self._engine, self._name, self._num = engine, name, num
        self._generated, self._attached = _Asked(), _Asked()
        self._sample_of: dict[str, int] = {}
        self._is_cancelled = False

    async def generate(self, request: GenerateRequest) -> Completions:
        sample = self._sample(request.request_id)
        if sample is None:
            return await self._engine.generate(request)
        together = msgspec.structs.replace(
            request, request_id=self._together(request.request_id), num_samples=self._num
        )
        made = await self._generated.answer(lambda: self._engine.generate(together))
        assert made is not None
        return (made[sample],)

    async def attach(self, request_id: str) -> Completions | None:
        """Only a result that is whole: a sample that is not is generated with all others."""
        sample = self._sample(request_id)
        if sample is None:
            return await self._engine.attach(request_id)
        together = self._together(request_id)
        held = await self._attached.answer(lambda: self._engine.attach(together))
        if not held or any(c.finish_reason not in ("stop", "length") for c in held):
            return None
        return (held[sample],)

    async def cancel(self, request_id: str) -> Completions:
        """Of all of them, with the first."""
        if request_id not in self._sample_of:
            return await self._engine.cancel(request_id)
        if self._is_cancelled:
            return ()
        self._is_cancelled = True
        return await self._engine.cancel(self._together(request_id))

    def held_up(self, request_id: str) -> bool:
        if request_id in self._sample_of:
            request_id = self._together(request_id)
        return self._engine.held_up(request_id)

    async def state(self) -> EngineState:
        return await self._engine.state()

    def _sample(self, request_id: str) -> int | None:
        """Which one it gets: by order of asking. None for one that comes when all are given."""
        if request_id not in self._sample_of:
            if len(self._sample_of) == self._num:
                return None
            self._sample_of[request_id] = len(self._sample_of)
        return self._sample_of[request_id]

    def _together(self, request_id: str) -> str:
        _, number, digest = request_id.rsplit("/", 2)
        return f"{self._name}/{number}/{digest}"
