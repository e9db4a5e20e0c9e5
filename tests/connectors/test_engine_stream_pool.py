"""Streams over engines that break in the middle: what was told stays true, and goes on."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connectors.engines import members
from connectors.engines.continuing import continued, ended
from connectors.engines.told import Told
from connectors.engines.types import (
    EngineError,
    EngineState,
    GenerateRequest,
    RequestRefused,
    VersionGone,
)
from connectors.engines.wire import ErrorBody
from connectors.records import Version
from tests.connectors.heard import Heard
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
from tests.connectors.telling_engine import (
    FIRST,
    NUM_TOKENS,
    PROMPT,
    asked,
    breaks_off,
    dies_after,
    span,
    streams,
    tells,
    until_cancelled,
    whole,
)

SECOND = Version(0, 2)


def two_engines() -> tuple[ScriptedEngine, ScriptedEngine]:
    """The first is asked first; the second tells what it is asked for."""
    first, second = ScriptedEngine(), ScriptedEngine()
    second.num_running = 5
    second.script = [tells(second)]
    return first, second


# ---------------------------------------------------------------------------- going on elsewhere
def test_a_stream_that_breaks_goes_on_elsewhere_from_what_was_told() -> None:
    async def main() -> None:
        bad, good = two_engines()
        good.version = SECOND
        bad.script = [breaks_off(bad, 3)]
        heard = Heard()
        async with serving(bad, good), pool_of(bad, good) as pool:
            done = await pool.stream(asked(session="s", max_version=FIRST), heard.append)
        assert done == (whole(asked(), 0, (3, FIRST), (NUM_TOKENS, SECOND)),)
        assert heard.completions(done) == done
        (rest,) = good.requests
        begun = span(asked(), 0, 0, 3, FIRST).token_ids
        assert rest.token_ids == (*PROMPT, *begun)
        assert rest.request_id.startswith("r+0.3.")
        assert (rest.num_samples, rest.sampling.max_tokens) == (1, NUM_TOKENS - 3)
        assert (rest.min_version, rest.max_version, rest.session) == (FIRST, None, "s")

    run(main())


@pytest.mark.parametrize("kind", ["error", "unavailable", "nonsense"])
def test_whatever_breaks_it_the_work_there_is_ended(kind: str) -> None:
    async def main() -> None:
        bad, good = two_engines()
        last = ErrorBody(error="no", kind=kind)
        bad.script = [breaks_off(bad, 3, last={} if kind == "nonsense" else last)]
        heard = Heard()
        async with serving(bad, good), pool_of(bad, good) as pool:
            done = await pool.stream(asked(), heard.append)
            assert done == heard.completions(done) == (whole(asked()),)
            assert (bad.asked, bad.cancelled) == (["r"], ["r"])

    run(main())


def test_each_sample_goes_on_by_itself_from_where_it_was() -> None:
    async def main() -> None:
        bad, good = two_engines()
        bad.script = [breaks_off(bad, 5, 0, NUM_TOKENS)]
        heard = Heard()
        three = asked(num_samples=3)
        async with serving(bad, good), pool_of(bad, good) as pool:
            done = await pool.stream(three, heard.append)
        assert done == heard.completions(done) == tuple(whole(three, k) for k in range(3))
        rests = sorted(good.requests, key=lambda r: r.request_id)
        assert [len(r.token_ids) - len(PROMPT) for r in rests] == [5, 0]
        assert [r.sampling.seed for r in rests] == [5, 6]

    run(main())


def test_what_was_told_to_its_end_is_not_asked_for_again() -> None:
    stop = span(asked(), 0, 0, 4, FIRST).token_ids[-1]
    cases = [
        (NUM_TOKENS, asked(), whole(asked())),
        (4, asked(stop_ids=(stop,)), whole(asked(), 0, (4, FIRST), reason="stop")),
    ]

    async def main() -> None:
        for count, wanted, done in cases:
            bad, good = two_engines()
            bad.script = [breaks_off(bad, count)]
            async with serving(bad, good), pool_of(bad, good) as pool:
                assert await pool.stream(wanted, Heard().append) == (done,)
                assert good.asked == []

    run(main())


def test_a_sample_ends_where_the_context_does() -> None:
    told = Told()
    told.add(span(asked(), 0, 0, 3, FIRST))
    state = EngineState(
        version=FIRST,
        digest="",
        epoch=0,
        num_running=0,
        num_queued=0,
        kv_use=0.0,
        info={"context_tokens": len(PROMPT) + 3},
    )
    assert ended(told, asked(), state) == "length"
    assert ended(told, asked(), None) is None
    state.info["context_tokens"] += 1
    assert ended(told, asked(), state) is None


def test_a_rest_is_named_after_what_was_told() -> None:
    names = set()
    for count, seed in ((2, 5), (3, 5), (3, 6)):
        told = Told()
        told.add(span(asked(seed=seed), 0, 0, count, FIRST))
        names.add(continued(asked(), 0, told, None).request_id)
    assert len(names) == 3


def test_versions_do_not_go_back_it_waits_for_the_one_that_began() -> None:
    async def main() -> None:
        bad, good = two_engines()
        bad.version = SECOND
        bad.script = [dies_after(bad, 3)]
        heard = Heard()
        async with serving(bad, good), pool_of(bad, good) as pool:
            streaming = asyncio.create_task(pool.stream(asked(), heard.append))
            await until(lambda: len(heard) == 3 and pool.held_up("r"))
            assert good.asked == []
            good.version = SECOND
            done = await streaming
        assert done == (whole(asked(), 0, (NUM_TOKENS, SECOND)),)

    run(main())


def test_a_break_before_anything_was_told_is_that_of_any_request() -> None:
    async def main() -> None:
        bad, good = two_engines()
        heard = Heard()
        for script in (breaks_off(bad), always("unavailable", 503), always("error", 500)):
            bad.script = [script]
            heard.clear()
            async with serving(bad, good), pool_of(bad, good) as pool:
                done = await pool.stream(asked(), heard.append)
                assert done == heard.completions(done) == (whole(asked()),)
                assert good.asked.pop() == "r"
                assert bad.cancelled == []

    run(main())


def test_work_that_was_done_when_the_line_broke_is_told() -> None:
    async def main() -> None:
        engine, heard = ScriptedEngine(), Heard()
        engine.script = [engine.finishes_but_the_line_breaks]
        async with serving(engine), pool_of(engine) as pool:
            assert await pool.stream(request(), heard.append) == (completion(7),)
            assert heard.completions((completion(7),)) == (completion(7),)
            assert len(engine.asked) == 1

    run(main())


def test_refusals_and_third_failures_end_a_stream_that_told_nothing() -> None:
    async def main() -> None:
        engine = ScriptedEngine(always("refused", 400))
        async with serving(engine), pool_of(engine) as pool:
            with pytest.raises(RequestRefused):
                await pool.stream(asked(), Heard().append)
            engine.script = [always("error", 500)]
            with pytest.raises(EngineError, match="this is error"):
                await pool.stream(asked(), Heard().append)
            assert len(engine.asked) == 1 + 3

    run(main())


def test_a_rest_that_fails_ends_the_stream_and_what_else_goes_on() -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        engine.script = [breaks_off(engine, 2, 2), streams(b"?\n")]
        heard = Heard()
        async with serving(engine), pool_of(engine) as pool:
            with pytest.raises(EngineError, match="makes no sense"):
                await pool.stream(asked(num_samples=2), heard.append)
            assert [len(p.token_ids) for p in heard] == [1] * 4
            assert pool._sending.tickets == pool._rests == {}
            assert all(m.num_sent == 0 for m in pool._members.all)

    run(main())


Script = tuple[list[int], bool]  # tokens of each sample; whether it fails with an answer


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    breaks=st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=3), st.booleans()), max_size=4),
    num_samples=st.integers(1, 3),
)
def test_wherever_it_breaks_what_was_told_is_what_would_have_been(
    breaks: list[Script], num_samples: int
) -> None:
    async def main() -> None:
        engine, heard = ScriptedEngine(), Heard()
        num_answered = 0

        async def step(http: web.Request) -> web.StreamResponse:
            nonlocal num_answered
            asks = msgspec.json.decode(await http.read(), type=GenerateRequest)
            counts, answered = breaks.pop() if breaks else ([], False)
            counts = [min(n, asks.sampling.max_tokens) for n in counts][: asks.num_samples]
            if not any(counts):
                return await tells(engine)(http)
            last = ErrorBody(error="no") if answered else None
            return await breaks_off(engine, *counts, last=last)(http)

        engine.script = [step]
        wanted = asked(num_samples=num_samples)
        async with serving(engine), pool_of(engine) as pool:
            done = await pool.stream(wanted, heard.append)
        assert done == heard.completions(done)
        assert done == tuple(whole(wanted, k) for k in range(num_samples))

    run(main())


# --------------------------------------------------------------------------------- cancel, deadline
def test_a_cancelled_stream_ends_with_what_was_told_wherever_its_samples_are() -> None:
    async def main() -> None:
        bad, good = two_engines()
        bad.script = [breaks_off(bad, 2, NUM_TOKENS)]
        good.script = [until_cancelled(good, 3)]
        heard = Heard()
        two = asked(num_samples=2)
        async with serving(bad, good), pool_of(bad, good) as pool:
            streaming = asyncio.create_task(pool.stream(two, heard.append))
            await until(lambda: len(heard) == 2 + NUM_TOKENS + 3)
            partials = await pool.cancel("r")
            assert partials == await streaming == heard.completions(partials)
            assert partials == (whole(two, 0, (5, FIRST), reason="cancelled"), whole(two, 1))
            assert good.cancelled == good.asked

    run(main())


def test_a_stream_that_breaks_after_it_was_cancelled_does_not_go_on() -> None:
    async def main() -> None:
        bad, good = two_engines()
        gone = asyncio.Event()

        async def breaks_when_told(http: web.Request) -> web.StreamResponse:
            stream = await breaks_off(bad, 3)(http)
            await gone.wait()
            return stream

        bad.script = [breaks_when_told]
        heard = Heard()
        async with serving(bad, good), pool_of(bad, good) as pool:
            streaming = asyncio.create_task(pool.stream(asked(), heard.append))
            await until(lambda: len(heard) == 3)
            await pool.cancel("r")
            gone.set()
            assert await streaming == (whole(asked(), 0, (3, FIRST), reason="cancelled"),)
            assert good.asked == []

    run(main())


def test_a_stream_cancelled_as_it_is_about_to_go_on_does_not() -> None:
    async def main() -> None:
        bad, good = two_engines()
        bad.script = [breaks_off(bad, 3)]
        async with serving(bad, good), pool_of(bad, good) as pool:
            streaming = asyncio.create_task(pool.stream(asked(), Heard().append))
            async with asyncio.timeout(30):
                while not pool._rests:
                    await asyncio.sleep(0)
            partials = await pool.cancel("r")
            assert partials == await streaming
            assert partials == (whole(asked(), 0, (3, FIRST), reason="cancelled"),)
            assert good.asked == []

    run(main())


def test_the_deadline_of_a_stream_is_that_of_all_its_parts() -> None:
    async def main() -> None:
        bad, good = two_engines()
        good.version = None
        bad.script = [dies_after(bad, 3)]
        bad.version = SECOND
        heard = Heard()
        async with serving(bad, good), pool_of(bad, good) as pool:
            (done,) = await pool.stream(asked(deadline_s=0.5), heard.append)
            assert len(heard) == 3
            assert done == whole(asked(), 0, (3, SECOND), reason="cancelled")

    run(main())


# ----------------------------------------------------------------------------------- exact versions
def test_the_pool_says_which_versions_its_engines_hold() -> None:
    async def main() -> None:
        old, new = ScriptedEngine(), ScriptedEngine(version=2)
        async with serving(old, new), pool_of(old, new) as pool:
            assert await pool.versions() == [FIRST, SECOND]
            old.version = SECOND
            assert await pool.versions() == [SECOND]
            old.version = new.version = None
            assert await pool.versions() == []

    run(main())


def test_a_request_for_one_version_goes_to_the_engine_that_holds_it() -> None:
    async def main() -> None:
        old, new = ScriptedEngine(token_id=7), ScriptedEngine(token_id=8, version=2)
        old.num_running, new.num_running = 50, 0
        async with serving(old, new), pool_of(old, new) as pool:
            for version, ids in ((FIRST, 7), (SECOND, 8)):
                exact = request(str(version), min_version=version, max_version=version)
                assert await pool.generate(exact) == (completion(ids, version),)

    run(main())


def test_a_version_that_every_engine_has_passed_is_gone() -> None:
    async def main() -> None:
        engines = [ScriptedEngine(version=2), ScriptedEngine(version=3)]
        async with serving(*engines), pool_of(*engines) as pool:
            exact = request(min_version=FIRST, max_version=FIRST)
            with pytest.raises(VersionGone, match=r"0\.1"):
                await pool.generate(exact)
            with pytest.raises(VersionGone):
                await pool.stream(exact, Heard().append)
            assert [e.asked for e in engines] == [[], []]

    run(main())


def test_an_engine_that_passed_a_version_unseen_is_not_asked_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members, "LOOK_S", 60.0)

    async def main() -> None:
        passed, holds = ScriptedEngine(), ScriptedEngine(token_id=8)
        holds.num_running = 5
        exact = request(min_version=FIRST, max_version=FIRST)
        async with serving(passed, holds), pool_of(passed, holds) as pool:

            async def swaps(http: web.Request) -> web.StreamResponse:
                passed.version = SECOND
                return await always("version_gone", 409)(http)

            passed.script = [swaps]
            assert await pool.generate(exact) == (completion(8),)
            assert (passed.asked, holds.asked) == (["r"], ["r"])
        passed.version = FIRST
        async with serving(passed), pool_of(passed) as pool:
            with pytest.raises(VersionGone):
                await pool.generate(exact)
            assert passed.asked == ["r", "r"]

    run(main())
