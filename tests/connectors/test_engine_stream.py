"""The contract of streams, checked on real processes over HTTP: the tokens of a request as they
come, and the same treatment of requests as without."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec
import pytest

from connectors.engines.client import Completions
from connectors.engines.types import GenerateRequest, Part, RequestRefused, VersionGone
from connectors.engines.wire import Last, decoded_line
from connectors.records import Version
from tests.connectors.engine_bench import (
    CONTEXT_TOKENS,
    LONG,
    MAX_RUNNING,
    Bench,
    check,
    connect,
)
from tests.connectors.heard import Heard


def stream(bench: Bench, request: GenerateRequest, heard: Heard) -> asyncio.Task[Completions]:
    return asyncio.create_task(bench.client.stream(request, heard.append))


async def hears(heard: Heard, num_tokens: int) -> None:
    """Waits until so many tokens were told."""
    async with asyncio.timeout(60):
        while heard.num_tokens < num_tokens:
            await asyncio.sleep(0.002)


# ------------------------------------------------------------------------------------ what is told
@check
async def test_a_stream_is_told_as_it_is_decoded_and_is_what_generate_answers(
    bench: Bench,
) -> None:
    heard = Heard()
    (done,) = await stream(bench, bench.request(max_tokens=40), heard)
    assert heard.completions((done,)) == (done,)
    assert len(heard) > 10, "in parts"
    assert (await bench.one(max_tokens=40)).token_ids == done.token_ids
    bench.assert_own(done)


@check
async def test_samples_are_told_side_by_side(bench: Bench) -> None:
    heard = Heard()
    done = await stream(bench, bench.request(num_samples=4, max_tokens=40), heard)
    assert heard.completions(done) == done
    changes = sum(a.sample != b.sample for a, b in pairwise(heard))
    assert changes > 10
    for sample in done:
        bench.assert_own(sample)


@check
async def test_each_token_is_told_with_the_version_that_wrote_it(bench: Bench) -> None:
    heard, request = Heard(), bench.request(max_tokens=LONG, num_samples=2)
    streaming = stream(bench, request, heard)
    await hears(heard, 60)
    newer = await bench.publish(1)
    await hears(heard, heard.num_tokens + 60)
    await bench.client.cancel(request.request_id)
    done = await streaming
    assert heard.completions(done) == done
    for sample in done:
        assert [s.version for s in sample.segments] == [bench.first, newer]
        bench.assert_own(sample)
    assert {s.version for part in heard[-4:] for s in part.segments} == {newer}


@check
async def test_a_stop_id_is_the_last_token_told(bench: Bench) -> None:
    free, heard = await bench.one(), Heard()
    stop = free.token_ids[9]
    (done,) = await stream(bench, bench.request(stop_ids=(stop,)), heard)
    assert done.finish_reason == "stop"
    assert heard[-1].token_ids[-1] == stop
    assert heard.completions((done,)) == (done,)


# ----------------------------------------------------------------------------- how it is treated
@check
async def test_a_stream_sent_again_is_told_from_the_beginning_and_nothing_is_redone(
    bench: Bench,
) -> None:
    before = (await bench.state()).num_tokens
    request = bench.request(max_tokens=300)
    first, again, late = Heard(), Heard(), Heard()
    one = stream(bench, request, first)
    await hears(first, 20)
    two, three = stream(bench, request, again), bench.begin(request)
    assert await one == await two == await three
    assert await stream(bench, request, late) == await one
    for heard in (first, again, late):
        assert heard.completions(await one) == await one
    assert (await bench.state()).num_tokens - before == 300


@check
async def test_a_stream_whose_client_is_gone_is_found_again(bench: Bench) -> None:
    gone, heard = connect(bench.engine), Heard()
    logged = len(bench.engine.log.read_text())
    before = (await bench.state()).num_tokens
    request = bench.request(max_tokens=300)
    lost = asyncio.create_task(gone.stream(request, heard.append))
    await hears(heard, 5)
    lost.cancel()
    await gone.close()
    done = await bench.client.attach(request.request_id)
    assert done is not None
    assert len(done[0].token_ids) == 300
    bench.assert_own(done[0])
    assert (await bench.state()).num_tokens - before == 300
    assert "Traceback" not in bench.engine.log.read_text()[logged:]


@check
async def test_cancel_and_deadline_end_a_stream_with_all_that_there_is(bench: Bench) -> None:
    heard, timed = Heard(), Heard()
    request = bench.request(num_samples=2, max_tokens=LONG)
    streaming = stream(bench, request, heard)
    late = stream(bench, bench.request(deadline_s=1.0, max_tokens=LONG), timed)
    await hears(heard, 20)
    partials = await bench.client.cancel(request.request_id)
    assert await streaming == partials == heard.completions(partials)
    (cut,) = await late
    assert timed.completions((cut,)) == (cut,)
    assert {c.finish_reason for c in (*partials, cut)} == {"cancelled"}
    assert 0 < len(cut.token_ids) < LONG
    await bench.until(lambda state: (state.num_running, state.num_queued) == (0, 0))


@check
async def test_a_reader_that_takes_its_time_delays_nobody_and_misses_nothing(
    bench: Bench,
) -> None:
    slow = bench.request(max_tokens=600, num_samples=MAX_RUNNING - 1)
    async with (
        aiohttp.ClientSession(read_bufsize=1024) as session,
        session.post(f"{bench.engine.url}/stream", data=msgspec.json.encode(slow)) as answer,
    ):
        first = decoded_line(await answer.content.readuntil())
        assert isinstance(first, Part)
        heard = Heard([first])
        await bench.one(max_tokens=100)
        async with asyncio.timeout(120):
            while (await bench.state()).num_running:
                await asyncio.sleep(0.05)
        rest = (await answer.content.read()).splitlines()
    *parts, last = map(decoded_line, rest)
    assert isinstance(last, Last)
    heard += [part for part in parts if isinstance(part, Part)]
    assert heard.completions(last.done) == last.done
    assert all(len(done.token_ids) == 600 for done in last.done)


@check
async def test_a_stream_that_waits_for_a_version_begins_with_it(bench: Bench) -> None:
    least, heard = bench.next_version(), Heard()
    waiting = stream(bench, bench.request(min_version=least), heard)
    await bench.until(lambda state: state.num_queued == 1)
    await bench.publish(1, least)
    (done,) = await waiting
    assert {s.version for s in done.segments} == {least}
    assert heard.completions((done,)) == (done,)


# ----------------------------------------------------------------------------- refused, max_version
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ()}, "empty"),
    ({"prompt": (5,) * CONTEXT_TOKENS}, "too long"),
    ({"num_samples": 0}, "num_samples must be from 1"),
]


@check
async def test_a_stream_that_makes_no_sense_is_refused_with_the_reason(bench: Bench) -> None:
    heard = Heard()
    for wrong, reason in WRONG:
        with pytest.raises(RequestRefused, match=reason):
            await stream(bench, bench.request(**wrong), heard)
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{bench.engine.url}/stream", data=b'{"no": 1}') as answer,
    ):
        assert (answer.status, (await answer.json())["kind"]) == (400, "refused")
    assert heard == []


@check
async def test_nothing_begins_above_max_version_but_what_began_goes_on(bench: Bench) -> None:
    first, heard = bench.first, Heard()
    began = bench.request(max_tokens=LONG, max_version=first)
    streaming = stream(bench, began, heard)
    await hears(heard, 20)
    await bench.publish(1)
    await hears(heard, heard.num_tokens + 20)
    with pytest.raises(VersionGone, match=str(first)):
        await bench.generate(min_version=first, max_version=first)
    with pytest.raises(VersionGone, match=str(first)):
        await stream(bench, bench.request(max_version=first), Heard())
    await bench.client.cancel(began.request_id)
    (done,) = await streaming
    assert done.segments[0].version == first
    assert len(done.segments) == 2


@check
async def test_what_waits_for_a_place_is_gone_once_its_version_is(bench: Bench) -> None:
    blocker = bench.request(num_samples=MAX_RUNNING, max_tokens=LONG)
    bench.begin(blocker)
    await bench.tokens(MAX_RUNNING)
    waiting = bench.begin(bench.request(max_version=bench.first))
    later = bench.begin(bench.request(max_version=Version(9, 0), max_tokens=4))
    await bench.until(lambda state: state.num_queued == 2)
    await bench.publish(1)
    with pytest.raises(VersionGone):
        await waiting
    await bench.client.cancel(blocker.request_id)
    assert len((await later)[0].token_ids) == 4
