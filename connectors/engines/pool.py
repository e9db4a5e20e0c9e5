"""Several engines, which come and go, as one that is always there.

    generate ─▶ waiting ──(an engine has room and can start it)──▶ at an engine ─▶ answered
                  ▲  │                                               │  │
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
How engines are watched is in `members`, which one is taken in `choice`, how much each gets in
`capacity`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from connectors.engines.client import STATE_S, Completions
from connectors.engines.members import SILENT_S, Member, Members
from connectors.engines.types import (
    Completion,
    EngineError,
    EngineState,
    EngineUnavailable,
    GenerateRequest,
    RequestRefused,
)
from connectors.engines.waiting import Ticket, Waiting
from connectors.records import Version

MAX_FAILURES = 3

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
        self._waiting = Waiting(self._members)
        self._numbers = itertools.count()
        self._tickets: dict[str, Ticket] = {}
        self._attaching: dict[str, dict[asyncio.Task[Completions | None], Member]] = {}

    # ------------------------------------------------------------------------------ the protocol
    async def generate(self, request: GenerateRequest) -> Completions:
        loop = asyncio.get_running_loop()
        until = None if request.deadline_s is None else loop.time() + request.deadline_s
        ticket = Ticket(next(self._numbers), request, until)
        with self._members.calling():
            self._tickets[request.request_id] = ticket
            try:
                while (member := await self._waiting.place(ticket)) is not None:
                    done = await self._answer(ticket, member)
                    if done is not None:
                        return done
                return (NOTHING,) * request.num_samples
            finally:
                self._waiting.leave(ticket)
                if self._tickets.get(request.request_id) is ticket:
                    del self._tickets[request.request_id]

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
        ticket = self._tickets.get(request_id)
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
        ticket = self._tickets.get(request_id)
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
        with self._members.calling():
            self._members.doubt(None)
            members = await self._members.settled()
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

    async def close(self) -> None:
        await self._members.close()

    async def _answer(self, ticket: Ticket, member: Member) -> Completions | None:
        """The answer of the engine the ticket is at; None when it has to be placed again."""
        request = ticket.request
        if ticket.until is not None:
            left_s = max(0.0, ticket.until - asyncio.get_running_loop().time())
            request = msgspec.structs.replace(request, deadline_s=left_s)
        try:
            return await member.ask(member.engine.generate(request))
        except RequestRefused:
            raise
        except EngineUnavailable:
            self._members.broke(member)
            done = await self._work_done(member, request)
            if done is not None:
                return done
        except EngineError:
            ticket.num_failures += 1
            if ticket.num_failures == MAX_FAILURES:
                raise
        finally:
            self._waiting.leave(ticket)
        self._waiting.failed_at(ticket, member)
        return None

    async def _work_done(self, member: Member, request: GenerateRequest) -> Completions | None:
        """What the engine still holds of a request whose connection broke."""
        with contextlib.suppress(EngineError):
            await member.engine.state()
            done = await member.ask(member.engine.attach(request.request_id))
            return None if done is None else await member.engine.checked(done, request)
        return None


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancels what still runs and collects what nobody waits for."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
