"""Which offsets ended, in bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.records import decode_as, encode
from trainer import remembered
from trainer.feed_state import Bits
from trainer.remembered import Remembered


def test_an_offset_has_ended_once_it_was_added_also_over_a_checkpoint() -> None:
    known = Remembered()
    for offset in (3, 0, 70_000):
        known.add(offset)
    again = Remembered(decode_as(encode(known.bits()), Bits))
    for which in (known, again):
        assert [o for o in (0, 1, 2, 3, 4, 69_999, 70_000, 70_001) if which.has(o)] == [
            0, 3, 70_000,
        ]  # fmt: skip
    assert again.has(10**12) is False


@given(st.lists(st.integers(0, 2000), max_size=200))
def test_what_is_remembered_is_right_and_never_more_than_two_windows(offsets: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remembered, "WINDOW", 64)
        known, added = Remembered(), set()
        for offset in offsets:
            known.add(offset)
            added.add(offset)
            highest = max(added)
            assert known.floor <= max(0, highest - 64), "a window is kept"
            assert len(known.bits().bits) * 8 <= 2 * 64 + 8
            for asked in {*added, offset + 1, 0, 5}:
                said = known.has(asked)
                assert said == (None if asked < known.floor else asked in added)


def test_a_far_jump_takes_no_memory_for_what_lies_between() -> None:
    known = Remembered()
    known.add(5)
    known.add(10**12)
    assert (known.has(5), known.has(10**12), known.has(10**12 - 1)) == (None, True, False)
    assert len(known.bits().bits) <= remembered.WINDOW // 4
