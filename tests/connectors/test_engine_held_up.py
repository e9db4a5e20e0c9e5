"""Which requests of a pool an outage keeps from going on."""

from __future__ import annotations

import asyncio

from aiohttp import web

from connectors.records import Version
from tests.connectors.scripted_engine import (
    ScriptedEngine,
    always,
    completion,
    pool_of,
    request,
    run,
    serving,
    until,
)


def test_a_request_is_held_up_while_no_engine_can_start_it_but_not_while_all_are_full() -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        engine.max_running = 1
        engine.hold.clear()
        async with serving(engine), pool_of(engine) as pool:
            first = asyncio.create_task(pool.generate(request("first")))
            await until(lambda: engine.asked == ["first"])
            full = asyncio.create_task(pool.generate(request("full")))
            newer = asyncio.create_task(pool.generate(request("newer", min_version=Version(0, 2))))
            await until(lambda: pool.held_up("newer"))
            assert not pool.held_up("first")
            assert not pool.held_up("full")
            engine.version = None
            await until(lambda: pool.held_up("first") and pool.held_up("full"))
            engine.version = Version(0, 2)
            await until(lambda: not any(map(pool.held_up, ("first", "full", "newer"))))
            engine.hold.set()
            await asyncio.gather(first, full, newer)
            assert not pool.held_up("first"), "it is not under way"

    run(main())


def test_a_request_at_an_engine_that_is_stopped_is_held_up_though_another_is_there() -> None:
    async def main() -> None:
        stopped, there = ScriptedEngine(), ScriptedEngine()
        there.num_running = 5  # so that the other one is asked first
        stopped.hold.clear()
        async with serving(stopped, there), pool_of(stopped, there, state_s=0.2) as pool:
            running = asyncio.create_task(pool.generate(request()))
            await until(lambda: stopped.asked == ["r"])
            assert not pool.held_up("r")
            stopped.silent.set()
            await until(lambda: pool.held_up("r"))
            running.cancel()

    run(main())


def test_a_request_is_held_up_while_it_rests_after_a_failure() -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        engine.script = [always("unavailable", 503)] * 4 + [engine.works]
        async with serving(engine), pool_of(engine) as pool:
            running = asyncio.create_task(pool.generate(request()))
            await until(lambda: len(engine.asked) == 4 and not engine.in_flight)
            seen = []
            while not running.done():  # 0.4 s, of which the engine is up for most
                seen.append(pool.held_up("r"))
                await asyncio.sleep(0.01)
            assert sum(seen) > len(seen) / 2

    run(main())


def test_what_attaches_is_held_up_while_the_engine_that_has_it_holds_no_version() -> None:
    async def main() -> None:
        attached = asyncio.Event()

        class Finishing(ScriptedEngine):
            async def attach(self, http: web.Request) -> web.Response:
                attached.set()
                await self.hold.wait()
                return await super().attach(http)

        has_it, other = Finishing(), ScriptedEngine()
        has_it.finished["r"] = (completion(9),)
        has_it.hold.clear()
        async with serving(has_it, other), pool_of(has_it, other) as pool:
            attaching = asyncio.create_task(pool.attach("r"))
            await attached.wait()
            assert not pool.held_up("r")
            has_it.version = None
            await until(lambda: pool.held_up("r"))
            has_it.version = Version(0, 1)
            await until(lambda: not pool.held_up("r"))
            has_it.hold.set()
            assert await attaching == (completion(9),)

    run(main())
