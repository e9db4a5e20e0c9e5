"""The gateway over HTTP, with a model that writes what the test says: every end of a request has an
answer, a reason that is counted, and a record or none."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from connectors.engines.types import EngineError, RequestRefused, VersionGone
from connectors.gateway import calls
from connectors.records import Version
from connectors.text import Text
from connectors.traffic import partition_of
from tests.connectors.gateway_bench import (
    NUM_PARTITIONS,
    WEATHER,
    Bench,
    Journal,
    ScriptedPool,
    body,
    gateway,
    run,
    until,
    with_tool_template,
)

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
AUTHOR = {"Authorization": "Bearer sk-ada"}
OTHER = {"Authorization": "Bearer sk-bob"}


@pytest.fixture(scope="module")
def text(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(with_tool_template(tiny_model_path, tmp_path_factory.mktemp("model") / "tools"))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("sk-ada ada\nsk-bob bob\n")
    return file


@asynccontextmanager
async def served(text: Text, *written: str, **settings: Any) -> AsyncIterator[Bench]:
    async with gateway(text, ScriptedPool(text, *written), **settings) as bench:
        yield bench


async def events(bench: Bench, **more: Any) -> list[Any]:
    """Of a streamed answer; the last is "[DONE]" if it came."""
    data = msgspec.json.encode(body("hi", stream=True) | more)
    async with bench.http.post(bench.url + "/v1/chat/completions", data=data) as answer:
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        lines = (await answer.text()).split("\n\n")
    found = [line.removeprefix("data: ") for line in lines if line]
    return [f if f == "[DONE]" else msgspec.json.decode(f) for f in found]


# ------------------------------------------------------------------------------------- the answers
def test_an_answer_and_its_record_are_of_the_same_ids(text: Text) -> None:
    async def main() -> None:
        async with served(text, "fine, and you?") as bench:
            status, answer = await bench.chat(
                "hi", {"x-headwater-session": "s", "x-headwater-user": "u", "x-headwater-key": "k"},
                temperature=0.5, logprobs=True, metadata={"a": "b", "headwater.x": "y"},
            )  # fmt: skip
            assert status == 200
            (choice,) = answer["choices"]
            assert choice["message"] == {
                "role": "assistant", "content": "fine, and you?", "refusal": None
            }  # fmt: skip
            assert (choice["finish_reason"], answer["model"]) == ("stop", "0.3")
            (call,) = bench.calls
            (asked,) = bench.pool.requests
            (made,) = call.choices
            assert call.id == answer["id"]
            assert call.prompt_ids == asked.token_ids
            assert text.decode(call.prompt_ids, special=True) == (
                "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
            )
            assert text.decode(made.token_ids, special=True) == "fine, and you?<|im_end|>"
            entries = choice["logprobs"]["content"]
            assert [e["logprob"] for e in entries] == list(made.logprobs)
            assert "".join(e["token"] for e in entries) == "fine, and you?<|im_end|>"
            assert answer["usage"] == {
                "prompt_tokens": len(call.prompt_ids),
                "completion_tokens": len(made.token_ids),
                "total_tokens": len(call.prompt_ids) + len(made.token_ids),
            }
            assert (call.session, call.task, call.user, call.key) == ("s", "t", "u", "k")
            assert (call.model, call.temperature, call.behaviour) == ("0.3", 0.5, "exact")
            assert call.metadata == {"a": "b"}
            assert made.text is None
            (record,) = bench.journal.records
            assert (record.topic, record.key, record.id) == ("agent-traffic", "s", call.id)
            assert record.partition == partition_of("s", NUM_PARTITIONS)
            assert call.id.startswith(f"chatcmpl-{record.partition}-")

    run(main())


def test_a_stream_is_the_same_answer_in_pieces(text: Text) -> None:
    async def main() -> None:
        async with served(text, "fine — and you?") as bench:
            found = await events(bench, logprobs=True, stream_options={"include_usage": True})
            assert found.pop() == "[DONE]"
            usage = found.pop()
            assert usage["choices"] == []
            deltas = [e["choices"][0] for e in found]
            assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(d["delta"].get("content", "") for d in deltas) == "fine — and you?"
            assert [d["finish_reason"] for d in deltas] == [None] * (len(deltas) - 1) + ["stop"]
            (call,) = bench.calls
            told = [e["logprob"] for d in deltas if d["logprobs"] for e in d["logprobs"]["content"]]
            assert told == list(call.choices[0].logprobs or ())
            assert usage["usage"]["completion_tokens"] == len(told)
            assert {e["id"] for e in [*found, usage]} == {call.id}
            assert call.choices[0].message["content"] == "fine — and you?"

    run(main())


def test_tool_calls_are_read_from_the_text_and_the_next_turn_extends_it(text: Text) -> None:
    async def main() -> None:
        async with served(text, f"So: {CALL}", "rain it is") as bench:
            _, answer = await bench.chat("hi", tools=[WEATHER])
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] == "So:"
            (called,) = choice["message"]["tool_calls"]
            assert called["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
            result = {"role": "tool", "tool_call_id": called["id"], "content": "rain"}
            said = [{"role": "user", "content": "hi"}, choice["message"], result]
            status, _ = await bench.chat(said, tools=[WEATHER])
            assert status == 200
            first, second = bench.calls
            assert first.session == second.session
            made = first.choices[0]
            whole = (*(first.prompt_ids or ()), *(made.token_ids or ()))
            assert (second.prompt_ids or ())[: len(whole)] == whole
            assert (made.text, made.finish_reason) == (f"So: {CALL}", "tool_calls")
            assert made.message["tool_calls"] == [called]

    run(main())


def test_streamed_tool_calls_come_at_the_end_and_no_mark_is_shown(text: Text) -> None:
    async def main() -> None:
        async with served(text, f"So: {CALL} and {CALL}") as bench:
            found = (await events(bench, tools=[WEATHER]))[:-1]
            deltas = [e["choices"][0]["delta"] for e in found]
            assert "".join(d.get("content") or "" for d in deltas) == "So: and"
            (called,) = [d["tool_calls"] for d in deltas if "tool_calls" in d]
            assert [c["index"] for c in called] == [0, 1]
            assert len({c["id"] for c in called}) == 2
            assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"

    run(main())


def test_several_samples_of_a_request_are_one_call(text: Text) -> None:
    async def main() -> None:
        async with served(text, "one", "two", "three") as bench:
            _, answer = await bench.chat("hi", n=3)
            told = [c["message"]["content"] for c in answer["choices"]]
            assert told == ["one", "two", "three"]
            (call,) = bench.calls
            assert [c.message["content"] for c in call.choices] == told
            streamed = (await events(bench, n=2))[:-1]
            assert {e["choices"][0]["index"] for e in streamed} == {0, 1}

    run(main())


def test_an_update_in_mid_answer_is_told_token_by_token(text: Text) -> None:
    async def main() -> None:
        async with served(text, "a long answer") as bench:
            bench.pool.changes = Version(0, 4)
            _, answer = await bench.chat("hi")
            (call,) = bench.calls
            assert answer["model"] == call.model == "0.4"
            assert [s.number for s in call.choices[0].segments] == [3, 4]

    run(main())


# ------------------------------------------------------------------------------ sessions, headers
def test_a_session_is_named_by_path_or_header_or_told_by_the_messages(text: Text) -> None:
    async def main() -> None:
        async with served(text, "fine") as bench:
            asked = msgspec.json.encode(body("hi"))
            async with bench.http.post(
                bench.url + "/s/of%20path/v1/chat/completions", data=asked
            ) as r:
                assert r.headers["x-headwater-session"] == "of path"
                assert r.headers["x-headwater-version"] == "0.3"
                message = (await r.json())["choices"][0]["message"]
            await bench.chat("hi", {"x-headwater-session": "of header"})
            said = [{"role": "user", "content": "hi"}, message, {"role": "user", "content": "so?"}]
            await bench.chat(said)
            await bench.chat("something else")
            sessions = [call.session for call in bench.calls]
            assert sessions[:2] == ["of path", "of header"]
            assert sessions[2] == "of header"  # the latest that said this
            assert sessions[3].startswith("auto-")

    run(main())


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"x-headwater-session": "x" * 300}, "bad_header"),
        ({"x-headwater-session": "é"}, "bad_header"),
        ({"x-headwater-task": "none"}, "unknown_task"),
        ({}, "unknown_task"),
        ({"x-headwater-task": "a", "x-headwater-record": "maybe"}, "bad_header"),
    ],
    ids=str,
)
def test_headers_that_make_no_sense_are_refused(
    text: Text, headers: dict[str, str], code: str
) -> None:
    async def main() -> None:
        async with served(text, tasks=("a", "b")) as bench:
            status, answer = await bench.chat("hi", headers)
            assert (status, answer["error"]["code"]) == (400, code)
            assert bench.calls == []

    run(main())


def test_a_client_that_opts_out_leaves_no_record_and_its_ids_go_on(text: Text) -> None:
    async def main() -> None:
        async with served(text, "fine") as bench:
            headers = {"x-headwater-session": "s", "x-headwater-record": "off"}
            status, answer = await bench.chat("hi", headers | {"x-headwater-end": "true"})
            assert status == 200
            assert bench.journal.records == []
            await bench.chat("hi", headers)
            message = answer["choices"][0]["message"]
            said = [{"role": "user", "content": "hi"}, message, {"role": "user", "content": "so?"}]
            await bench.chat(said, {"x-headwater-session": "s"})
            (call,) = bench.calls
            assert call.behaviour == "exact"

    run(main())


def test_a_session_ends_by_header_or_by_its_own_request(text: Text) -> None:
    async def main() -> None:
        async with served(text, "fine") as bench:
            await bench.chat("hi", {"x-headwater-session": "a", "x-headwater-end": "true"})
            status, _ = await bench.post("/v1/sessions/b/end", {})
            assert status == 200
            assert [end.session for end in bench.ends] == ["a", "b"]
            assert len(bench.sessions) == 0
            assert [r.key for r in bench.journal.records] == ["a", "a", "b"]

    run(main())


def test_redacted_calls_have_no_ids(text: Text) -> None:
    async def main() -> None:
        async with served(
            text, "your number is 123-45-6789", redact=[r"\d{3}-\d{2}-\d{4}"]
        ) as bench:
            _, answer = await bench.chat("what is it?")
            assert "123-45-6789" in answer["choices"][0]["message"]["content"]
            assert b"123-45-6789" not in bench.journal.records[0].value
            (call,) = bench.calls
            assert call.behaviour == "text"
            assert await bench.metric("redacted_total") == 1

    run(main())


# -------------------------------------------------------------------------------------------- keys
def test_keys_keep_their_sessions_apart(text: Text, keys: Path) -> None:
    async def main() -> None:
        async with served(text, "fine", keys_file=keys) as bench:
            for headers in (AUTHOR, OTHER):
                _, answer = await bench.chat("hi", headers | {"x-headwater-session": "s"})
            message = answer["choices"][0]["message"]
            said = [{"role": "user", "content": "hi"}, message, {"role": "user", "content": "so?"}]
            await bench.chat(said, AUTHOR)
            assert [c.session for c in bench.calls] == ["ada:s", "bob:s", "ada:s"]
            assert [c.user for c in bench.calls] == ["ada", "bob", "ada"]
            await bench.post("/v1/sessions/s/end", {}, OTHER)
            assert bench.ends[0].session == "bob:s"

    run(main())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/feedback", "/v1/sessions/s/end"])
def test_without_a_key_nothing_is_served(text: Text, keys: Path, path: str) -> None:
    async def main() -> None:
        async with served(text, keys_file=keys) as bench:
            for headers in ({}, {"Authorization": "Bearer sk-eve"}):
                status, answer = await bench.post(path, body("hi"), headers)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
                assert answer["error"]["type"] == "invalid_request_error"
            assert (await bench.get("/v1/models"))[0] == 401
            assert (await bench.get("/health"))[0] == 200
            assert await bench.metric('refused_total{reason="invalid_api_key"}') == 3
            assert bench.journal.records == []

    run(main())


# ---------------------------------------------------------------------------------------- feedback
def test_feedback_finds_the_partition_of_its_session_also_by_the_call_alone(text: Text) -> None:
    async def main() -> None:
        async with served(text, "fine") as bench:
            _, answer = await bench.chat("hi", {"x-headwater-session": "s"})
            call = answer["id"]
            for about in ({"session": "s"}, {"call": call}, {"session": "s", "call": call}):
                status, _ = await bench.post(
                    "/v1/feedback", {"value": True, "name": "thumb", **about}
                )
                assert status == 200
            assert [(f.session, f.call) for f in bench.facts] == [
                ("s", None),
                ("", call),
                ("s", call),
            ]
            written = bench.journal.records[1:]
            assert [r.key for r in written] == ["s", call, "s"]
            assert {r.partition for r in written} == {partition_of("s", NUM_PARTITIONS)}
            assert {r.topic for r in written} == {"feedback"}

    run(main())


def test_feedback_about_what_is_not_ones_own_is_not_found(text: Text, keys: Path) -> None:
    async def main() -> None:
        async with served(text, "fine", keys_file=keys) as bench:
            _, answer = await bench.chat("hi", AUTHOR | {"x-headwater-session": "s"})
            own = answer["id"]
            away = re.sub(r"^chatcmpl-\d+", "chatcmpl-99", own)
            for call, headers in ((own, OTHER), ("chatcmpl-abc", AUTHOR), (away, AUTHOR)):
                status, answer = await bench.post(
                    "/v1/feedback", {"calls": [own, call], "value": 1}, headers
                )
                assert (status, answer["error"]["code"]) == (404, "call_not_found")
            assert bench.facts == []  # all of a body, or none
            status, _ = await bench.post("/v1/feedback", {"call": own, "value": 1}, AUTHOR)
            assert status == 200

    run(main())


def test_feedback_may_come_before_its_session_and_after_its_end(text: Text) -> None:
    async def main() -> None:
        async with served(text, "fine") as bench:
            assert (await bench.post("/v1/feedback", {"session": "later", "value": 1}))[0] == 200
            await bench.post("/v1/sessions/s/end", {})
            assert (await bench.post("/v1/feedback", {"session": "s", "value": 1}))[0] == 200
            assert (await bench.post("/s/of-path/v1/feedback", {"value": 0}))[0] == 200
            assert [f.session for f in bench.facts] == ["later", "s", "of-path"]
            status, answer = await bench.post("/v1/feedback", {"session": "s"})
            assert (status, answer["error"]["code"]) == (400, "missing_required_parameter")

    run(main())


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
            *_, last = await events(bench)
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
