"""Engines written by hand that misbehave on purpose, over real HTTP on the loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from connectors.engines.pool import EnginePool
from connectors.engines.types import Completion, EngineState, GenerateRequest, Sampling
from connectors.records import Segment, Version

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
FIRST = Version(0, 1)


def completion(token_id: int, version: Version = FIRST) -> Completion:
    return Completion(
        token_ids=(token_id,),
        logprobs=(-0.5,),
        segments=(Segment(0, 1, version.incarnation, version.number),),
        finish_reason="length",
    )


def reply(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status)


def always(kind: str, status: int) -> Answer:
    async def answer(_: web.Request) -> web.Response:
        return reply({"error": f"this is {kind}", "kind": kind}, status)

    return answer


def says(value: object) -> Answer:
    async def answer(_: web.Request) -> web.Response:
        return reply(value)

    return answer


class ScriptedEngine:
    """Answers /generate and /stream with `script`, the last entry for ever, after `hold` is open;
    completions carry `token_id`. `num_running` and `num_queued` are what it says beside what it was
    sent."""

    def __init__(self, *script: Answer, token_id: int = 7, version: int | None = 1) -> None:
        self.script = list(script) or [self.works]
        self.token_id = token_id
        self.version = None if version is None else Version(0, version)
        self.num_running = self.num_queued = 0
        self.max_running: int | None = None
        self.kv_use = 0.0
        self.ill = False
        self.requests: list[GenerateRequest] = []
        self.in_flight: list[str] = []
        self.most_in_flight = 0
        self.num_states = 0
        self.finished: dict[str, tuple[Completion, ...]] = {}
        self.cancelled: list[str] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.silent = asyncio.Event()
        self.url = ""

    @property
    def asked(self) -> list[str]:
        return [r.request_id for r in self.requests]

    async def generate(self, http: web.Request) -> web.StreamResponse:
        request = msgspec.json.decode(await http.read(), type=GenerateRequest)
        self.requests.append(request)
        self.in_flight.append(request.request_id)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        try:
            await self.hold.wait()
            return await step(http)
        finally:
            self.in_flight.remove(request.request_id)

    async def works(self, http: web.Request) -> web.Response:
        request = msgspec.json.decode(await http.read(), type=GenerateRequest)
        assert self.version is not None
        return reply([completion(self.token_id, self.version)] * request.num_samples)

    async def never(self, _: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def finishes_but_the_line_breaks(self, http: web.Request) -> web.Response:
        request = msgspec.json.decode(await http.read(), type=GenerateRequest)
        self.finished[request.request_id] = (completion(self.token_id),)
        return await self.hangs_up(http)

    async def hangs_up(self, http: web.Request) -> web.Response:
        assert http.transport is not None
        http.transport.abort()
        return web.Response()

    async def attach(self, http: web.Request) -> web.Response:
        body = msgspec.json.decode(await http.read())
        return reply(self.finished.get(body["request_id"]))

    async def cancel(self, http: web.Request) -> web.Response:
        body = msgspec.json.decode(await http.read())
        self.cancelled.append(body["request_id"])
        return reply(self.finished.get(body["request_id"], [completion(self.token_id)]))

    async def state(self, _: web.Request) -> web.Response:
        self.num_states += 1
        if self.silent.is_set():
            await asyncio.Event().wait()
        return reply(
            EngineState(
                version=self.version,
                digest="d",
                epoch=0,
                num_running=self.num_running + len(self.in_flight),
                num_queued=self.num_queued,
                kv_use=self.kv_use,
                info={} if self.max_running is None else {"max_running": self.max_running},
            )
        )

    async def health(self, _: web.Request) -> web.Response:
        if self.ill:
            return reply({"error": "the decode thread ended", "kind": "unavailable"}, 503)
        return reply({"status": "ok"})


@asynccontextmanager
async def serving(*engines: ScriptedEngine) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for engine in engines:
            app = web.Application()
            app.add_routes(
                [
                    web.post("/generate", engine.generate),
                    web.post("/stream", engine.generate),
                    web.post("/attach", engine.attach),
                    web.post("/cancel", engine.cancel),
                    web.get("/state", engine.state),
                    web.get("/health", engine.health),
                ]
            )
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield


@asynccontextmanager
async def pool_of(*engines: ScriptedEngine, **settings: Any) -> AsyncIterator[EnginePool]:
    """Those that serve (or served) are named."""
    pool = EnginePool(lambda: [e.url for e in engines if e.url], **settings)
    try:
        yield pool
    finally:
        await pool.close()


def request(name: str = "r", **changes: Any) -> GenerateRequest:
    """Of one id a sample."""
    asked = {"sampling": Sampling(max_tokens=1)} | changes
    return GenerateRequest(request_id=name, token_ids=(1, 2), **asked)


async def until(condition: Callable[[], bool], what: str = "it happens") -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)
    assert condition(), what


def run(main: Awaitable[None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(main, 60)

    asyncio.run(limited())
