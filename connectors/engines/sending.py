"""One request on its way through a pool: placed at an engine, asked there, placed again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec.structs import replace

from connectors.engines.client import Completions, HttpEngine
from connectors.engines.members import Member, Members
from connectors.engines.told import Told
from connectors.engines.types import (
    EngineError,
    EngineState,
    EngineUnavailable,
    GenerateRequest,
    RequestRefused,
    VersionGone,
)
from connectors.engines.waiting import Ticket, Waiting

MAX_FAILURES = 3

Ask = Callable[[HttpEngine, GenerateRequest], Coroutine[Any, Any, Completions]]


class BrokeOff(Exception):
    """An engine, in `state` when it was last seen, failed a stream after it told some of it."""

    def __init__(self, state: EngineState | None) -> None:
        super().__init__("a stream broke off")
        self.state = state


class Sending:
    """`tickets` are under way, by the request's id."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self.waiting = Waiting(members)
        self.tickets: dict[str, Ticket] = {}
        self._numbers = itertools.count()

    async def send(self, request: GenerateRequest, ask: Ask, so_far: list[Told]) -> Completions:
        """What `ask`, which may add to `so_far` (one for each sample), gets from an engine.
        BrokeOff if one failed after it added to it."""
        ticket = Ticket(next(self._numbers), request, until(request))
        with self._members.calling():
            self.tickets[request.request_id] = ticket
            try:
                while (member := await self.waiting.place(ticket)) is not None:
                    done = await self._answer(ticket, member, ask, so_far)
                    if done is not None:
                        return done
                    if any(so_far) and not ticket.cancelled:
                        raise BrokeOff(member.state)
                return tuple(sample.completion("cancelled") for sample in so_far)
            finally:
                self.waiting.leave(ticket)
                if self.tickets.get(request.request_id) is ticket:
                    del self.tickets[request.request_id]

    async def _answer(
        self, ticket: Ticket, member: Member, ask: Ask, so_far: list[Told]
    ) -> Completions | None:
        """The answer of the engine the ticket is at; None when it has to be placed again."""
        request = replace(ticket.request, deadline_s=left_s(ticket.until))
        try:
            return await member.ask(ask(member.engine, request))
        except EngineUnavailable:
            self._members.broke(member)
            if any(so_far):
                await self._let_go(member, request)
            elif (done := await self._work_done(member, request)) is not None:
                return done
        except EngineError as error:
            if isinstance(error, VersionGone):
                self._members.doubt(None)  # another engine may hold it
            elif isinstance(error, RequestRefused):
                raise
            ticket.num_failures += 1
            if any(so_far):
                await self._let_go(member, request)
            elif ticket.num_failures == MAX_FAILURES:
                raise
        finally:
            self.waiting.leave(ticket)
        self.waiting.failed_at(ticket, member)
        return None

    async def _work_done(self, member: Member, request: GenerateRequest) -> Completions | None:
        """What the engine still holds of a request whose connection broke."""
        with contextlib.suppress(EngineError):
            await member.engine.state()
            done = await member.ask(member.engine.attach(request.request_id))
            return None if done is None else await member.engine.checked(done, request)
        return None

    async def _let_go(self, member: Member, request: GenerateRequest) -> None:
        """Ends what the engine may still do for a stream that goes on elsewhere."""
        with contextlib.suppress(EngineError):
            await member.engine.state()
            await member.ask(member.engine.cancel(request.request_id))


def until(request: GenerateRequest) -> float | None:
    """When its time is up, in loop time."""
    now = asyncio.get_running_loop().time()
    return None if request.deadline_s is None else now + request.deadline_s


def left_s(end: float | None) -> float | None:
    """To `end`, which is loop time."""
    return None if end is None else max(0.0, end - asyncio.get_running_loop().time())
