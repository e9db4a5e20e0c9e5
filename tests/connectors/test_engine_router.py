"""Many requests over several engines: who gets which, how many at a time, and who waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from connectors.engines import waiting
from connectors.engines.pool import EnginePool
from connectors.engines.types import GenerateRequest
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


def engine(max_running: int, *, busy: bool = True, **settings: Any) -> ScriptedEngine:
    """Decodes `max_running` together; `busy`: holds what it gets until told."""
    made = ScriptedEngine(**settings)
    made.max_running = max_running
    if busy:
        made.hold.clear()
    return made


@asynccontextmanager
async def sending(
    pool: EnginePool, *requests: GenerateRequest
) -> AsyncIterator[list[asyncio.Task[Any]]]:
    tasks = [asyncio.create_task(pool.generate(r)) for r in requests]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def named(count: int, prefix: str = "r", **changes: Any) -> list[GenerateRequest]:
    return [request(f"{prefix}{i}", **changes) for i in range(count)]


# ------------------------------------------------------------------------------ who gets the work
def test_the_least_loaded_engine_that_can_start_is_asked() -> None:
    async def main() -> None:
        idle_but_old, busy, busier = (ScriptedEngine(token_id=i, version=2) for i in range(3))
        idle_but_old.version = Version(0, 1)
        busy.num_running, busier.num_running = 3, 6
        engines = (busier, idle_but_old, busy)
        async with serving(*engines), pool_of(*engines) as pool:
            assert (await pool.generate(request("a")))[0].token_ids == (0,)
            newer = request("b", min_version=Version(0, 2))
            assert (await pool.generate(newer))[0].token_ids == (1,)

    run(main())


def test_what_this_pool_sent_counts_as_load() -> None:
    async def main() -> None:
        engines = [engine(8), engine(8)]
        async with serving(*engines), pool_of(*engines) as pool, sending(pool, *named(6)):
            await until(lambda: sum(len(e.asked) for e in engines) == 6)
            assert [len(e.asked) for e in engines] == [3, 3]

    run(main())


def test_a_larger_engine_gets_more() -> None:
    async def main() -> None:
        small, large = engine(4), engine(12)
        both = (small, large)
        async with serving(*both), pool_of(*both) as pool, sending(pool, *named(8)):
            await until(lambda: len(small.asked) + len(large.asked) == 8)
            assert (len(small.asked), len(large.asked)) == (2, 6)

    run(main())


def test_the_requests_of_a_session_go_to_one_engine() -> None:
    async def main() -> None:
        engines = [engine(64), engine(64)]
        async with serving(*engines), pool_of(*engines) as pool:
            groups = [named(4, f"{g}.", session=g) for g in "abcd"]
            async with sending(pool, *(r for group in groups for r in group)):
                await until(lambda: sum(len(e.asked) for e in engines) == 16)
                sessions = [{r.session for r in e.requests} for e in engines]
                assert [len(of) for of in sessions] == [2, 2]
                assert not sessions[0] & sessions[1]

    run(main())


def test_a_full_engine_lends_its_session_out_and_gets_it_back() -> None:
    async def main() -> None:
        home, other = engine(2), engine(2)
        other.num_running = 1  # so that the session begins at the other one
        async with (
            serving(home, other),
            pool_of(home, other) as pool,
            sending(pool, *named(3, session="s")) as tasks,
        ):
            await until(lambda: len(home.asked) + len(other.asked) == 3)
            assert (home.asked, other.asked) == (["r0", "r1"], ["r2"])
            home.hold.set()
            await asyncio.gather(*tasks[:2])
            await pool.generate(request("next", session="s"))
            assert home.asked[-1] == "next"

    run(main())


def test_a_session_moves_for_good_when_its_engine_cannot_start_it() -> None:
    async def main() -> None:
        first, second = engine(8, busy=False), engine(8, busy=False, token_id=8)
        second.num_running = 4
        async with serving(first, second), pool_of(first, second) as pool:
            await pool.generate(request("a", session="s"))
            second.version = Version(0, 2)
            await pool.generate(request("b", session="s", min_version=Version(0, 2)))
            await pool.generate(request("c", session="s"))
            assert (first.asked, second.asked) == (["a"], ["b", "c"])

    run(main())


def test_sessions_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_SESSIONS", 2)

    async def main() -> None:
        async with serving(only := ScriptedEngine()), pool_of(only) as pool:
            for session in "abac":
                await pool.generate(request(session, session=session))
            assert list(pool._waiting._homes) == ["a", "c"]

    run(main())


def test_a_new_version_is_looked_for_at_all_engines_before_work_that_needs_it_is_sent() -> None:
    async def main() -> None:
        engines = [engine(64), engine(64)]
        newer = Version(0, 2)
        # The pool has seen version 1 at both; both take 2; then a wave asks for it.
        async with serving(*engines), pool_of(*engines) as pool, sending(pool, request("before")):
            await until(lambda: sum(len(e.asked) for e in engines) == 1)
            for one in engines:
                one.version = newer
            async with sending(pool, *named(9, min_version=newer)):
                await until(lambda: sum(len(e.asked) for e in engines) == 10)
                assert [len(e.asked) for e in engines] == [5, 5]

    run(main())


# ---------------------------------------------------------------------- how much, and who waits
def test_an_engine_gets_what_it_decodes_together_and_the_rest_waits_in_order() -> None:
    async def main() -> None:
        only = engine(3)
        async with serving(only), pool_of(only) as pool, sending(pool, *named(10)) as tasks:
            await until(lambda: len(only.asked) == 3)
            assert (await pool.state()).info["waiting"] == 7
            only.hold.set()
            await asyncio.gather(*tasks)
            assert only.asked == [f"r{i}" for i in range(10)]
            assert only.most_in_flight == 3

    run(main())


def test_a_request_larger_than_the_limit_is_sent_alone() -> None:
    async def main() -> None:
        only = engine(2, busy=False)
        async with serving(only), pool_of(only) as pool:
            large = named(2, "large", num_samples=5)
            await asyncio.gather(*(pool.generate(r) for r in [*named(3), *large, *named(3, "s")]))
            assert only.asked == ["r0", "r1", "r2", "large0", "large1", "s0", "s1", "s2"]

    run(main())


def test_the_callers_that_give_up_leave_their_places() -> None:
    async def main() -> None:
        only = engine(2)
        async with serving(only), pool_of(only) as pool, sending(pool, *named(6)) as tasks:
            await until(lambda: len(only.asked) == 2)
            for task in tasks[:5]:
                task.cancel()
            await until(lambda: only.asked[2:] == ["r5"])

    run(main())


def test_work_that_waits_for_a_version_stands_in_nobodys_way() -> None:
    async def main() -> None:
        only = engine(1, busy=False)
        async with (
            serving(only),
            pool_of(only) as pool,
            sending(pool, *named(20, "early", min_version=Version(0, 2))) as early,
        ):
            for one in named(3):
                await pool.generate(one)
            assert only.asked == ["r0", "r1", "r2"]
            only.version = Version(0, 2)
            await asyncio.gather(*early)
            assert only.asked[3:] == [f"early{i}" for i in range(20)]

    run(main())


def test_a_request_that_an_engine_failed_waits_for_room_at_another() -> None:
    async def main() -> None:
        fails, full = engine(4, busy=False), engine(1, token_id=8)
        fails.script = [always("error", 500), fails.works]
        full.num_running = 9  # so that the other one is asked first
        async with serving(fails, full), pool_of(fails, full) as pool:
            first, filling = request("first"), request("filling", min_version=Version(0, 2))
            full.version = Version(0, 2)
            async with sending(pool, filling, first) as (_, tried):
                await until(lambda: fails.asked == ["first"] and full.asked == ["filling"])
                for one in named(9):  # these have no reason to wait
                    await pool.generate(one)
                assert fails.asked[1:] == [f"r{i}" for i in range(9)]
                full.hold.set()
                assert (await tried)[0].token_ids == (8,)

    run(main())


def test_work_for_a_full_engine_leaves_the_others_to_those_that_can_start_there() -> None:
    async def main() -> None:
        new, old = engine(1, version=2), engine(1, busy=False)
        new_only = {"min_version": Version(0, 2)}
        async with (
            serving(new, old),
            pool_of(new, old) as pool,
            sending(pool, *named(3, "new", **new_only), *named(3, "any")) as tasks,
        ):
            await asyncio.gather(*tasks[3:])
            assert old.asked == ["any0", "any1", "any2"]
            assert new.asked == ["new0"]

    run(main())


def test_a_full_cache_lowers_an_engines_limit_and_room_raises_it_again() -> None:
    async def main() -> None:
        only = engine(16)

        async def limit() -> int:
            return int((await pool.state()).info["limits"][only.url])

        async with serving(only), pool_of(only) as pool, sending(pool, *named(40)):
            await until(lambda: len(only.asked) == 16)
            only.kv_use = 0.95
            # However often it is looked at: a cut has not taken effect while 16 are there.
            assert [await limit() for _ in range(5)] == [12] * 5
            only.kv_use = 0.5
            limits = [await limit() for _ in range(6)]
            assert limits == sorted(limits)
            assert limits[-1] == 16

    run(main())


# ----------------------------------------------------------------------------- coming and going
def test_without_an_engine_the_pool_waits_for_one_to_come() -> None:
    async def main() -> None:
        only = ScriptedEngine()
        async with pool_of(only) as pool:
            waiting = asyncio.create_task(pool.generate(request()))
            await asyncio.sleep(0)
            assert not waiting.done()
            async with serving(only):
                assert await waiting == (completion(7),)

    run(main())


def test_an_engine_that_joins_takes_what_waits_while_the_first_is_still_busy() -> None:
    async def main() -> None:
        first, second = engine(2), engine(2)
        async with serving(first), pool_of(first, second) as pool, sending(pool, *named(5)):
            await until(lambda: len(first.asked) == 2)
            async with serving(second):
                await until(lambda: second.asked == ["r2", "r3"])
                assert first.asked == ["r0", "r1"]

    run(main())


def test_an_engine_that_is_named_no_more_ends_what_it_has_and_gets_nothing_new() -> None:
    async def main() -> None:
        leaving, staying = engine(2), engine(2, token_id=8)
        staying.num_running = 1
        urls: list[str] = []
        async with serving(leaving, staying):
            urls += [leaving.url, staying.url]
            pool = EnginePool(lambda: list(urls))
            async with sending(pool, *named(8, session="s")) as tasks:
                await until(lambda: len(leaving.asked) + len(staying.asked) == 4)
                urls.remove(leaving.url)
                await until(lambda: any(m.leaving for m in pool._members.all))
                leaving.hold.set()
                staying.hold.set()
                done = [answer.token_ids[0] for (answer,) in await asyncio.gather(*tasks)]
                assert sorted(done) == [7] * 2 + [8] * 6
                assert len(leaving.asked) == 2
            staying.hold.clear()
            async with sending(pool, request("last")):
                await until(lambda: [m.url for m in pool._members.all] == [staying.url])
            await pool.close()

    run(main())


@pytest.mark.parametrize("what", ["ill", "silent"])
def test_an_engine_that_is_not_well_gets_nothing_until_it_is(what: str) -> None:
    async def main() -> None:
        unwell, well = engine(4, busy=False), engine(4, busy=False, token_id=8)
        well.num_running = 3
        unwell.ill = what == "ill"
        if what == "silent":
            unwell.silent.set()
        async with serving(unwell, well), pool_of(unwell, well, state_s=0.2) as pool:
            for one in named(3):
                await pool.generate(one)
            assert (len(unwell.asked), len(well.asked)) == (0, 3)
            unwell.ill = False
            unwell.silent.clear()
            well.hold.clear()
            async with sending(pool, *named(9, "later")):
                await until(lambda: len(unwell.asked) > 0)

    run(main())


def test_a_hundred_requests_survive_engines_that_break_fail_and_stop_each_answered_once() -> None:
    async def main() -> None:
        breaks, fails, stops, works = (engine(8, busy=False, token_id=i) for i in range(4))
        breaks.script = [*[breaks.hangs_up, breaks.works] * 10, breaks.works]
        fails.script = [*[fails.works, always("error", 500)] * 10, fails.works]
        stops.script = [*[always("unavailable", 503)] * 10, stops.works]
        engines = (breaks, fails, stops, works)
        async with serving(*engines), pool_of(*engines) as pool:
            done = await asyncio.gather(*(pool.generate(r) for r in named(100)))
            assert len(done) == 100
            assert all(len(completions) == 1 for completions in done)
            assert all(e.most_in_flight <= 8 for e in engines)
            assert all(m.num_sent == 0 for m in pool._members.all)

    run(main())
