"""Files as they come: cut off, mixed, in other encodings. One bad line ends nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.imports.fields import seconds
from connectors.imports.outcome import REASONS, LeftOut
from connectors.imports.read import Import
from connectors.imports.rows import rows
from connectors.traffic import Call

CHAT = {
    "messages": [{"role": "user", "content": "Grüezi"}, {"role": "assistant", "content": "Ciao"}]
}
LINE = json.dumps(CHAT, ensure_ascii=False).encode()


def values(path: Path) -> list[Any]:
    """Rows, reasons in place of what was left out."""
    found = [row.value for row in rows(path)]
    return [value.reason if isinstance(value, LeftOut) else value for value in found]


def outcome(path: Path) -> list[str]:
    records = [found.record for found in Import(path)]
    return [r.reason if isinstance(r, LeftOut) else "call" for r in records]


def test_lines_of_every_kind_pass_by_a_bad_one(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    bad = [b"{", b'"text"', b"7", b"null", b"[1]", b'{"a": "\xff"}', b'{"other": 1}', b"{" * 5000]
    path.write_bytes(b"\n\n".join([LINE, *bad, LINE]))
    assert outcome(path) == [
        "call", "not_json", "unknown_format", "unknown_format", "unknown_format", "unknown_format",
        "bad_encoding", "unknown_format", "not_json", "call",
    ]  # fmt: skip


def test_a_row_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\n" + LINE + b"\n\n{\n")
    assert [row.where for row in rows(path)] == ["line 2", "line 4"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("packed", [False, True])
def test_byte_order_marks_and_gzip_change_nothing(
    tmp_path: Path, encoding: str, packed: bool
) -> None:
    text = (LINE.decode() + "\r\n").encode(encoding) + (
        b"" if encoding != "utf-16" else (LINE.decode() + "\n").encode("utf-16-le")
    )
    path = tmp_path / "log.jsonl"
    path.write_bytes(gzip.compress(text) if packed else text)
    assert values(path) == [CHAT] * (2 if encoding == "utf-16" else 1)


def test_a_file_cut_in_its_last_line_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(LINE + b"\n" + LINE[:-5])
    assert values(path) == [CHAT, "truncated"]


def test_a_cut_gzip_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    noise = [json.dumps({**CHAT, "n": hash(str(n))}).encode() for n in range(2000)]
    packed = gzip.compress(b"\n".join(noise))
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(packed[: len(packed) // 2])
    found = values(path)
    assert 100 < len(found) < 2000
    assert found[-1] == "truncated"
    assert "truncated" not in found[:-1]


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_is_read_element_by_element(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "log.json"
    path.write_text("\ufeff" + json.dumps([CHAT, {"x": 1.5}], indent=indent))
    assert values(path) == [CHAT, {"x": 1.5}]
    path.write_text(json.dumps([CHAT, CHAT], indent=indent)[:-20])
    assert values(path) == [CHAT, "truncated"]


def test_a_document_over_many_lines_is_opened_and_one_a_line_is_not(tmp_path: Path) -> None:
    document = {"resourceSpans": [{"scopeSpans": []}, {"scopeSpans": []}]}
    path = tmp_path / "spans.json"
    path.write_text(json.dumps(document, indent=2))
    assert values(path) == [{"resourceSpans": [{"scopeSpans": []}]}] * 2
    path.write_text((json.dumps(document) + "\n") * 2)
    assert values(path) == [document] * 2


def test_a_damaged_parquet_file_is_one_problem_and_the_next_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + b"\0" * 100)
    (tmp_path / "b.jsonl").write_bytes(LINE)
    assert outcome(tmp_path) == ["damaged", "call"]


def test_a_table_with_an_open_quote_ends_there_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "observations.csv"
    path.write_text('id,trace_id,type,input,output\no1,t,GENERATION,Hi,Ho\no2,t,GENERATION,"Hi\n')
    assert outcome(path) == ["call", "truncated"]


def test_calls_without_times_follow_each_other_as_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    dated = {**CHAT, "time": "2026-09-21T13:33:20Z"}
    path.write_text("".join(json.dumps({**row, "n": n}) + "\n"
                            for n, row in enumerate([CHAT, dated, CHAT, CHAT])))  # fmt: skip
    times = [f.record.time for f in Import(path) if isinstance(f.record, Call)]
    assert times == pytest.approx([0.001, 1789997600.0, 1789997600.001, 1789997600.002], abs=1e-6)


@pytest.mark.parametrize(
    "written",
    [1789997600, 1789997600.0, "1789997600", 1789997600_000, 1789997600_000_000,
     "1789997600000000000", "2026-09-21T13:33:20Z", "2026-09-21 13:33:20.000000",
     "2026-09-21T15:33:20+02:00"],
)  # fmt: skip
def test_a_time_is_read_however_it_is_written(written: Any) -> None:
    assert seconds(written) == 1789997600.0


@pytest.mark.parametrize("written", [None, "", "soon", True, -5, float("nan"), [], "inf"])
def test_what_is_no_time_is_none(written: Any) -> None:
    assert seconds(written) is None


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_is_done_to_a_log_every_row_has_an_outcome(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    samples = sorted(Path(__file__).parent.joinpath("samples").iterdir())
    sample = data.draw(st.sampled_from(samples))
    content = bytearray(sample.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 20))] = data.draw(st.binary(max_size=5))
    path = tmp_path_factory.mktemp("log") / sample.name
    path.write_bytes(bytes(content))
    assert {f.record.reason for f in Import(path) if isinstance(f.record, LeftOut)} <= set(REASONS)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_field_of_another_type_is_an_outcome_too(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    samples = sorted(Path(__file__).parent.joinpath("samples").glob("*.jsonl"))
    lines = data.draw(st.sampled_from(samples)).read_text().splitlines()
    row = json.loads(data.draw(st.sampled_from(lines)))
    at: Any = row
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not at[key] or not isinstance(at[key], dict | list) or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = data.draw(JSON)
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    path.write_text(json.dumps(row))
    assert {f.record.reason for f in Import(path) if isinstance(f.record, LeftOut)} <= set(REASONS)
