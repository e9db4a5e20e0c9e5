"""What goes wrong at the gateway: every end of a request has an answer, a reason that is counted,
and a record or none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from connectors.engines.types import EngineError, RequestRefused, VersionGone
from connectors.gateway import calls
from connectors.records import Version
from connectors.text import Text
from tests.connectors.gateway_bench import (
    WEATHER,
    Bench,
    Journal,
    body,
    run,
    served,
    until,
    with_tool_template,
)


@pytest.fixture(scope="module")
def text(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(with_tool_template(tiny_model_path, tmp_path_factory.mktemp("model") / "tools"))


# --------------------------------------------------------------------------------- what goes wrong
@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"{", 400, "malformed_body"),
        (body("hi") | {"top_k": 3}, 400, "unknown_parameter"),
        (body("hi") | {"model": "gpt-5"}, 404, "model_not_found"),
        (body("hi") | {"model": "0.2"}, 404, "model_not_found"),
        (body("x" * 2000), 400, "context_length_exceeded"),
        (body("x" * 20_000), 413, "body_too_large"),
        (body("hi") | {"tools": [{"type": "function", "function": {"name": "f"}}],
                       "messages": [{"role": "tool"}]}, 400, "invalid_value"),
    ],
    ids=["cut", "unknown", "model", "version", "long", "large", "message"],
)  # fmt: skip
def test_what_cannot_be_served_has_its_reason(
    text: Text, data: Any, status: int, code: str
) -> None:
    async def main() -> None:
        async with served(text, max_body_bytes=10_000) as bench:
            got, answer = await bench.post("/v1/chat/completions", data)
            assert (got, answer["error"]["code"]) == (status, code)
            assert set(answer["error"]) == {"message", "type", "param", "code"}
            if code == "model_not_found":
                assert "0.3" in answer["error"]["message"]
            assert await bench.metric(f'refused_total{{reason="{code}"}}') == 1
            assert bench.journal.records == []

    run(main())


def test_urls_that_are_none_and_wrong_methods_have_the_same_shape(text: Text) -> None:
    async def main() -> None:
        async with served(text) as bench:
            status, answer = await bench.post("/v1/completions", {})
            assert (status, answer["error"]["code"]) == (404, "not_found")
            status, answer = await bench.get("/v1/chat/completions")
            assert (status, answer["error"]["code"]) == (405, "bad_method")
            assert await bench.metric('requests_total{route="none",status="404"}') == 1

    run(main())


def test_a_template_that_knows_no_tools_is_said_so(tiny_model_path: Path) -> None:
    async def main() -> None:
        async with served(Text(tiny_model_path)) as bench:
            status, answer = await bench.chat("hi", tools=[WEATHER])
            assert (status, answer["error"]["param"]) == (400, "tools")

    run(main())


def test_versions_held_are_models(text: Text) -> None:
    async def main() -> None:
        async with served(text, "fine") as bench:
            _, listed = await bench.get("/v1/models")
            assert [m["id"] for m in listed["data"]] == ["latest", "shop", "0.3"]
            assert (await bench.get("/v1/models/0.3"))[0] == 200
            status, answer = await bench.get("/v1/models/0.2")
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
            for model in ("latest", "shop", "0.3"):
                assert (await bench.chat("hi", model=model))[0] == 200
            pins = [(r.min_version, r.max_version) for r in bench.pool.requests]
            assert pins == [(None, None), (None, None), (Version(0, 3), Version(0, 3))]

    run(main())


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineError("it broke three times"), 502, "engine_failed"),
        (RequestRefused("too long"), 400, "refused_by_engine"),
        (VersionGone("0.3 is past"), 404, "model_not_found"),
    ],
    ids=["failed", "refused", "gone"],
)
def test_a_call_that_fails_has_an_error_and_no_record(
    text: Text, error: EngineError, status: int, code: str
) -> None:
    async def main() -> None:
        async with served(text, "fine and well") as bench:
            bench.pool.fails = error
            for more in ({}, {"stream": True}):
                got, answer = await bench.chat("hi", **more)
                assert (got, answer["error"]["code"]) == (status, code)
            bench.pool.told_before = 2
            *_, last = await bench.events()
            assert last["error"]["code"] == code  # where the stream had begun; and no [DONE]
            assert bench.journal.records == []
            bench.pool.fails = None
            assert (await bench.chat("hi", {"x-stainless-retry-count": "1"}))[0] == 200
            assert len(bench.calls) == 1

    run(main())


def test_without_an_engine_the_client_is_told_to_try_again(
    text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "OUTAGE_S", 0.05)
    monkeypatch.setattr(calls, "LOOK_S", 0.01)

    async def main() -> None:
        async with served(text, "fine") as bench:
            bench.pool.gate.clear()
            bench.pool.is_held_up = True
            status, answer = await bench.chat("hi")
            assert (status, answer["error"]["code"]) == (503, "engines_unavailable")
            assert bench.pool.num_running == 0

    run(main())


def test_a_call_the_journal_cannot_take_is_served_and_counted(text: Text) -> None:
    async def main() -> None:
        journal = Journal()
        journal.fails = OSError(28, "No space left on device")
        async with served(text, "fine", journal=journal) as bench:
            assert (await bench.chat("hi"))[0] == 200
            assert await bench.metric("unrecorded_total") == 1
            for path in ("/v1/feedback", "/v1/sessions/s/end"):
                status, answer = await bench.post(path, {"session": "s", "value": 1})
                assert (status, answer["error"]["code"]) == (503, "journal_failed")

    run(main())


# ------------------------------------------------------------------------- disconnects and retries
async def hang_up(bench: Bench, headers: dict[str, str] | None = None, **more: Any) -> None:
    """Asks, and goes away once the model is at work."""
    before = len(bench.pool.requests)
    asking = asyncio.create_task(bench.chat("hi", headers, **more))
    await until(lambda: len(bench.pool.requests) > before)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def until_metric(bench: Bench, name: str, value: float) -> None:
    async with asyncio.timeout(10):
        while await bench.metric(name) != value:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_leaves_one_record_that_says_so(text: Text, stream: bool) -> None:
    async def main() -> None:
        async with served(text, "fine and well") as bench:
            bench.pool.gate.clear()
            await hang_up(bench, stream=stream)
            await asyncio.sleep(0.05)
            bench.pool.gate.set()
            await until(lambda: len(bench.calls) == 1)
            (call,) = bench.calls
            assert call.metadata == {"headwater.delivered": "false"}
            assert call.choices[0].message["content"] == "fine and well"
            await until_metric(bench, "disconnects_total", 1)

    run(main())


def test_a_client_that_goes_away_in_its_request_leaves_nothing(text: Text) -> None:
    async def main() -> None:
        async with served(text, "fine") as bench:
            host, port = bench.url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 500\r\n\r\n"
            )
            writer.write(head.encode() + b'{"model": "latest", ')
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.close()
            await until_metric(bench, "disconnects_total", 1)
            assert bench.pool.requests == bench.journal.records == []

    run(main())


def test_a_gateway_that_stops_lets_go_of_answers_that_take_too_long(text: Text) -> None:
    async def main() -> None:
        async with served(text, "fine") as bench:
            bench.pool.gate.clear()
            asking = asyncio.create_task(bench.chat("hi"))
            await until(lambda: bench.pool.num_running == 1)
            await bench.serving.close(0.05)
            status, answer = await asking
            assert (status, answer["error"]["code"]) == (503, "engines_unavailable")
            assert bench.pool.num_running == 0
            assert bench.journal.records == []

    run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_try_joins_what_the_first_began(text: Text, stream: bool) -> None:
    async def main() -> None:
        async with served(text, "fine and well") as bench:
            bench.pool.gate.clear()
            await hang_up(bench, stream=stream)
            url, retry = bench.url + "/v1/chat/completions", {"x-stainless-retry-count": "1"}
            again = asyncio.create_task(
                bench.http.post(url, json=body("hi", stream=stream), headers=retry)
            )
            await asyncio.sleep(0.05)
            bench.pool.gate.set()
            answer = await (await again).text()
            (call,) = bench.calls
            assert call.id in answer
            assert call.metadata == {}
            assert len(bench.pool.requests) == 1
            assert await bench.metric("retries_joined_total") == 1

    run(main())


def test_an_idempotency_key_gives_the_same_answer_again(text: Text) -> None:
    async def main() -> None:
        async with served(text, "one", "two") as bench:
            headers = {"idempotency-key": "k"}
            _, first = await bench.chat("hi", headers)
            _, second = await bench.chat("hi", headers)
            assert first == second
            status, answer = await bench.chat("ho", headers)
            assert (status, answer["error"]["code"]) == (400, "idempotency_key_reused")
            assert len(bench.calls) == 1

    run(main())


def test_equal_requests_that_were_both_answered_are_two_calls(text: Text) -> None:
    async def main() -> None:
        async with served(text, "one", "two") as bench:
            for headers in ({"x-headwater-session": "s"}, {"x-headwater-session": "s"}, {}, {}):
                await bench.chat("hi", headers)
            assert len({call.id for call in bench.calls}) == 4

    run(main())


def test_equal_requests_at_the_same_time_join_in_a_session_only(text: Text) -> None:
    async def main() -> None:
        async with served(text, "fine") as bench:
            bench.pool.gate.clear()
            named = {"x-headwater-session": "s"}
            asking = [asyncio.create_task(bench.chat("hi", h)) for h in (named, named, {}, {})]
            await until(lambda: len(bench.pool.requests) == 3)
            bench.pool.gate.set()
            answers = [answer["id"] for _, answer in await asyncio.gather(*asking)]
            assert answers[0] == answers[1]
            assert len(set(answers)) == len(bench.calls) == 3

    run(main())
