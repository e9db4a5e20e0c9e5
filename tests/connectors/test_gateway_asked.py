"""What of OpenAI's request is served, and what is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from connectors.engines.types import Sampling
from connectors.gateway.asked import Asked, read
from connectors.gateway.errors import Refused
from tests.connectors.gateway_bench import WEATHER, body

DEFAULT = Sampling(temperature=0.7, top_p=0.9, max_tokens=50, stop_ids=(3,))


def asked(**more: Any) -> Asked:
    return read(msgspec.json.encode(body("hi") | more), DEFAULT)


def refused(data: bytes) -> Refused:
    with pytest.raises(Refused) as error:
        read(data, DEFAULT)
    return error.value


def test_what_a_request_leaves_open_is_as_the_run_samples() -> None:
    assert asked().sampling == DEFAULT
    assert asked(temperature=None, top_p=None, max_tokens=None, seed=None).sampling == DEFAULT


def test_what_a_request_says_counts() -> None:
    found = asked(temperature=0, top_p=0.5, max_completion_tokens=7, seed=5).sampling
    assert found == Sampling(temperature=0.0, top_p=0.5, max_tokens=7, stop_ids=(3,), seed=5)
    assert asked(max_tokens=9).sampling.max_tokens == 9
    assert asked(n=3).num_samples == 3
    assert asked(stream=True, stream_options={"include_usage": True}).include_usage


@pytest.mark.parametrize(
    "hint",
    [{"store": True}, {"service_tier": "auto"}, {"logit_bias": {}}, {"stop": []}, {"stop": None},
     {"presence_penalty": 0}, {"response_format": {"type": "text"}}, {"top_logprobs": 0},
     {"parallel_tool_calls": True}, {"modalities": ["text"]}, {"tool_choice": "auto"}],
    ids=str,
)  # fmt: skip
def test_what_changes_nothing_is_taken(hint: dict[str, Any]) -> None:
    asked(**hint)


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"top_logprobs": 5, "logprobs": True}, "top_logprobs", "unsupported_parameter"),
        ({"stop": ["\n"]}, "stop", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "unsupported_parameter"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_parameter"),
        ({"logit_bias": {"5": 10}}, "logit_bias", "unsupported_parameter"),
        ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
        ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
        ({"top_k": 5}, "top_k", "unknown_parameter"),
        ({"stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"max_tokens": "5"}, "max_tokens", "invalid_value"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages", "invalid_value"),
        ({"messages": [{"content": "x"}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages",
         "invalid_value"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f",
          "arguments": "{"}}]}]}, "messages", "invalid_value"),
        ({"tools": [3]}, "tools", "invalid_value"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_by_name(
    given: dict[str, Any], param: str, code: str
) -> None:
    error = refused(msgspec.json.encode(body("hi") | given))
    assert (error.status, error.code) == (400, code)
    assert error.param is not None
    assert error.param.startswith(param)


@pytest.mark.parametrize(
    ("data", "param", "code"),
    [
        (b"{", None, "malformed_body"),
        (b"", None, "malformed_body"),
        (b"\xff\xfe", None, "malformed_body"),
        (b'{"model": "latest", "messages": [{"role": "user", "content": "\xff"}]}', None,
         "malformed_body"),
        (b'{"model": "m", "messages": [{"x": ' + b"[" * 100_000, None, "malformed_body"),
        (b"[]", None, "invalid_value"),
        (b'{"model": "latest"}', "messages", "missing_required_parameter"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "model",
         "missing_required_parameter"),
    ],
    ids=["cut", "empty", "no text", "other bytes", "deep", "a list", "no messages", "no model"],
)  # fmt: skip
def test_what_is_no_request_is_refused_with_its_reason(
    data: bytes, param: str | None, code: str
) -> None:
    error = refused(data)
    assert (error.status, error.code, error.param) == (400, code, param)


def test_equal_bodies_have_equal_digests_whatever_the_order_of_their_fields() -> None:
    one = read(b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 1}', DEFAULT)
    two = read(b'{"n": 1, "messages": [{"content": "x", "role": "user"}], "model": "m"}', DEFAULT)
    assert one.digest == two.digest
    assert one.digest != asked().digest


def test_tool_calls_are_heard_where_tools_are_given_and_may_be_called() -> None:
    assert not asked().hears_tools
    assert asked(tools=[WEATHER]).hears_tools
    assert not asked(tools=[WEATHER], tool_choice="none").hears_tools


def test_a_developer_is_the_system_that_templates_know() -> None:
    found = asked(messages=[{"role": "developer", "content": "x", "name": None}])
    assert found.said == [{"role": "system", "content": "x"}]
