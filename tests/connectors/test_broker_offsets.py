"""Committed offsets on disk: they are there again after any end, and damage is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.broker import offsets as module
from connectors.broker.errors import CorruptLog
from connectors.broker.log import Log
from connectors.broker.offsets import Committed, Offsets, Where
from tests.connectors.broker_wire import batch


def committed(offset: int) -> Committed:
    return Committed(offset, 0, f"at {offset}")


def store(offsets: Offsets, group: str, changes: dict[Where, Committed | None]) -> None:
    asyncio.run(offsets.store(group, changes))


def content(offsets: Offsets) -> dict[str, dict[Where, Committed]]:
    return {group: dict(offsets.of(group)) for group in offsets}


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.log"))


def test_what_is_committed_last_is_there_when_opened_again(tmp_path):
    offsets = Offsets(tmp_path, sync=False)
    store(offsets, "g", {("t", 0): committed(1), ("t", 1): committed(2)})
    store(offsets, "h", {("t", 0): committed(3)})
    store(offsets, "g", {("t", 0): committed(5)})
    store(offsets, "h", {("t", 0): None})
    expected = {"g": {("t", 0): committed(5), ("t", 1): committed(2)}}
    assert content(offsets) == expected
    assert content(Offsets(tmp_path, sync=False)) == expected
    assert content(Offsets(tmp_path, sync=True)) == expected


def test_the_log_of_commits_stays_small(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "COMPACT_AFTER", 50)
    monkeypatch.setattr(module, "SEGMENT_BYTES", 2000)
    offsets = Offsets(tmp_path, sync=False)
    store(offsets, "kept", {("t", 7): committed(7)})
    for n in range(1000):
        store(offsets, f"g{n % 3}", {("t", n % 5): committed(n)})
    assert sum(path.stat().st_size for path in segments(tmp_path)) < 20_000
    assert content(Offsets(tmp_path, sync=False)) == content(offsets)
    assert len(content(offsets)) == 4


def test_a_commit_that_a_crash_cut_off_is_dropped_with_a_word(tmp_path, capfd):
    offsets = Offsets(tmp_path, sync=False)
    for n in range(3):
        store(offsets, "g", {("t", 0): committed(n)})
    (segment,) = segments(tmp_path)
    segment.write_bytes(segment.read_bytes()[:-5])
    assert content(Offsets(tmp_path, sync=False)) == {"g": {("t", 0): committed(1)}}
    assert "cut off a write that was interrupted" in capfd.readouterr().err


def test_damage_before_intact_commits_is_reported(tmp_path):
    offsets = Offsets(tmp_path, sync=False)
    for n in range(3):
        store(offsets, "g", {("t", 0): committed(n)})
    (segment,) = segments(tmp_path)
    data = bytearray(segment.read_bytes())
    data[70] ^= 1
    segment.write_bytes(data)
    with pytest.raises(CorruptLog, match=r"damaged at byte 0"):
        Offsets(tmp_path, sync=False)


def test_a_record_that_is_no_commit_is_reported(tmp_path):
    Log(tmp_path).append(batch([b"what is this?"]))
    with pytest.raises(CorruptLog, match="the record at offset 0 is no committed offset"):
        Offsets(tmp_path, sync=False)


WHERE = st.tuples(st.sampled_from(["t", "u"]), st.integers(0, 2))
CHANGE = st.one_of(st.none(), st.integers(0, 2**63 - 1).map(committed))
STEP = st.one_of(
    st.tuples(st.sampled_from(["g", "gruppe-ä", "h"]), st.dictionaries(WHERE, CHANGE, max_size=4)),
    st.just("open again"),
)


@settings(max_examples=50, deadline=None)
@given(steps=st.lists(STEP, max_size=40))
def test_the_last_commit_counts_whenever_it_is_opened_again(steps, tmp_path_factory):
    folder = tmp_path_factory.mktemp("offsets")
    offsets = Offsets(folder, sync=False)
    expected: dict[str, dict[Where, Committed]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "COMPACT_AFTER", 5)
        for step in steps:
            if step == "open again":
                offsets = Offsets(folder, sync=False)
            else:
                group, changes = step
                store(offsets, group, changes)
                merged = expected.get(group, {}) | changes
                expected[group] = {w: c for w, c in merged.items() if c is not None}
            assert content(offsets) == {g: of for g, of in expected.items() if of}
