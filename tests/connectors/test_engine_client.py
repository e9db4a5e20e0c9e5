"""One engine over HTTP: what is taken as an answer and what is not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from aiohttp import web

from connectors.engines import client as client_module
from connectors.engines.answers import nonsense
from connectors.engines.client import HttpEngine
from connectors.engines.types import (
    Completion,
    EngineError,
    EngineState,
    EngineUnavailable,
    RequestRefused,
    Sampling,
)
from connectors.records import Segment, Version
from tests.connectors.scripted_engine import (
    ScriptedEngine,
    always,
    completion,
    request,
    run,
    says,
    serving,
)


def made(**changes: Any) -> Completion:
    """Three ids, the first two by version 0.1, the last by 0.2."""
    fields = {
        "token_ids": (5, 6, 7),
        "logprobs": (-0.1, -0.2, -0.3),
        "segments": (Segment(0, 2, 0, 1), Segment(2, 3, 0, 2)),
        "finish_reason": "length",
    }
    return Completion(**(fields | changes))


def spans(*ends: tuple[int, int]) -> dict[str, Any]:
    return {"segments": tuple(Segment(a, b, 0, 1) for a, b in ends)}


def versions(first: int, second: int) -> dict[str, Any]:
    return {"segments": (Segment(0, 2, 0, first), Segment(2, 3, 0, second))}


NOTHING = Completion(token_ids=(), logprobs=(), segments=(), finish_reason="cancelled")
THREE = request(sampling=Sampling(max_tokens=3, stop_ids=(9,)))  # asked with two ids
STATE = EngineState(
    version=Version(0, 2),
    digest="d",
    epoch=0,
    num_running=0,
    num_queued=0,
    kv_use=0.0,
    info={"context_tokens": 8, "vocab_size": 100},
)

NONSENSE = [
    (made(logprobs=(-0.1, -0.2)), "3 ids and 2 log-probs"),
    (made(token_ids=(5, 6)), "2 ids and 3 log-probs"),
    (made(logprobs=(-0.1, float("nan"), -0.3)), "a log-prob is nan"),
    (made(logprobs=(-0.1, -0.2, float("-inf"))), "a log-prob is -inf"),
    (made(logprobs=(-0.1, -1e300, -0.3)), "a log-prob is -1e+300"),
    (made(logprobs=(0.1, -0.2, -0.3)), "a log-prob is 0.1"),
    (made(token_ids=(5, -1, 7)), "token id -1 is outside the vocabulary of 100"),
    (made(token_ids=(5, 100, 7)), "token id 100 is outside the vocabulary of 100"),
    (made(**spans()), "segments cover 0 of 3 ids"),
    (made(**spans((0, 2))), "segments cover 2 of 3 ids"),
    (made(**spans((0, 4))), "segments cover 4 of 3 ids"),
    (made(**spans((1, 3))), "segment [1, 3) does not go on at 0"),
    (made(**spans((0, 2), (1, 3))), "segment [1, 3) does not go on at 2"),
    (made(**spans((0, 0), (0, 3))), "segment [0, 0) does not go on at 0"),
    (made(**versions(2, 1)), "ids of version 0.1 after ids of version 0.2"),
    (made(**versions(1, 1001)), "ids of version 0.1001, the engine holds 0.2"),
    (made(**versions(1, 2**70)), f"ids of version 0.{2**70}, the engine holds 0.2"),
    (msgspec.structs.replace(NOTHING, finish_reason="stop"), "ended by stop without an id"),
    (msgspec.structs.replace(NOTHING, finish_reason="length"), "ended by length without an id"),
]


@pytest.mark.parametrize(("done", "why"), NONSENSE)
def test_what_could_not_be_trained_on_makes_no_sense(done: Completion, why: str) -> None:
    assert nonsense((made(), done), None, STATE) == why


WRONG_ENDS = [
    (made(), {"max_tokens": 2}, "3 ids, asked for were at most 2"),
    (made(finish_reason="cancelled"), {"max_tokens": 2}, "3 ids, asked for were at most 2"),
    (made(finish_reason="stop"), {}, "ended by stop, but 7 is no stop id"),
    (made(), {"stop_ids": (7,)}, "ended by length, but 7 is a stop id"),
    (made(), {"max_tokens": 4}, "ended by length after 3 of 4 ids, the context is 8"),
]


@pytest.mark.parametrize(("done", "asked", "why"), WRONG_ENDS)
def test_an_answer_ends_where_and_because_of_what_it_says(
    done: Completion, asked: dict[str, Any], why: str
) -> None:
    sampling = msgspec.structs.replace(THREE.sampling, **asked)
    assert nonsense((done,), request(sampling=sampling), STATE) == why


def told(**info: int) -> EngineState:
    return msgspec.structs.replace(STATE, info=info)


def test_an_engine_may_cut_at_its_context_and_only_there() -> None:
    longer = request(sampling=Sampling(max_tokens=9))
    assert nonsense((made(),), longer, told(context_tokens=5)) is None
    assert nonsense((made(),), longer, told(context_tokens=6)) is not None
    assert nonsense((made(),), longer, told()) is not None


def test_ids_fit_an_int32_where_the_vocabulary_is_not_known() -> None:
    assert nonsense((made(token_ids=(5, 100, 7)),), THREE, told()) is None
    assert nonsense((made(token_ids=(5, 2**31, 7)),), THREE, told()) is not None


def test_an_engine_that_holds_nothing_wrote_nothing() -> None:
    empty = msgspec.structs.replace(STATE, version=None, epoch=-1)
    assert nonsense((NOTHING,), THREE, empty) is None
    assert nonsense((made(),), THREE, empty) == "ids of version 0.1, the engine never held one"


def test_an_engine_that_is_taking_a_version_wrote_with_the_one_before() -> None:
    between = msgspec.structs.replace(STATE, version=None, epoch=3)
    assert nonsense((made(),), THREE, between) is None


def test_whole_completions_make_sense_whatever_their_length() -> None:
    two = msgspec.structs.replace(THREE, num_samples=2, min_version=Version(0, 1))
    stopped = made(token_ids=(5, 6, 9), finish_reason="stop")
    certain = made(logprobs=(0.0, 5e-4, -1e30))
    cut = made(finish_reason="cancelled")
    for done in (made(), NOTHING, stopped, certain, cut):
        assert nonsense((done,), None, STATE) is None
        assert nonsense((done, done), two, STATE) is None
    assert nonsense((), None, STATE) is None


def test_an_answer_has_as_many_completions_as_were_asked_for() -> None:
    two = msgspec.structs.replace(THREE, num_samples=2)
    assert nonsense((made(),), two, STATE) == "1 completions for 2 samples"
    assert nonsense((), THREE, STATE) == "0 completions for 1 samples"


def test_ids_of_an_older_version_than_asked_for_are_no_answer() -> None:
    newer = msgspec.structs.replace(THREE, min_version=Version(0, 2))
    why = nonsense((made(),), newer, STATE)
    assert why == "ids of version 0.1, asked for was 0.2 or newer"


def test_the_engine_is_asked_what_it_holds_after_an_answer_that_leaves_a_doubt() -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        async with serving(engine):
            client = HttpEngine(engine.url)
            await client.generate(request())
            await client.generate(request())
            assert engine.num_states == 1, "the second left no doubt"
            engine.version = Version(0, 2)
            assert await client.generate(request()) == (completion(7, Version(0, 2)),)
            assert engine.num_states == 2
            engine.script = [says([completion(7, Version(0, 1002))])]
            with pytest.raises(EngineError, match=r"version 0.1002, the engine holds 0\.2"):
                await client.generate(request())
            await client.close()

    run(main())


@pytest.mark.parametrize("number", [2**70, 2**31, -1])
def test_a_version_beyond_int32_is_no_answer(number: int) -> None:
    async def main() -> None:
        answer = says(
            [
                {
                    "token_ids": [7],
                    "logprobs": [-0.5],
                    "segments": [{"start": 0, "end": 1, "incarnation": 0, "number": number}],
                    "finish_reason": "length",
                }
            ]
        )
        async with serving(engine := ScriptedEngine(answer)):
            client = HttpEngine(engine.url)
            with pytest.raises(EngineError, match=r"makes no sense: .*(`int`|Int)"):
                await client.generate(request())
            await client.close()

    run(main())


def test_an_answer_nested_without_end_is_an_error() -> None:
    async def deep(_: web.Request) -> web.Response:
        return web.Response(body=b"[" * 100_000)

    async def main() -> None:
        engine = ScriptedEngine(deep)
        async with serving(engine):
            client = HttpEngine(engine.url)
            with pytest.raises(EngineError, match="makes no sense"):
                await client.generate(request())
            await client.close()

    run(main())


def test_an_answer_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(http: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(http)
        while True:
            await stream.write(b" " * 1000)

    async def main() -> None:
        monkeypatch.setattr(client_module, "MAX_ANSWER_BYTES", 10_000)
        async with serving(engine := ScriptedEngine(endless)):
            client = HttpEngine(engine.url)
            with pytest.raises(EngineError, match="exceeds 10000 bytes"):
                await client.generate(request())
            await client.close()

    run(main())


def test_nonsense_is_an_error_on_every_way_completions_come() -> None:
    async def main() -> None:
        short = made(logprobs=(-0.1,))
        engine = ScriptedEngine(says([{"token_ids": "x"}]), says([short]))
        engine.finished["r"] = (short,)
        async with serving(engine):
            client = HttpEngine(engine.url)
            with pytest.raises(EngineError, match="makes no sense"):
                await client.generate(request())
            with pytest.raises(EngineError, match="makes no sense: 3 ids and 1 log-probs"):
                await client.generate(request())
            with pytest.raises(EngineError, match="makes no sense: 3 ids and 1 log-probs"):
                await client.attach("r")
            with pytest.raises(EngineError, match="makes no sense: 3 ids and 1 log-probs"):
                await client.cancel("r")
            await client.close()

    run(main())


@pytest.mark.parametrize(
    ("kind", "status", "error"),
    [
        ("refused", 400, RequestRefused),
        ("error", 500, EngineError),
        ("unavailable", 503, EngineUnavailable),
    ],
)
def test_refusals_failures_and_outages_are_told_apart(
    kind: str, status: int, error: type[EngineError]
) -> None:
    async def main() -> None:
        engine = ScriptedEngine(always(kind, status))
        async with serving(engine):
            client = HttpEngine(engine.url)
            with pytest.raises(EngineError, match=f"this is {kind}") as raised:
                await client.generate(request())
            assert type(raised.value) is error
            await client.close()

    run(main())


def test_an_engine_that_is_not_there_is_unavailable() -> None:
    async def main() -> None:
        async with serving(engine := ScriptedEngine()):
            pass
        client = HttpEngine(engine.url)
        with pytest.raises(EngineUnavailable):
            await client.generate(request())
        with pytest.raises(EngineUnavailable):
            await client.state()
        await client.close()

    run(main())


def test_an_engine_that_says_it_is_dying_is_not_healthy_though_it_tells_its_state() -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        async with serving(engine):
            client = HttpEngine(engine.url)
            await client.check_health()
            engine.ill = True
            assert (await client.state()).version == Version(0, 1)
            with pytest.raises(EngineUnavailable, match="decode thread ended"):
                await client.check_health()
            assert await client.generate(request()) == (completion(7),)
            await client.close()

    run(main())
