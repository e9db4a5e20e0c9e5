"""Requests that wait for a place at an engine, in order of arrival."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass, field

from connectors.engines.choice import able, best
from connectors.engines.members import Member, Members
from connectors.engines.types import GenerateRequest, VersionGone
from connectors.records import Version

MAX_SESSIONS = 4096
DOUBT_S = 10.0  # for so long an engine that failed a request is the second choice
BACKOFF_S = (0.05, 1.0)  # the first and the longest pause after a failure


@dataclass(slots=True, eq=False)
class Ticket:
    """A request on its way. `member`: where it is, or None while it waits; `placed` is done as soon
    as it waits no more. `until` is loop time."""

    number: int
    request: GenerateRequest
    until: float | None
    placed: asyncio.Future[None] = field(init=False)
    member: Member | None = None
    tried: set[str] = field(default_factory=set)
    num_failures: int = 0
    pause_s: float = 0.0
    resting: bool = False
    cancelled: bool = False


class Waiting:
    """Sends each ticket to the engine `choice` takes, the oldest first. One that no engine can
    start lets the others pass; one that waits for room keeps the room that comes."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._tickets: list[Ticket] = []
        self._homes: OrderedDict[str, str] = OrderedDict()  # session -> URL
        self._newest: Version | None = None  # min_version met

    def __len__(self) -> int:
        return len(self._tickets)

    async def place(self, ticket: Ticket) -> Member | None:
        """Where the ticket is to go; None when it has been cancelled, or its time is up."""
        if ticket.cancelled:
            return None
        least = ticket.request.min_version
        if least is not None and (self._newest is None or least > self._newest):
            # Engines take a new version just before work asks for it: all of them, not only the
            # one that was looked at first.
            self._newest = least
            self._members.doubt(least)
        loop = asyncio.get_running_loop()
        ticket.placed = loop.create_future()
        if ticket.pause_s:
            ticket.resting = True
            loop.call_later(ticket.pause_s, self._rested, ticket)
        insort(self._tickets, ticket, key=lambda t: t.number)
        self.serve()
        try:
            async with asyncio.timeout_at(ticket.until):
                await ticket.placed
        except TimeoutError:
            return None
        finally:
            self._withdraw(ticket)
        return ticket.member

    def serve(self) -> None:
        if not self._tickets or self._members.outdated:
            return
        engines = self._members.up
        now = asyncio.get_running_loop().time()
        for ticket in list(self._tickets):
            if not any(e.has_room(1) for e in engines):
                return
            if ticket.resting or ticket.placed.done():
                continue
            request = ticket.request
            if self._is_gone(request.max_version):
                ticket.placed.set_exception(VersionGone(f"{request.max_version} is held no more"))
                continue
            wanted = able(request, ticket.tried, engines)
            home = self._homes.get(request.session)
            member = best(wanted, home, request.num_samples, now)
            if member is None:
                engines = [e for e in engines if e not in wanted]
            else:
                self._send(ticket, member)
                if request.session:
                    stays = home in {e.url for e in wanted}
                    self._remember(request.session, home if stays and home else member.url)

    def held_up(self, ticket: Ticket) -> bool:
        """Whether it waits for an outage to end: of the engine it is at, or, at none, of every
        engine that could start it."""
        request, member = ticket.request, ticket.member
        if member is not None:
            return not (member.up and member.can_start(request.min_version))
        return ticket.resting or not able(request, ticket.tried, self._members.up)

    def leave(self, ticket: Ticket) -> None:
        """It is no more where it was sent to, if it was."""
        member, ticket.member = ticket.member, None
        if member is not None:
            member.num_sent -= ticket.request.num_samples
            self.serve()

    def failed_at(self, ticket: Ticket, member: Member) -> None:
        """It is to be placed again: elsewhere if possible, after a pause."""
        ticket.tried.add(member.url)
        member.doubted = asyncio.get_running_loop().time() + DOUBT_S
        first_s, longest_s = BACKOFF_S
        ticket.pause_s = min(2 * ticket.pause_s or first_s, longest_s)

    def cancel(self, ticket: Ticket) -> None:
        ticket.cancelled = True
        if not ticket.placed.done():
            ticket.placed.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Nobody looks after the engines any more: whoever waits gets `error`."""
        for ticket in self._tickets:
            if not ticket.placed.done():
                ticket.placed.set_exception(error)

    def _is_gone(self, most: Version | None) -> bool:
        """Whether every engine there is went past `most`."""
        return bool(self._members.up) and all(e.is_past(most) for e in self._members.up)

    def _send(self, ticket: Ticket, member: Member) -> None:
        self._withdraw(ticket)
        ticket.member = member
        member.num_sent += ticket.request.num_samples
        ticket.placed.set_result(None)

    def _remember(self, session: str, home: str) -> None:
        self._homes[session] = home
        self._homes.move_to_end(session)
        if len(self._homes) > MAX_SESSIONS:
            self._homes.popitem(last=False)

    def _withdraw(self, ticket: Ticket) -> None:
        if ticket in self._tickets:
            self._tickets.remove(ticket)

    def _rested(self, ticket: Ticket) -> None:
        ticket.resting = False
        self.serve()
