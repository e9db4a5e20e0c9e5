"""The engines of a pool: which there are, and how each stands.

    discover ──▶ named ──(a look succeeds)──▶ up ──(a look fails, a connection broke)──▶ down ─┐
                   ▲                           ▲──────────────(a look succeeds)────────────────┘
                   └── named no more: leaving, until its last call has ended

One task asks, while calls are under way, who is there and how each is, every LOOK_S and at once
when what is known became doubtful. Whatever changes, `news` is called.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from connectors.engines.capacity import most_running, next_limit
from connectors.engines.choice import Standing
from connectors.engines.client import HttpEngine, Sessions
from connectors.engines.types import EngineError, EngineState, EngineUnavailable
from connectors.records import Version

log = logging.getLogger(__name__)

LOOK_S = 0.5
UNREACHED_S = 30.0  # an engine that did not answer once for so long is told of, once
SILENT_S = 45.0  # not told its state for so long: what is under way there is given up

T = TypeVar("T")


@dataclass(slots=True, kw_only=True, eq=False)
class Member(Standing):
    """An engine, and the calls under way there."""

    engine: HttpEngine
    state: EngineState | None = None  # at the last look that succeeded
    doubts: int = 1
    settled: int = 0  # of the doubts
    silent_since: float | None = None  # began the first of the failed looks in a row
    told: bool = False  # that it was never reached
    looking: asyncio.Task[None] | None = None
    calls: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def outdated(self) -> bool:
        """Whether no look has ended that began after the last doubt."""
        return self.settled < self.doubts

    async def ask(self, call: Coroutine[Any, Any, T]) -> T:
        """The call's result; EngineUnavailable as soon as the engine is given up (a stopped process
        keeps its connections open)."""
        try:
            async with asyncio.timeout(None) as scope:
                self.calls.add(scope)
                return await call
        except TimeoutError as error:
            raise EngineUnavailable(f"{self.url}: does not answer any more") from error
        finally:
            self.calls.discard(scope)

    def saw(self, state: EngineState) -> None:
        first = self.state is None
        self.limit = most_running(state) if first else next_limit(self.limit, self.num_sent, state)
        self.state, self.version = state, state.version
        self.num_others = max(0, state.num_running + state.num_queued - self.num_sent)
        self.up, self.silent_since = True, None

    def give_up(self) -> None:
        """Ends the calls under way."""
        now = asyncio.get_running_loop().time()
        while self.calls:
            self.calls.pop().reschedule(now)


class Members:
    """For one asyncio loop. `news` is called after whatever may let a request start; `failed` when
    watching broke off: `discover` raised, or a fault of ours."""

    def __init__(
        self,
        discover: Callable[[], Sequence[str]],
        news: Callable[[], None],
        failed: Callable[[BaseException], None],
        *,
        silent_s: float,
        state_s: float,
    ) -> None:
        self._discover, self._news, self._failed = discover, news, failed
        self._silent_s, self._state_s = silent_s, state_s
        self._sessions = Sessions()
        self._all: dict[str, Member] = {}
        self._num_calls = 0
        self._task: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._looked = asyncio.Event()

    @property
    def up(self) -> list[Member]:
        return [m for m in self._all.values() if m.up]

    @property
    def all(self) -> list[Member]:
        return list(self._all.values())

    @property
    def outdated(self) -> bool:
        """Whether to wait for a look before anything is sent: else the first engine to be looked at
        would get all there is."""
        return any(m.outdated for m in self._all.values())

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """The engines are watched inside."""
        if self._task is None or self._task.done():
            self.doubt(None)
            self._name()
            self._task = self._begin(self._watch())
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1

    def doubt(self, least: Version | None) -> None:
        """What is known of the engines that are up (and held less than `least`) may be outdated."""
        for member in self.up:
            if least is None or not member.can_start(least):
                member.doubts += 1
                self._hurry.set()

    def broke(self, member: Member) -> None:
        """Its connection did: it gets nothing until it is looked at again."""
        member.up = False
        self._hurry.set()

    async def settled(self) -> list[Member]:
        """Those that are up, once nothing is outdated. Inside `calling`."""
        while self.outdated:
            self._looked.clear()
            await self._looked.wait()
        return self.up

    async def close(self) -> None:
        tasks = [t for t in (self._task, *(m.looking for m in self.all)) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._sessions.close()

    # ------------------------------------------------------------------------ the watching task
    async def _watch(self) -> None:
        while self._num_calls:
            self._name()
            self._hurry.clear()
            for member in self.all:
                if member.looking is None or member.looking.done():
                    member.looking = self._begin(self._look(member))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._hurry.wait()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._failed(error)

        task = asyncio.create_task(work)
        task.add_done_callback(ended)
        return task

    def _name(self) -> None:
        """Takes in those named now; lets go of those named no more once nothing is under way."""
        urls = [url.rstrip("/") for url in self._discover()]
        for url in urls:
            if url not in self._all:
                engine = HttpEngine(url, state_s=self._state_s, sessions=self._sessions)
                self._all[url] = Member(url=url, engine=engine)
        for url, member in list(self._all.items()):
            member.leaving = url not in urls
            if member.leaving and not (member.num_sent or member.calls):
                del self._all[url]
                if member.looking is not None:
                    member.looking.cancel()

    async def _look(self, member: Member) -> None:
        loop = asyncio.get_running_loop()
        began, doubts = loop.time(), member.doubts
        try:
            _, state = await asyncio.gather(member.engine.check_health(), member.engine.state())
            member.saw(state)
        except EngineError as error:
            member.up = False
            member.silent_since = member.silent_since or began
            silent_s = loop.time() - member.silent_since
            if silent_s >= self._silent_s:
                member.give_up()
            if member.state is None and silent_s >= UNREACHED_S and not member.told:
                member.told = True
                log.warning("no engine was reached for %g s: %s", UNREACHED_S, error)
        member.settled = doubts
        if member.outdated:
            self._hurry.set()
        self._looked.set()
        self._news()
