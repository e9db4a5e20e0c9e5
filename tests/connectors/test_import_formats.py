"""What each format's sample becomes: classes, roles, tool calls, sessions, labels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from connectors.imports.outcome import REASONS, LeftOut
from connectors.imports.read import Format, Import
from connectors.traffic import Call, Feedback
from operators.traces import assemble, standing

SAMPLES = Path(__file__).parent / "samples"


def read(path: Path, form: Format = "auto") -> list[Call | Feedback | LeftOut]:
    return [found.record for found in Import(path, form)]


def calls(path: Path) -> list[Call]:
    return [record for record in read(path) if isinstance(record, Call)]


def scores(path: Path) -> list[Feedback]:
    return [record for record in read(path) if isinstance(record, Feedback)]


def reasons(path: Path, form: Format = "auto") -> list[str]:
    return [record.reason for record in read(path, form) if isinstance(record, LeftOut)]


def roles(call: Call) -> list[str]:
    return [message["role"] for message in call.messages]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pair(**given: Any) -> dict[str, Any]:
    """A pair whose request, response and choice say what is given."""
    choice = {"message": {"role": "assistant", "content": "Ho"}, **given.pop("choice", {})}
    request = {"messages": [{"role": "user", "content": "Hi"}], **given.pop("request", {})}
    return {"request": request, "response": {"choices": [choice], **given.pop("response", {})},
            **given}  # fmt: skip


# ------------------------------------------------------------------------------------------- pairs
def test_pairs_are_exact_as_far_as_ids_log_probs_and_versions_are_there() -> None:
    found = {call.id: standing(call, 1.0)[0] for call in calls(SAMPLES / "openai.jsonl")}
    assert found == {
        "chatcmpl-1": "exact",
        "chatcmpl-2": "exact",
        "chatcmpl-3": "recomputed",  # no log-probs
        "chatcmpl-4": "text",  # no ids
        "chatcmpl-5": "text",  # ids of another model
        "chatcmpl-6": "recomputed",  # log-probs before temperature 0.7
        "chatcmpl-7": "text",  # a penalty
    }
    assert reasons(SAMPLES / "openai.jsonl") == ["failed_call", "tool_unanswered"]


def test_a_pairs_tool_call_becomes_one_exact_row_with_its_answer() -> None:
    session = [call for call in calls(SAMPLES / "openai.jsonl") if call.session == "s1"]
    (called,) = session[0].choices[0].message["tool_calls"]
    assert called["function"] == {"name": "weather", "arguments": {"city": "Bern"}}
    assert roles(session[1]) == ["user", "assistant", "tool"]
    (row,), problems = assemble(session, temperature=1.0, tokenise=lambda messages, tools: [])
    assert problems == []
    assert row.behaviour == "exact"
    assert row.row.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert row.row.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 1, 1]
    assert row.row.logprobs[[3, 4, 6, 7]].tolist() == [-0.5, -0.25, -0.125, -1.0]


def test_sglang_says_ids_and_log_probs_in_its_meta_info() -> None:
    (call,) = calls(SAMPLES / "sglang.jsonl")
    (choice,) = call.choices
    assert (call.prompt_ids, choice.token_ids, choice.logprobs) == ((1, 2), (7, 8), (-0.5, -0.25))
    assert call.behaviour == "exact"


@pytest.mark.parametrize(
    ("request_", "content", "behaviour"),
    [
        ({"temperature": 1.0}, [{"token": "token_id:7", "logprob": -0.5}], "exact"),
        ({}, [{"token": "token_id:7", "logprob": -0.5}], "recomputed"),  # nothing tells at what
        ({"temperature": 1.0}, [{"token": "Ho", "logprob": -0.5}], "text"),
        ({"temperature": 1.0}, [{"token": "token_id:7", "logprob": 0.5}], "recomputed"),
        ({"temperature": 1.0}, [{"token": "token_id:7", "logprob": None}], "recomputed"),
        ({"temperature": 1.0, "logit_bias": {"5": 1}}, [{"token": "token_id:7", "logprob": -0.5}],
         "text"),
    ],
)  # fmt: skip
def test_ids_kept_as_tokens_count_and_log_probs_that_are_none_do_not(
    tmp_path: Path, request_: dict[str, Any], content: list[Any], behaviour: str
) -> None:
    row = pair(
        request=request_,
        response={"prompt_token_ids": [1, 2], "model": "0.3"},
        choice={"logprobs": {"content": content}},
    )
    (call,) = calls(write(tmp_path / "log.jsonl", row))
    assert standing(call, 1.0)[0] == behaviour


def test_a_pair_without_id_or_session_is_named_by_its_content(tmp_path: Path) -> None:
    one, other = pair(), pair(request={"user": "u"}, response={"created": 5})
    found = calls(write(tmp_path / "a.jsonl", one, other))
    again = calls(write(tmp_path / "b.jsonl", other, one))
    assert [call.id for call in found] == [call.id for call in again][::-1]
    assert len({call.session for call in found}) == 2


# ------------------------------------------------------------------------------------------- spans
def test_spans_of_a_trace_are_of_the_conversation_that_one_of_them_names() -> None:
    first, second, older, event = calls(SAMPLES / "otel.jsonl")
    assert [first.session, second.session] == ["conv-1", "conv-1"]  # the last span says so
    assert older.session == event.session == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert [first.id, second.id] == ["resp-1", "resp-2"]
    assert (first.time, first.finished_at) == (1790000002.0, 1790000002.5)
    assert {call.behaviour for call in (first, second, older, event)} == {"text"}
    assert reasons(SAMPLES / "otel.jsonl") == [
        "not_a_call", "not_a_call", "no_messages", "failed_call", "not_a_call",
    ]  # fmt: skip


def test_parts_of_a_spans_messages_become_contents_tool_calls_and_answers() -> None:
    first, second, *_ = calls(SAMPLES / "otel.jsonl")
    assert roles(first) == ["system", "user"]
    assert first.tools[0]["function"]["name"] == "weather"
    (called,) = first.choices[0].message["tool_calls"]
    assert called["function"] == {"name": "weather", "arguments": {"city": "Bern"}}
    assert first.choices[0].finish_reason == "tool_call"
    assert roles(second) == ["user", "assistant", "tool"]  # structured, not JSON in a string
    assert second.messages[2]["content"] == '{"degrees":12}'
    assert second.choices[0].message["content"] == "It is 12 degrees."
    assert second.choices[0].message["reasoning_content"] == "Mild."


def test_numbered_attributes_of_older_spans_are_messages_too() -> None:
    _, _, older, event = calls(SAMPLES / "otel.jsonl")
    assert older.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
    ]
    (called,) = older.choices[0].message["tool_calls"]
    assert called["function"] == {"name": "weather", "arguments": {"city": "Thun"}}
    assert older.choices[0].finish_reason == "tool_calls"
    assert event.choices[0].message["content"] == "Mild."  # of the details event


def test_an_evaluation_of_a_span_is_feedback_about_its_call() -> None:
    (said,) = scores(SAMPLES / "otel.jsonl")
    assert (said.name, said.value, said.session, said.call) == ("helpful", 0.75, "conv-1", "resp-2")
    assert said.time == 1790000010.0


def test_an_evaluation_without_a_number_leaves_the_call_its_span_is(tmp_path: Path) -> None:
    row = json.loads((SAMPLES / "otel.jsonl").read_text().splitlines()[0])
    (event,) = row["resourceSpans"][0]["scopeSpans"][0]["spans"][2]["events"]
    event["attributes"][1]["value"] = {"stringValue": "good"}
    path = write(tmp_path / "otel.jsonl", row)
    assert [call.id for call in calls(path)] == ["resp-1", "resp-2"]
    assert "score_without_number" in reasons(path)


# ---------------------------------------------------------------------------------------- langfuse
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_langfuse_generations_are_calls_and_numbers_are_feedback(
    tmp_path: Path, suffix: str
) -> None:
    for kind in ("observations", "scores"):
        name = f"langfuse_{kind}.{suffix}"
        (tmp_path / name).write_bytes((SAMPLES / name).read_bytes())
    first, third, bare = calls(tmp_path)
    assert [first.session, third.session, bare.session] == ["conv-1", "conv-1", "t2"]
    assert (first.user, first.model, first.temperature) == ("u1", "gpt-4o", 0.5)
    assert (first.time, first.finished_at) == (1789997600.0, 1789997601.5)  # 13:33:20 in UTC
    assert first.choices[0].message["tool_calls"][0]["function"]["name"] == "weather"
    assert first.tools[0]["function"]["name"] == "weather"
    assert roles(third) == ["user", "assistant", "tool"]
    assert third.finished_at == third.time  # its end lies before its start
    assert bare.messages == [{"role": "user", "content": "Hi"}]
    thumbs, solved = scores(tmp_path)
    assert (thumbs.session, thumbs.call, thumbs.value) == ("conv-1", "o3", 1.0)
    assert (solved.session, solved.call, solved.value) == ("t2", None, 0.0)
    assert reasons(tmp_path) == [
        "not_a_call", "failed_call", "score_without_number", "score_of_nothing",
    ]  # fmt: skip


def test_langfuse_parquet_and_json_say_the_same_as_its_lines(tmp_path: Path) -> None:
    rows = [
        json.loads(line)
        for line in (SAMPLES / "langfuse_observations.jsonl").read_text().splitlines()
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "observations.parquet")
    (tmp_path / "observations.json").write_text(json.dumps(rows, indent=1))
    expected = calls(SAMPLES / "langfuse_observations.jsonl")
    assert calls(tmp_path / "observations.json") == expected
    assert [call.id for call in calls(tmp_path / "observations.parquet")] == ["o1", "o3", "o4"]


def test_a_score_that_comes_before_its_trace_finds_the_session(tmp_path: Path) -> None:
    lines = [
        (SAMPLES / f"langfuse_{kind}.jsonl").read_text() for kind in ("scores", "observations")
    ]
    (tmp_path / "all.jsonl").write_text("".join(lines))
    assert [said.session for said in scores(tmp_path / "all.jsonl")] == ["conv-1", "t2"]


def test_a_trace_that_holds_its_observations_and_scores_is_opened(tmp_path: Path) -> None:
    trace = {
        "id": "t9", "sessionId": "conv-9", "userId": "u",
        "observations": [{"id": "o9", "type": "GENERATION", "input": "Hi", "output": "Ho"}],
        "scores": [{"id": "s9", "name": "ok", "value": 1, "dataType": "BOOLEAN"}],
    }  # fmt: skip
    path = write(tmp_path / "trace.jsonl", trace)
    (call,), (said,) = calls(path), scores(path)
    assert (call.session, call.user, said.session) == ("conv-9", "u", "conv-9")


# ------------------------------------------------------------------------------------- transcripts
def test_each_turn_of_a_transcript_answers_what_stands_before_it() -> None:
    hello, bye, weather = calls(SAMPLES / "messages.jsonl")
    assert (roles(hello), roles(bye)) == (["user"], ["user", "assistant", "user"])
    assert (hello.session, hello.task) == (bye.session, "support")
    assert hello.time < bye.time
    assert weather.choices[0].message["tool_calls"]  # the turn of weight 0 is no call
    assert reasons(SAMPLES / "messages.jsonl") == ["bad_message"]


def test_sharegpts_function_calls_and_observations_keep_their_roles() -> None:
    called, said = calls(SAMPLES / "sharegpt.jsonl")
    assert roles(called) == ["system", "user"]
    assert roles(said) == ["system", "user", "assistant", "tool"]
    assert called.choices[0].message["tool_calls"][0]["function"]["name"] == "weather"
    assert reasons(SAMPLES / "sharegpt.jsonl") == ["no_answer"]


@pytest.mark.parametrize(("sample", "learnt"), [("messages", [1, 1]), ("sharegpt", [1, 1])])
def test_the_calls_of_a_transcript_are_one_row_that_learns_each_turn(
    sample: str, learnt: list[int]
) -> None:
    asked: list[list[int]] = []

    def tokenise(messages: Any, tools: Any) -> Any:
        asked.append([m["weight"] for m in messages if m["role"] == "assistant"])
        return [(np.arange(4, dtype=np.int32), np.array([False, True, True, True]))]

    found = calls(SAMPLES / f"{sample}.jsonl")
    session = [call for call in found if call.session == found[0].session]
    (row,), problems = assemble(session, temperature=1.0, tokenise=tokenise)
    assert (asked, problems) == ([learnt], [])
    assert (row.behaviour, row.row.turns) == ("text", 2)


# -------------------------------------------------------------------------------------------- all
def test_every_sample_reads_the_same_twice_under_ids_of_its_own() -> None:
    first, again = read(SAMPLES), read(SAMPLES)
    named = [record for record in first if not isinstance(record, LeftOut)]
    assert named == [record for record in again if not isinstance(record, LeftOut)]
    assert {r.reason for r in first if isinstance(r, LeftOut)} <= set(REASONS)


def test_a_format_that_is_asked_for_leaves_out_lines_of_others() -> None:
    assert set(reasons(SAMPLES / "sharegpt.jsonl", "openai")) == {"other_format"}


def test_the_documentation_gives_each_reason_once() -> None:
    page = (Path(__file__).parents[2] / "docs" / "logs.md").read_text().split("## Left out")[1]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(REASONS)
