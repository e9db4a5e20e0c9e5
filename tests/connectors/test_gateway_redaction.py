"""What is redacted is nowhere in the record, also not spelled by ids."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from connectors.config import ConfigError
from connectors.gateway.redaction import Redaction
from connectors.records import Segment, encode
from connectors.traffic import Call, Choice

SSN = r"\d{3}-\d{2}-\d{4}"
CALL = Call(
    id="c",
    session="s",
    task="t",
    time=1.0,
    finished_at=2.0,
    messages=[{"role": "user", "content": "hello"}],
    choices=(
        Choice(
            message={"role": "assistant", "content": "hi"},
            token_ids=(1, 2),
            logprobs=(-0.5, -0.5),
            segments=(Segment(0, 2, 0, 1),),
        ),
    ),
    model="0.1",
    prompt_ids=(7, 8),
    temperature=1.0,
)
CHOICE = CALL.choices[0]


def test_a_call_without_a_match_keeps_its_ids() -> None:
    clean = Redaction([SSN]).call(CALL, "user hello")
    assert clean == CALL
    assert clean.behaviour == "exact"


@pytest.mark.parametrize(
    ("call", "written"),
    [
        (replace(CALL, messages=[{"role": "user", "content": "my number is 123-45-6789"}]), ""),
        (replace(CALL, messages=[{"role": "user", "content": [{"text": "123-45-6789"}]}]), ""),
        (replace(CALL, tools=[{"function": {"name": "f", "description": "123-45-6789"}}]), ""),
        (replace(CALL, choices=(replace(CHOICE, message={"content": "123-45-6789"}),)), ""),
        (replace(CALL, choices=(replace(CHOICE, text="123-45-6789"),)), ""),
        (CALL, "what the model was given: 123-45-6789"),
    ],
    ids=["message", "part", "tool", "answer", "what the model wrote", "prompt"],
)
def test_where_anything_matches_ids_are_left_out(call: Call, written: str) -> None:
    clean = Redaction([SSN]).call(call, written)
    assert b"6789" not in encode(clean)
    assert clean.prompt_ids is None
    assert clean.behaviour == "text"
    assert all((c.token_ids, c.logprobs, c.segments) == (None, None, ()) for c in clean.choices)


def test_metadata_is_redacted_and_costs_no_ids() -> None:
    clean = Redaction([SSN]).call(replace(CALL, metadata={"n": "123-45-6789"}), "")
    assert clean.metadata == {"n": "[redacted]"}
    assert clean.behaviour == "exact"


def test_what_is_no_expression_is_an_error_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"gateway.redact: '\(' is no regular expression"):
        Redaction(["("])
