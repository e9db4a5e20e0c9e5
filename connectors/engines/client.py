"""Engines over HTTP: `HttpEngine` talks to one, `EnginePool` makes several, which come and go, look
like one that is always there.

The pool tells an outage from a verdict. No engine reachable, a connection that breaks, an engine
that is stopping: it waits, asks for the work already done, sends the request again. An answered
failure counts: the third one is an EngineError. A refusal is raised at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec

from connectors.engines.types import (
    Completion,
    EngineError,
    EngineState,
    EngineUnavailable,
    GenerateRequest,
    RequestRefused,
)
from connectors.engines.wire import ErrorBody, RequestId
from connectors.records import Version

CONNECT_S = 5.0
STATE_S = 2.0  # an engine that takes longer to say how it is counts as unreachable
MAX_FAILURES = 3
STATE_AGE_S = 1.0
BACKOFF_S = (0.05, 1.0)  # the first and the longest wait between two tries
PROBE_S = 15.0  # while a request runs: how often its engine is asked whether it lives
NUM_PROBES = 3

T = TypeVar("T")
Completions = tuple[Completion, ...]


class _Sessions:
    """The HTTP session of one asyncio loop, opened at its first use."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Every running request holds a connection; the engine queues, not the connector.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


class HttpEngine:
    """One engine, for the users of one asyncio loop. Engines may share `sessions`."""

    def __init__(
        self, url: str, *, state_s: float = STATE_S, sessions: _Sessions | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._state_s = state_s
        self._sessions = sessions or _Sessions()

    async def generate(self, request: GenerateRequest) -> Completions:
        done: Completions = await self._post("/generate", request, Completions)
        return done

    async def attach(self, request_id: str) -> Completions | None:
        body = RequestId(request_id=request_id)
        known: Completions | None = await self._post("/attach", body, Completions | None)
        return known

    async def cancel(self, request_id: str) -> Completions:
        body = RequestId(request_id=request_id)
        partials: Completions = await self._post("/cancel", body, Completions)
        return partials

    async def state(self) -> EngineState:
        timeout = aiohttp.ClientTimeout(total=self._state_s)
        state: EngineState = await self._call("GET", "/state", None, EngineState, timeout)
        return state

    async def close(self) -> None:
        await self._sessions.close()

    async def _post(self, path: str, body: msgspec.Struct, kind: Any) -> Any:
        # Without an end: generation takes as long as it takes, and the caller has its own time cap.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        return await self._call("POST", path, msgspec.json.encode(body), kind, timeout)

    async def _call(
        self,
        method: str,
        path: str,
        body: bytes | None,
        kind: Any,
        timeout: aiohttp.ClientTimeout,
    ) -> Any:
        try:
            async with self._sessions.open().request(
                method, self.url + path, data=body, timeout=timeout
            ) as answer:
                data = await answer.read()
                status = answer.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            message = str(error) or type(error).__name__
            raise EngineUnavailable(f"{self.url}: {message}") from error
        if status != 200:
            raise _failure(self.url, status, data)
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.MsgspecError as error:
            raise EngineError(f"{self.url}{path}: the answer makes no sense: {error}") from error


def _failure(url: str, status: int, data: bytes) -> EngineError:
    try:
        body = msgspec.json.decode(data, type=ErrorBody)
    except msgspec.MsgspecError:
        body = ErrorBody(error=f"HTTP {status}")
    message = f"{url}: {body.error}"
    if body.kind == "refused":
        return RequestRefused(message)
    if status == 503:
        return EngineUnavailable(message)
    return EngineError(message)


@dataclass(slots=True)
class _Member:
    """An engine of the pool as last seen. `state` None: not reachable then."""

    engine: HttpEngine
    state: EngineState | None = None
    seen_at: float = float("-inf")
    num_sent: int = 0  # samples this pool has there now

    def load(self, least: Version | None) -> tuple[bool, int]:
        """Orders the reachable ones: those that can start at once, then the least loaded."""
        version = None if self.state is None else self.state.version
        can_start = version is not None and (least is None or version >= least)
        others = 0 if self.state is None else self.state.num_running + self.state.num_queued
        return (not can_start, max(self.num_sent, others))


class EnginePool:
    """The engines `discover` names now (base URLs), as one, for the users of one asyncio loop."""

    def __init__(
        self,
        discover: Callable[[], Sequence[str]],
        *,
        probe_s: float = PROBE_S,
        state_s: float = STATE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._discover = discover
        self._probe_s = probe_s
        self._state_s = state_s
        self._clock = clock
        self._sessions = _Sessions()
        self._members: dict[str, _Member] = {}
        self._sent_to: dict[str, str] = {}

    async def generate(self, request: GenerateRequest) -> Completions:
        failures, wait_s = 0, BACKOFF_S[0]
        while True:
            member = await self._least_loaded(request.min_version)
            try:
                async with self._sent(member, request):
                    return await self._watched(member, member.engine.generate(request))
            except RequestRefused:
                raise
            except EngineUnavailable:
                member.state, member.seen_at = None, float("-inf")  # look again before the next
                done = await self._after_loss(member, request)
                if done is not None:
                    return done
            except EngineError:
                failures += 1
                if failures == MAX_FAILURES:
                    raise
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, BACKOFF_S[1])

    async def attach(self, request_id: str) -> Completions | None:
        """From whichever reachable engine knows the request; None when none does."""
        members = await self._reachable()
        asked = [
            asyncio.create_task(self._watched(m, m.engine.attach(request_id))) for m in members
        ]
        try:
            for answer in asyncio.as_completed(asked):
                with contextlib.suppress(EngineError):
                    completions = await answer
                    if completions is not None:
                        return completions
            return None
        finally:
            await _end(asked)

    async def cancel(self, request_id: str) -> Completions:
        """At the engine that has it, or, when this pool did not send it, at all of them."""
        sent_to = self._members.get(self._sent_to.get(request_id, ""))
        members = [sent_to] if sent_to is not None else await self._reachable()
        answers = await asyncio.gather(
            *(m.engine.cancel(request_id) for m in members), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                if not isinstance(answer, EngineError):
                    raise answer
            elif answer:
                return answer
        return ()

    async def state(self) -> EngineState:
        """All reachable engines together: sums; the fullest cache; the oldest version, None as soon
        as one engine holds none. EngineUnavailable when none is reachable."""
        states = [m.state for m in await self._reachable(max_age_s=0.0) if m.state is not None]
        if not states:
            raise EngineUnavailable("no engine is reachable")
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
            info={"num_engines": len(states)},
        )

    async def close(self) -> None:
        await self._sessions.close()

    async def _least_loaded(self, least: Version | None) -> _Member:
        """Waits until an engine is reachable."""
        wait_s = BACKOFF_S[0]
        while True:
            members = await self._reachable()
            if members:
                return min(members, key=lambda m: m.load(least))
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, BACKOFF_S[1])

    async def _reachable(self, max_age_s: float = STATE_AGE_S) -> list[_Member]:
        urls = list(dict.fromkeys(url.rstrip("/") for url in self._discover()))
        # A restarted engine has another URL: those that are named no more are forgotten.
        self._members = {url: self._members.get(url) or self._new_member(url) for url in urls}
        members = list(self._members.values())
        now = self._clock()
        await asyncio.gather(*(self._look(m) for m in members if now - m.seen_at >= max_age_s))
        return [m for m in members if m.state is not None]

    def _new_member(self, url: str) -> _Member:
        return _Member(HttpEngine(url, state_s=self._state_s, sessions=self._sessions))

    async def _look(self, member: _Member) -> None:
        member.seen_at = self._clock()
        try:
            member.state = await member.engine.state()
        except EngineError:
            member.state = None

    async def _after_loss(self, member: _Member, request: GenerateRequest) -> Completions | None:
        """What the engine still holds of a request whose connection broke."""
        with contextlib.suppress(EngineError):
            await member.engine.state()
            return await self._watched(member, member.engine.attach(request.request_id))
        return None

    @contextlib.asynccontextmanager
    async def _sent(self, member: _Member, request: GenerateRequest) -> AsyncIterator[None]:
        member.num_sent += request.num_samples
        self._sent_to[request.request_id] = member.engine.url
        try:
            yield
        finally:
            member.num_sent -= request.num_samples
            if self._sent_to.get(request.request_id) == member.engine.url:
                del self._sent_to[request.request_id]

    async def _watched(self, member: _Member, call: Coroutine[Any, Any, T]) -> T:
        """The call's result; EngineUnavailable when its engine stops answering meanwhile (a stopped
        process keeps its connections open)."""
        task = asyncio.ensure_future(call)
        missed = 0
        try:
            while not (await asyncio.wait([task], timeout=self._probe_s))[0]:
                await self._look(member)
                missed = 0 if member.state is not None else missed + 1
                if missed == NUM_PROBES:
                    raise EngineUnavailable(f"{member.engine.url}: does not answer any more")
            return task.result()
        finally:
            await _end([task])


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancels what still runs and collects what nobody waits for."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
