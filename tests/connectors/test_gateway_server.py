"""The gateway over HTTP, with a model that writes what the test says: answers, their records, whose
session they are of, and what is said about them."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from connectors.records import Version
from connectors.text import Text
from connectors.traffic import partition_of
from tests.connectors.gateway_bench import (
    NUM_PARTITIONS,
    WEATHER,
    body,
    run,
    served,
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
            found = await bench.events(logprobs=True, stream_options={"include_usage": True})
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
            found = (await bench.events(tools=[WEATHER]))[:-1]
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
            streamed = (await bench.events(n=2))[:-1]
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
