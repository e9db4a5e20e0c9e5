"""One request on its way through the pool: outages, failures, cancellation, time."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from connectors.engines import members
from connectors.engines.pool import NOTHING, EnginePool
from connectors.engines.types import EngineError, EngineUnavailable, RequestRefused
from connectors.records import Version
from tests.connectors.scripted_engine import (
    ScriptedEngine,
    always,
    completion,
    pool_of,
    request,
    run,
    says,
    serving,
    until,
)


# ------------------------------------------------------------------------------ failures, outages
def test_a_refusal_is_raised_at_once() -> None:
    async def main() -> None:
        engine = ScriptedEngine(always("refused", 400))
        async with serving(engine), pool_of(engine) as pool:
            with pytest.raises(RequestRefused, match="this is refused"):
                await pool.generate(request())
            assert len(engine.asked) == 1

    run(main())


def test_the_third_answer_of_a_version_the_engine_does_not_hold_is_an_error() -> None:
    async def main() -> None:
        engine = ScriptedEngine(says([completion(7, Version(0, 1001))]))
        async with serving(engine), pool_of(engine) as pool:
            with pytest.raises(EngineError, match=r"the engine holds 0\.1"):
                await pool.generate(request())
            assert len(engine.asked) == 3

    run(main())


def test_an_engine_that_was_never_reached_is_told_of_once_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(members, "UNREACHED_S", 0.02)
    monkeypatch.setattr(members, "LOOK_S", 0.01)

    async def main() -> None:
        async with serving(gone := ScriptedEngine()):
            pass
        async with pool_of(gone) as pool:
            assert await pool.generate(request(deadline_s=1.0)) == (NOTHING,)
        (told,) = [r for r in caplog.records if r.name == members.__name__]
        assert (told.levelname, gone.url in told.getMessage()) == ("WARNING", True)

    run(main())


def test_the_third_answered_failure_is_an_error() -> None:
    async def main() -> None:
        engine = ScriptedEngine(always("error", 500))
        async with serving(engine), pool_of(engine) as pool:
            with pytest.raises(EngineError, match="this is error"):
                await pool.generate(request())
            assert len(engine.asked) == 3

    run(main())


def test_an_engine_that_stops_or_breaks_the_line_is_no_failure_however_often() -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        stopping = always("unavailable", 503)
        engine.script = [stopping, engine.hangs_up, stopping, engine.hangs_up, engine.works]
        async with serving(engine), pool_of(engine) as pool:
            loop = asyncio.get_running_loop()
            began = loop.time()
            assert await pool.generate(request()) == (completion(7),)
            assert len(engine.asked) == 5
            assert loop.time() - began >= 0.05 + 0.1 + 0.2 + 0.4, "it pauses longer and longer"

    run(main())


def test_work_done_before_the_line_broke_is_fetched_and_not_done_again() -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        engine.script = [engine.finishes_but_the_line_breaks, engine.works]
        async with serving(engine), pool_of(engine) as pool:
            assert await pool.generate(request()) == (completion(7),)
            assert len(engine.asked) == 1

    run(main())


def test_work_done_before_the_line_broke_is_done_again_if_it_is_too_old() -> None:
    async def main() -> None:
        engine = ScriptedEngine(version=2)
        engine.script = [engine.finishes_but_the_line_breaks, engine.works]
        async with serving(engine), pool_of(engine) as pool:
            done = await pool.generate(request(min_version=Version(0, 2)))
            assert done == (completion(7, Version(0, 2)),)
            assert len(engine.asked) == 2

    run(main())


def test_after_a_failure_another_engine_is_asked() -> None:
    async def main() -> None:
        for fails in (always("error", 500), always("unavailable", 503), says([])):
            bad, good = ScriptedEngine(fails), ScriptedEngine(token_id=8)
            good.num_running = 5  # so that the other one is asked first
            async with serving(bad, good), pool_of(bad, good) as pool:
                assert await pool.generate(request()) == (completion(8),)
                assert (len(bad.asked), len(good.asked)) == (1, 1)

    run(main())


def test_an_engine_that_fails_at_once_does_not_draw_the_work_by_being_idle() -> None:
    async def main() -> None:
        bad, good = ScriptedEngine(always("error", 500)), ScriptedEngine(token_id=8)
        async with serving(bad, good), pool_of(bad, good) as pool:
            for i in range(20):
                assert await pool.generate(request(f"r{i}")) == (completion(8),)
            assert len(bad.asked) <= 1

    run(main())


def test_a_server_that_forgot_its_versions_is_not_believed() -> None:
    async def main() -> None:
        forgetful = ScriptedEngine(says([completion(7, Version(0, 0))]), version=3)
        good = ScriptedEngine(token_id=8, version=3)
        good.num_running = 5
        async with serving(forgetful, good), pool_of(forgetful, good) as pool:
            done = await pool.generate(request(min_version=Version(0, 3)))
            assert done == (completion(8, Version(0, 3)),)
            assert len(forgetful.asked) == 1

    run(main())


def test_an_engine_that_is_gone_is_passed_over() -> None:
    async def main() -> None:
        gone, there = ScriptedEngine(), ScriptedEngine(token_id=8)
        async with serving(gone):
            pass
        async with serving(there), pool_of(gone, there) as pool:
            assert await pool.generate(request()) == (completion(8),)

    run(main())


def test_a_stopped_engine_that_keeps_its_connections_open_is_given_up() -> None:
    async def main() -> None:
        stopped, there = ScriptedEngine(), ScriptedEngine(token_id=8)
        there.num_running = 5  # so that the other one is asked first

        async def stops(http: web.Request) -> web.Response:
            stopped.silent.set()
            return await stopped.never(http)

        stopped.script = [stops]
        async with (
            serving(stopped, there),
            pool_of(stopped, there, silent_s=0.3, state_s=0.2) as pool,
        ):
            assert await pool.generate(request()) == (completion(8),)
            assert len(stopped.asked) == 1

    run(main())


def test_what_fails_in_naming_the_engines_reaches_whoever_waits() -> None:
    async def main() -> None:
        broken = asyncio.Event()

        def discover() -> list[str]:
            if broken.is_set():
                raise OSError("the run's folder is gone")
            return []

        pool = EnginePool(discover)
        waiting = asyncio.create_task(pool.generate(request()))
        await asyncio.sleep(0)
        broken.set()
        with pytest.raises(OSError, match="folder is gone"):
            await waiting
        with pytest.raises(OSError, match="folder is gone"):
            await pool.generate(request())
        await pool.close()

    run(main())


# -------------------------------------------------------------------------- attach, cancel, state
def test_attach_asks_every_engine_and_none_may_know() -> None:
    async def main() -> None:
        engines = [ScriptedEngine(), ScriptedEngine()]
        engines[1].finished["known"] = (completion(9),)
        async with serving(*engines), pool_of(*engines) as pool:
            assert await pool.attach("known") == (completion(9),)
            assert await pool.attach("unknown") is None

    run(main())


def test_cancel_goes_to_the_engine_that_has_the_request() -> None:
    async def main() -> None:
        engines = [ScriptedEngine(token_id=i) for i in range(2)]
        engines[0].num_running = 4
        engines[1].hold.clear()
        async with serving(*engines), pool_of(*engines) as pool:
            running = asyncio.create_task(pool.generate(request()))
            await until(lambda: engines[1].asked == ["r"])
            assert await pool.cancel("r") == (completion(1),)
            assert [e.cancelled for e in engines] == [[], ["r"]]
            running.cancel()

    run(main())


def test_a_request_another_pool_sent_is_cancelled_wherever_it_is() -> None:
    async def main() -> None:
        engines = [ScriptedEngine(), ScriptedEngine()]
        engines[0].finished["r"] = ()
        async with serving(*engines), pool_of(*engines) as pool:
            assert await pool.cancel("r") == (completion(7),)
            assert [e.cancelled for e in engines] == [["r"], ["r"]]

    run(main())


def test_a_cancelled_request_that_waits_is_never_sent() -> None:
    async def main() -> None:
        engine = ScriptedEngine(version=None)
        async with serving(engine), pool_of(engine) as pool:
            waiting = asyncio.create_task(pool.generate(request(num_samples=2)))
            await until(lambda: engine.num_states > 0)
            assert await pool.cancel("r") == (NOTHING, NOTHING)
            assert await waiting == (NOTHING, NOTHING)
            assert NOTHING.finish_reason == "cancelled"
            engine.version = Version(0, 1)
            await pool.generate(request("after"))
            assert engine.asked == ["after"]

    run(main())


def test_a_request_cancelled_at_an_engine_that_dies_is_not_sent_again() -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        engine.script = [engine.hangs_up]
        engine.hold.clear()
        async with serving(engine), pool_of(engine) as pool:
            running = asyncio.create_task(pool.generate(request()))
            await until(lambda: len(engine.asked) == 1)
            await pool.cancel("r")
            engine.hold.set()
            assert await running == (NOTHING,)
            assert len(engine.asked) == 1

    run(main())


def test_a_deadline_holds_while_the_request_waits() -> None:
    async def main() -> None:
        engine = ScriptedEngine(version=None)
        async with serving(engine), pool_of(engine) as pool:
            assert await pool.generate(request(deadline_s=0.05)) == (NOTHING,)
            assert engine.asked == []

    run(main())


def test_an_engine_is_told_what_is_left_of_the_deadline() -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        engine.script = [always("error", 500), engine.works]
        async with serving(engine), pool_of(engine) as pool:
            await pool.generate(request(deadline_s=50.0))
            first, second = (r.deadline_s for r in engine.requests)
            assert first is not None
            assert second is not None
            assert 50.0 >= first > second > 0

    run(main())


def test_the_pools_state_sums_up_and_has_a_version_only_if_all_have() -> None:
    async def main() -> None:
        old, new = ScriptedEngine(version=1), ScriptedEngine(version=3)
        old.num_running, new.num_running, new.kv_use = 2, 5, 0.5
        old.max_running = 6
        async with serving(old, new), pool_of(old, new) as pool:
            state = await pool.state()
            assert (state.version, state.num_running, state.kv_use) == (Version(0, 1), 7, 0.5)
            assert state.info == {
                "num_engines": 2,
                "waiting": 0,
                "limits": {old.url: 6, new.url: 64},
            }
            old.version = None
            assert (await pool.state()).version is None
        async with pool_of() as nobody:
            with pytest.raises(EngineUnavailable):
                await nobody.state()

    run(main())


# ---------------------------------------------------------------------------------- what it costs
def test_many_requests_cost_no_more_looks_than_one() -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        async with serving(engine), pool_of(engine) as pool:
            loop = asyncio.get_running_loop()
            began = loop.time()
            for wave in range(10):
                await asyncio.gather(*(pool.generate(request(f"{wave}.{i}")) for i in range(30)))
            assert len(engine.asked) == 300
            assert engine.num_states <= 2 + (loop.time() - began) / members.LOOK_S

    run(main())


def test_a_pool_that_nobody_uses_asks_nobody() -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        async with serving(engine), pool_of(engine) as pool:
            await pool.generate(request())
            watching = pool._members._task
            assert watching is not None
            await until(watching.done)
            num_states = engine.num_states
            assert await pool.generate(request("later")) == (completion(7),)
            assert engine.num_states > num_states

    run(main())
