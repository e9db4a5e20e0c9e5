"""Several engines, which come and go, as one that is always there.

    generate ─▶ waiting ──(an engine has room and can start it)──▶ at an engine ─▶ answered
    stream        ▲  │                                               │  │
                  │  └──(cancelled, its deadline passed)─▶ ended     │  └─(refused, third failure)─▶
                  └──────(the line broke, the engine failed)─────────┘      raised

    waiting       for a look at the engines when what is known of them is outdated; for an engine to
                  come (up), to hold min_version, to have room; after a failure also for its pause.
                  Unblocked by: every look at an engine, every request that leaves one, the pause's
                  end. Oldest first; what nobody can start yet lets the others pass.
    at an engine  for the answer. Unblocked by: the answer, a broken line, giving up an engine that
                  has been silent. After a broken line the engine, if it is back, is first asked for
                  the work already done.

No engine reachable, a connection that breaks, an engine that is stopping are outages, however
often. An answered failure counts: the third one is an EngineError. A refusal is raised at once.
What a stream has told stays told: from there each sample goes on as a request of its own.
How a request gets there is in `sending` and `waiting`, how engines are watched in `members`, which
one is taken in `choice`, how much each gets in `capacity`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from connectors.engines.client import STATE_S, Completions, HttpEngine
from connectors.engines.continuing import Rests, continued, ended
from connectors.engines.members import SILENT_S, Member, Members
from connectors.engines.sending import BrokeOff, Sending, left_s, until
from connectors.engines.told import Told, part_from
from connectors.engines.types import (
    Completion,
    EngineError,
    EngineState,
    EngineUnavailable,
    GenerateRequest,
    Part,
)
from connectors.records import FinishReason, Version

NOTHING = Completion(token_ids=(), logprobs=(), segments=(), finish_reason="cancelled")


class EnginePool:
    """The engines `discover` names now (base URLs), as one, for the users of one asyncio loop."""

    def __init__(
        self,
        discover: Callable[[], Sequence[str]],
        *,
        silent_s: float = SILENT_S,
        state_s: float = STATE_S,
    ) -> None:
        self._members = Members(
            discover,
            lambda: self._waiting.serve(),
            lambda error: self._waiting.fail(error),
            silent_s=silent_s,
            state_s=state_s,
        )
        self._sending = Sending(self._members)
        self._waiting = self._sending.waiting
        self._rests: dict[str, Rests] = {}
        self._attaching: dict[str, dict[asyncio.Task[Completions | None], Member]] = {}

    # ------------------------------------------------------------------------------ the protocol
    async def generate(self, request: GenerateRequest) -> Completions:
        return await self._sending.send(request, HttpEngine.generate, _nothing_told(request))

    async def stream(self, request: GenerateRequest, told: Callable[[Part], None]) -> Completions:
        """Like `generate`, after `told` got each of the tokens, in parts as they come. Log-probs
        and versions are those of the engine that wrote the token."""
        so_far, end = _nothing_told(request), until(request)

        def tell(part: Part) -> None:
            so_far[part.sample].add(part)
            told(part)

        try:
            done = await self._sending.send(request, lambda e, asked: e.stream(asked, tell), so_far)
        except BrokeOff as broke:
            return await self._go_on(request, so_far, broke.state, left_s(end), told)
        for k, sample in enumerate(so_far):  # work that was done when the line broke
            if (part := part_from(len(sample), k, done[k])) is not None:
                told(part)
        return done

    async def attach(self, request_id: str) -> Completions | None:
        """From whichever reachable engine knows the request; None when none does."""
        with self._members.calling():
            asked = {
                asyncio.create_task(m.ask(m.engine.attach(request_id))): m
                for m in await self._members.settled()
            }
            self._attaching[request_id] = asked
            try:
                for answer in asyncio.as_completed(asked):
                    with contextlib.suppress(EngineError):
                        completions = await answer
                        if completions is not None:
                            return completions
                return None
            finally:
                del self._attaching[request_id]
                await _end(list(asked))

    async def cancel(self, request_id: str) -> Completions:
        """At the engine that has it, or, when this pool did not send it, at all of them."""
        if (rests := self._rests.get(request_id)) is not None:
            rests.cancelled = True
            await asyncio.gather(*map(self.cancel, rests.running))
            ends = map(asyncio.shield, rests.tasks)
            whole = await asyncio.gather(*ends, return_exceptions=True)
            return tuple(done for done in whole if isinstance(done, Completion))
        ticket = self._sending.tickets.get(request_id)
        has_it = None if ticket is None else ticket.member
        if ticket is not None:
            self._waiting.cancel(ticket)
            if has_it is None:
                return (NOTHING,) * ticket.request.num_samples
        with self._members.calling():
            members = [has_it] if has_it is not None else await self._members.settled()
            answers = await asyncio.gather(
                *(m.ask(m.engine.cancel(request_id)) for m in members), return_exceptions=True
            )
        for answer in answers:
            if isinstance(answer, BaseException):
                if not isinstance(answer, EngineError):
                    raise answer
            elif answer:
                return answer
        return ()

    def held_up(self, request_id: str) -> bool:
        """Whether it rests after a failure, no engine can start it, or the engine that has it (that
        may have it, if it attaches) is down or holds no version."""
        if (rests := self._rests.get(request_id)) is not None:
            return bool(rests.running) and all(map(self.held_up, rests.running))
        ticket = self._sending.tickets.get(request_id)
        if ticket is not None:
            return self._waiting.held_up(ticket)
        asked = self._attaching.get(request_id, {})
        may_have_it = [m for answer, m in asked.items() if not answer.done()]
        return bool(may_have_it) and not any(m.up and m.can_start(None) for m in may_have_it)

    async def state(self) -> EngineState:
        """All reachable engines together: sums; the fullest cache; the oldest version, None as soon
        as one engine holds none. `info` says how many there are, how many requests of this pool
        wait for one, and how many samples it may have in flight at each. EngineUnavailable when
        none is reachable."""
        members = await self._seen_now()
        if not members:
            raise EngineUnavailable("no engine is reachable")
        states = [m.state for m in members if m.state is not None]
        versions = [s.version for s in states if s.version is not None]
        whole = len(versions) == len(states)
        oldest = min(states, key=lambda s: s.version or Version(-1, -1))
        return EngineState(
            version=min(versions) if whole else None,
            digest=oldest.digest,
            epoch=max(s.epoch for s in states),
            num_running=sum(s.num_running for s in states),
            num_queued=sum(s.num_queued for s in states),
            kv_use=max(s.kv_use for s in states),
            num_tokens=sum(s.num_tokens for s in states),
            info={
                "num_engines": len(members),
                "waiting": len(self._waiting),
                "limits": {m.url: m.limit for m in members},
            },
        )

    async def versions(self) -> list[Version]:
        """That the reachable engines hold now, the oldest first."""
        members = await self._seen_now()
        return sorted({m.version for m in members if m.version is not None})

    async def close(self) -> None:
        await self._members.close()

    async def _seen_now(self) -> list[Member]:
        with self._members.calling():
            self._members.doubt(None)
            return await self._members.settled()

    async def _go_on(
        self,
        request: GenerateRequest,
        so_far: list[Told],
        state: EngineState | None,
        rest_s: float | None,
        told: Callable[[Part], None],
    ) -> Completions:
        """Ends a stream that broke off: each sample by itself, from what was told of it."""
        rests = self._rests[request.request_id] = Rests()
        try:
            for k, sample in enumerate(so_far):
                rest = continued(request, k, sample, rest_s)
                end = self._rest(rest, k, sample, ended(sample, request, state), rests, told)
                rests.tasks[asyncio.create_task(end)] = rest.request_id
            return tuple(await asyncio.gather(*rests.tasks))
        finally:
            del self._rests[request.request_id]
            await _end(list(rests.tasks))

    async def _rest(
        self,
        rest: GenerateRequest,
        k: int,
        sample: Told,
        reason: FinishReason | None,
        rests: Rests,
        told: Callable[[Part], None],
    ) -> Completion:
        if reason is not None or rests.cancelled:
            return sample.completion(reason or "cancelled")
        (tail,) = await self.stream(rest, lambda part: told(replace(part, sample=k)))
        sample.add(tail)
        return sample.completion(tail.finish_reason)


def _nothing_told(request: GenerateRequest) -> list[Told]:
    return [Told() for _ in range(request.num_samples)]


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancels what still runs and collects what nobody waits for."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
