"""A stream of one engine over HTTP: what is told on, and what is not believed."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from aiohttp import web

from connectors.engines import client as client_module
from connectors.engines.client import HttpEngine
from connectors.engines.told import Told, part_from
from connectors.engines.types import (
    EngineError,
    EngineUnavailable,
    Part,
    RequestRefused,
    VersionGone,
)
from connectors.engines.wire import ErrorBody, Last
from connectors.records import Segment, Version
from tests.connectors.scripted_engine import Answer, ScriptedEngine, always, run, serving
from tests.connectors.telling_engine import (
    FIRST,
    NUM_TOKENS,
    asked,
    breaks_off,
    line,
    opened,
    span,
    streams,
    tells,
    whole,
)

SECOND = Version(0, 2)


def first_ids(count: int, **changes: Any) -> Part:
    return msgspec.structs.replace(span(asked(), 0, 0, count, FIRST), **changes)


def streamed(script: Answer, error: type[EngineError], match: str, **changes: Any) -> list[Part]:
    """What a stream tells before it fails, as it must."""
    parts: list[Part] = []

    async def main() -> None:
        async with serving(engine := ScriptedEngine(script)):
            client = HttpEngine(engine.url)
            with pytest.raises(EngineError, match=match) as raised:
                await client.stream(asked(**changes), parts.append)
            assert type(raised.value) is error
            await client.close()

    run(main())
    return parts


def test_each_part_is_told_as_it_came_and_the_end_is_all_of_them() -> None:
    async def main() -> None:
        for size in (1, 3, NUM_TOKENS):
            engine = ScriptedEngine()
            parts: list[Part] = []
            engine.script = [tells(engine, size=size)]
            async with serving(engine):
                client = HttpEngine(engine.url)
                request = asked(num_samples=2)
                done = await client.stream(request, parts.append)
                assert done == (whole(request, 0), whole(request, 1))
                assert parts == [
                    span(request, k, start, min(start + size, NUM_TOKENS), FIRST)
                    for start in range(0, NUM_TOKENS, size)
                    for k in range(2)
                ]
                await client.close()

    run(main())


def test_a_part_is_told_while_the_next_one_is_not_there_yet() -> None:
    async def main() -> None:
        heard = asyncio.Event()

        async def waits(http: web.Request) -> web.StreamResponse:
            stream = await opened(http)
            await stream.write(line(first_ids(3)))
            await heard.wait()
            await stream.write(line(span(asked(), 0, 3, NUM_TOKENS, FIRST)))
            await stream.write(line(Last(done=(whole(asked()),))))
            return stream

        async with serving(engine := ScriptedEngine(waits)):
            client = HttpEngine(engine.url)
            assert await client.stream(asked(), lambda _: heard.set()) == (whole(asked()),)
            await client.close()

    run(main())


def test_lines_are_found_however_they_are_cut() -> None:
    async def main() -> None:
        parts: list[Part] = []
        sent = line(first_ids(NUM_TOKENS)) + line(Last(done=(whole(asked()),)))
        cuts = [sent[i : i + 7] for i in range(0, len(sent), 7)]
        async with serving(engine := ScriptedEngine(streams(*cuts))):
            client = HttpEngine(engine.url)
            assert await client.stream(asked(), parts.append) == (whole(asked()),)
            assert parts == [first_ids(NUM_TOKENS)]
            await client.close()

    run(main())


WRONG_PARTS = [
    (first_ids(2, sample=1), "a part of sample 1 of 1"),
    (first_ids(2, sample=-1), "a part of sample -1 of 1"),
    (first_ids(0, segments=()), "a part without ids"),
    (first_ids(2, logprobs=(-0.1,)), "2 ids and 1 log-probs"),
    (first_ids(1, token_ids=(-7,)), "token id -7 is outside"),
    (first_ids(1, logprobs=(0.5,)), "a log-prob is 0.5"),
    (first_ids(2, segments=()), "segments cover 0 of 2 ids"),
    (first_ids(2, segments=(Segment(1, 2, 0, 1),)), r"segment \[1, 2\) does not go on at 0"),
    (first_ids(1, segments=(Segment(0, 1, 0, 9),)), r"version 0\.9, the engine holds 0\.2"),
    (first_ids(1, segments=(Segment(0, 1, 0, 0),)), r"version 0\.0 after ids of version 0\.1"),
    (first_ids(NUM_TOKENS), "10 ids, asked for were at most 8"),
    ({"sample": 0, "token_ids": [4]}, "missing required field `logprobs`"),
    (b"{nothing\n", "malformed"),
]


@pytest.mark.parametrize(("wrong", "why"), WRONG_PARTS)
def test_a_part_that_makes_no_sense_after_those_before_is_not_told(wrong: Any, why: str) -> None:
    async def says_second(http: web.Request) -> web.StreamResponse:
        return await streams(first_ids(2), wrong)(http)

    async def main() -> None:
        engine = ScriptedEngine(says_second, version=2)
        parts: list[Part] = []
        async with serving(engine):
            client = HttpEngine(engine.url)
            with pytest.raises(EngineError, match=f"makes no sense: .*{why}"):
                await client.stream(asked(), parts.append)
            assert parts == [first_ids(2)]
            await client.close()

    run(main())


def test_nothing_is_told_after_a_stop_id() -> None:
    stop = first_ids(2).token_ids[1]
    for first, second in ((2, 3), (1, 4)):
        wrong = streams(first_ids(first), span(asked(), 0, first, second, FIRST))
        parts = streamed(wrong, EngineError, f"ids after {stop}", stop_ids=(stop,))
        assert parts == [first_ids(first)]


def test_a_sample_begins_within_the_versions_that_were_asked_for() -> None:
    parts = streamed(
        streams(first_ids(1)), EngineError, "asked for was 0.2 or newer", min_version=SECOND
    )
    older = Version(0, 0)
    parts += streamed(
        streams(first_ids(1)), EngineError, "asked for was 0.0 or older", max_version=older
    )
    assert parts == []


def test_a_version_taken_in_mid_stream_is_believed_once_the_engine_says_it_holds_it() -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        parts: list[Part] = []

        async def swaps(http: web.Request) -> web.StreamResponse:
            stream = await opened(http)
            await stream.write(line(first_ids(3)))
            engine.version = SECOND
            await stream.write(line(span(asked(), 0, 3, NUM_TOKENS, SECOND)))
            done = whole(asked(), 0, (3, FIRST), (NUM_TOKENS, SECOND))
            await stream.write(line(Last(done=(done,))))
            return stream

        engine.script = [swaps]
        async with serving(engine):
            client = HttpEngine(engine.url)
            await client.state()
            (done,) = await client.stream(asked(), parts.append)
            assert [s.version for s in done.segments] == [FIRST, SECOND]
            assert [p.segments[0].version for p in parts] == [FIRST, SECOND]
            assert engine.num_states <= 2
            await client.close()

    run(main())


WRONG_ENDS = [
    ((first_ids(3), Last(done=(whole(asked()),))), "it ends with other tokens than it told"),
    ((first_ids(NUM_TOKENS), Last(done=())), "0 completions for 1 samples"),
    (
        (first_ids(3), Last(done=(whole(asked(), 0, (3, FIRST)),))),
        "ended by length after 3 of 8 ids",
    ),
    ((Last(done=(whole(asked()),)), first_ids(1)), "it ends with other tokens than it told"),
    (
        (first_ids(NUM_TOKENS), Last(done=(whole(asked()),)), first_ids(1)),
        "it goes on after its end",
    ),
]


@pytest.mark.parametrize(("lines", "why"), WRONG_ENDS)
def test_an_end_is_the_end_of_what_was_told(lines: tuple[object, ...], why: str) -> None:
    streamed(streams(*lines), EngineError, why)


@pytest.mark.parametrize("told", [0, 3])
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("refused", RequestRefused),
        ("version_gone", VersionGone),
        ("error", EngineError),
        ("unavailable", EngineUnavailable),
    ],
)
def test_an_error_ends_a_stream_before_it_begins_or_in_the_middle(
    kind: str, error: type[EngineError], told: int
) -> None:
    statuses = {"refused": 400, "version_gone": 409, "error": 500, "unavailable": 503}
    script = always(kind, statuses[kind])
    if told:
        script = streams(first_ids(told), ErrorBody(error=f"this is {kind}", kind=kind))
    parts = streamed(script, error, f"this is {kind}")
    assert parts == [first_ids(told)] * bool(told)


def test_a_stream_without_an_end_broke_off() -> None:
    engine = ScriptedEngine()
    parts = streamed(breaks_off(engine, 3, size=3), EngineUnavailable, "broke off")
    assert parts == [first_ids(3)]


def test_a_line_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(http: web.Request) -> web.StreamResponse:
        stream = await opened(http)
        while True:
            await stream.write(b" " * 1000)

    monkeypatch.setattr(client_module, "MAX_ANSWER_BYTES", 10_000)
    streamed(endless, EngineError, "exceeds 10000 bytes")


def test_what_is_told_adds_up_and_can_be_cut_anywhere() -> None:
    done = whole(asked(), 0, (3, FIRST), (5, SECOND), (NUM_TOKENS, Version(1, 0)))
    for start in range(NUM_TOKENS + 1):
        told = Told()
        before = part_from(0, 0, done)
        assert before is not None
        for part in (cut(before, start), part_from(start, 0, done)):
            if part is not None:
                told.add(part)
        assert told.completion("length") == done
    assert part_from(NUM_TOKENS, 0, done) is None


def cut(part: Part, end: int) -> Part | None:
    """Its first `end` tokens."""
    if end == 0:
        return None
    return Part(
        sample=part.sample,
        token_ids=part.token_ids[:end],
        logprobs=part.logprobs[:end],
        segments=tuple(
            Segment(s.start, min(s.end, end), s.incarnation, s.number)
            for s in part.segments
            if s.start < end
        ),
    )
