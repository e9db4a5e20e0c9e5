"""The client and the pool, against engines written by hand that misbehave on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from connectors.engines.client import EnginePool, HttpEngine
from connectors.engines.types import (
    Completion,
    EngineError,
    EngineState,
    EngineUnavailable,
    GenerateRequest,
    RequestRefused,
)
from connectors.records import Segment, Version

Answer = Callable[[web.Request], Awaitable[web.Response]]


def completion(token_id: int) -> Completion:
    return Completion(
        token_ids=(token_id,),
        logprobs=(-0.5,),
        segments=(Segment(0, 1, 0, 1),),
        finish_reason="stop",
    )


def reply(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status)


def error(kind: str, status: int) -> web.Response:
    return reply({"error": f"this is {kind}", "kind": kind}, status)


class ScriptedEngine:
    """Answers /generate with `script`, the last entry for ever; completions carry `token_id`."""

    def __init__(self, *script: Answer, token_id: int = 7, version: int | None = 1) -> None:
        self.script = list(script)
        self.token_id, self.version = token_id, version
        self.num_generate = 0
        self.num_running = 0
        self.finished: dict[str, tuple[Completion, ...]] = {}
        self.cancelled: list[str] = []
        self.silent = asyncio.Event()
        self.url = ""

    async def generate(self, request: web.Request) -> web.Response:
        self.num_generate += 1
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return await step(request)

    async def works(self, _: web.Request) -> web.Response:
        return reply([completion(self.token_id)])

    async def finishes_but_the_line_breaks(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=GenerateRequest)
        self.finished[body.request_id] = (completion(self.token_id),)
        return await self.hangs_up(request)

    async def hangs_up(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def attach(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        return reply(self.finished.get(body["request_id"]))

    async def cancel(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        self.cancelled.append(body["request_id"])
        return reply([completion(self.token_id)])

    async def state(self, _: web.Request) -> web.Response:
        if self.silent.is_set():
            await asyncio.Event().wait()
        version = None if self.version is None else Version(0, self.version)
        return reply(
            EngineState(
                version=version,
                digest="d",
                epoch=0,
                num_running=self.num_running,
                num_queued=0,
                kv_use=self.num_running / 10,
            )
        )


def always(kind: str, status: int) -> Answer:
    async def answer(_: web.Request) -> web.Response:
        return error(kind, status)

    return answer


@asynccontextmanager
async def serving(engine: ScriptedEngine) -> AsyncIterator[ScriptedEngine]:
    if not engine.script:
        engine.script = [engine.works]
    app = web.Application()
    app.add_routes(
        [
            web.post("/generate", engine.generate),
            web.post("/attach", engine.attach),
            web.post("/cancel", engine.cancel),
            web.get("/state", engine.state),
        ]
    )
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()


@asynccontextmanager
async def pool_of(*engines: ScriptedEngine, **settings: Any) -> AsyncIterator[EnginePool]:
    pool = EnginePool(lambda: [e.url for e in engines if e.url], **settings)
    try:
        yield pool
    finally:
        await pool.close()


def request(name: str = "r", **changes: Any) -> GenerateRequest:
    return GenerateRequest(request_id=name, token_ids=(1, 2), **changes)


def test_a_refusal_is_raised_at_once() -> None:
    async def main() -> None:
        engine = ScriptedEngine(always("refused", 400))
        async with serving(engine), pool_of(engine) as pool:
            with pytest.raises(RequestRefused, match="this is refused"):
                await pool.generate(request())
            assert engine.num_generate == 1

    asyncio.run(main())


def test_the_third_answered_failure_is_an_error() -> None:
    async def main() -> None:
        engine = ScriptedEngine(always("error", 500))
        async with serving(engine), pool_of(engine) as pool:
            with pytest.raises(EngineError, match="this is error"):
                await pool.generate(request())
            assert engine.num_generate == 3

    asyncio.run(main())


def test_an_engine_that_stops_or_breaks_the_line_is_no_failure_however_often() -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        stopping = always("unavailable", 503)
        engine.script = [stopping, engine.hangs_up, stopping, engine.hangs_up, engine.works]
        async with serving(engine), pool_of(engine) as pool:
            assert await pool.generate(request()) == (completion(7),)
            assert engine.num_generate == 5

    asyncio.run(main())


def test_work_done_before_the_line_broke_is_fetched_and_not_done_again() -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        engine.script = [engine.finishes_but_the_line_breaks, engine.works]
        async with serving(engine), pool_of(engine) as pool:
            assert await pool.generate(request()) == (completion(7),)
            assert engine.num_generate == 1

    asyncio.run(main())


def test_without_an_engine_the_pool_waits_for_one_to_come() -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        async with pool_of(engine) as pool:
            waiting = asyncio.create_task(pool.generate(request()))
            await asyncio.sleep(0)
            assert not waiting.done()
            async with serving(engine):
                assert await waiting == (completion(7),)

    asyncio.run(main())


def test_an_engine_that_is_gone_is_passed_over() -> None:
    async def main() -> None:
        gone, there = ScriptedEngine(), ScriptedEngine(token_id=8)
        async with serving(gone):
            pass
        async with serving(there), pool_of(gone, there) as pool:
            assert await pool.generate(request()) == (completion(8),)

    asyncio.run(main())


def test_a_stopped_engine_that_keeps_its_connections_open_is_given_up() -> None:
    async def main() -> None:
        stopped, there = ScriptedEngine(), ScriptedEngine(token_id=8)
        there.num_running = 5  # so that the other one is asked first

        async def stops(_: web.Request) -> web.Response:
            stopped.silent.set()
            await asyncio.Event().wait()
            raise AssertionError

        stopped.script = [stops]
        async with (
            serving(stopped),
            serving(there),
            pool_of(stopped, there, probe_s=0.05, state_s=0.2) as pool,
        ):
            assert await pool.generate(request()) == (completion(8),)
            assert stopped.num_generate == 1

    asyncio.run(main())


def test_the_least_loaded_engine_that_may_start_at_once_is_asked() -> None:
    async def main() -> None:
        idle_but_old, busy, busier = (ScriptedEngine(token_id=i) for i in range(3))
        idle_but_old.version, busy.version, busier.version = 1, 2, 2
        busy.num_running, busier.num_running = 3, 6
        async with (
            serving(idle_but_old),
            serving(busy),
            serving(busier),
            pool_of(busier, idle_but_old, busy) as pool,
        ):
            assert await pool.generate(request("a")) == (completion(0),)
            newer = request("b", min_version=Version(0, 2))
            assert await pool.generate(newer) == (completion(1),)

    asyncio.run(main())


def test_what_this_pool_sent_counts_as_load() -> None:
    async def main() -> None:
        engines = [ScriptedEngine(token_id=i) for i in range(2)]
        release = asyncio.Event()
        for engine in engines:

            async def waits(_: web.Request, engine: ScriptedEngine = engine) -> web.Response:
                await release.wait()
                return reply([completion(engine.token_id)])

            engine.script = [waits]
        async with serving(engines[0]), serving(engines[1]), pool_of(*engines) as pool:
            sent = []
            for i in range(6):
                sent.append(asyncio.create_task(pool.generate(request(f"r{i}"))))
                while sum(e.num_generate for e in engines) <= i:
                    await asyncio.sleep(0.001)
            assert [e.num_generate for e in engines] == [3, 3]
            release.set()
            await asyncio.gather(*sent)

    asyncio.run(main())


def test_attach_asks_every_engine_and_none_may_know() -> None:
    async def main() -> None:
        engines = [ScriptedEngine(), ScriptedEngine()]
        engines[1].finished["known"] = (completion(9),)
        async with serving(engines[0]), serving(engines[1]), pool_of(*engines) as pool:
            assert await pool.attach("known") == (completion(9),)
            assert await pool.attach("unknown") is None

    asyncio.run(main())


def test_cancel_goes_to_the_engine_that_has_the_request() -> None:
    async def main() -> None:
        engines = [ScriptedEngine(token_id=i) for i in range(2)]
        engines[0].num_running = 4

        async def never(_: web.Request) -> web.Response:
            await asyncio.Event().wait()
            raise AssertionError

        engines[1].script = [never]
        async with serving(engines[0]), serving(engines[1]), pool_of(*engines) as pool:
            running = asyncio.create_task(pool.generate(request()))
            while engines[1].num_generate == 0:
                await asyncio.sleep(0.001)
            assert await pool.cancel("r") == (completion(1),)
            assert [e.cancelled for e in engines] == [[], ["r"]]
            running.cancel()

    asyncio.run(main())


def test_the_pools_state_sums_up_and_has_a_version_only_if_all_have() -> None:
    async def main() -> None:
        old, new = ScriptedEngine(version=1), ScriptedEngine(version=3)
        old.num_running, new.num_running = 2, 5
        async with serving(old), serving(new), pool_of(old, new) as pool:
            state = await pool.state()
            assert (state.version, state.num_running, state.kv_use) == (Version(0, 1), 7, 0.5)
            old.version = None
            assert (await pool.state()).version is None
        async with pool_of() as nobody:
            with pytest.raises(EngineUnavailable):
                await nobody.state()

    asyncio.run(main())


def test_an_answer_that_makes_no_sense_is_an_error() -> None:
    async def main() -> None:
        async def nonsense(_: web.Request) -> web.Response:
            return reply([{"token_ids": "x"}])

        async with serving(ScriptedEngine(nonsense)) as engine:
            client = HttpEngine(engine.url)
            with pytest.raises(EngineError, match="makes no sense"):
                await client.generate(request())
            await client.close()

    asyncio.run(main())


def test_an_engine_that_is_named_no_more_is_forgotten() -> None:
    async def main() -> None:
        async with serving(ScriptedEngine()) as engine:
            urls = [f"http://127.0.0.1:1/{restart}" for restart in range(5)]
            pool = EnginePool(lambda: [engine.url, *urls[:1]])
            while urls:
                await pool.generate(request(f"r{len(urls)}"))
                urls.pop(0)
            await pool.generate(request("last"))
            assert list(pool._members) == [engine.url]
            await pool.close()

    asyncio.run(main())
