"""Ids become text as they come: whole characters, and all of them in the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.gateway.texts import Detokeniser, Spoken
from connectors.text import Text
from connectors.tool_calls import split

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def text(tiny_model_path: Path) -> Text:
    return Text(tiny_model_path)


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    parts = []
    for size in sizes:
        parts.append(ids[:size])
        ids = ids[size:]
    return [*parts, ids]


def test_a_character_is_shown_once_all_its_bytes_are_there(text: Text) -> None:
    detokeniser = Detokeniser(text.decode)
    shown = [detokeniser.add([i]) for i in text.encode("a€😀b")]
    assert shown == ["a", "", "", "€", "", "", "", "😀", "b"]


@settings(deadline=None)
@given(st.text(max_size=30), st.lists(st.integers(1, 5), max_size=12))
def test_pieces_are_never_half_a_character_and_make_the_whole(
    text: Text, words: str, sizes: list[int]
) -> None:
    ids = text.encode(words)
    detokeniser = Detokeniser(text.decode)
    pieces = [detokeniser.add(part) for part in cut(ids, sizes)]
    pieces.append(detokeniser.add([], last=True))
    assert "".join(pieces) == text.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in words


@settings(deadline=None)
@given(st.lists(st.integers(4, 259), max_size=20), st.lists(st.integers(1, 5), max_size=12))
def test_bytes_that_are_no_text_are_shown_as_the_tokenizer_shows_them(
    text: Text, ids: list[int], sizes: list[int]
) -> None:
    detokeniser = Detokeniser(text.decode)
    pieces = [detokeniser.add(part) for part in cut(ids, sizes)]
    pieces.append(detokeniser.add([], last=True))
    assert "".join(pieces) == text.decode(ids)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([CALL, "<tool_call>", "<too", " ", "\n", "said", "é"]), max_size=6),
    st.lists(st.integers(1, 9), max_size=20),
)
def test_however_it_comes_the_same_is_shown_and_called(
    text: Text, pieces: list[str], sizes: list[int]
) -> None:
    written = "".join(pieces)
    spoken = Spoken(text.decode, hears_tools=True)
    shown = [spoken.add(part) for part in cut(text.encode(written), sizes)]
    shown.append(spoken.end([]))
    said, calls = split(written)
    assert ("".join(shown), spoken.calls) == (said, calls)
    assert spoken.shown == said


def test_without_tools_marks_are_text(text: Text) -> None:
    spoken = Spoken(text.decode, hears_tools=False)
    assert spoken.add(text.encode(CALL[:5])) == CALL[:5]
    assert spoken.end(text.encode(CALL[5:])) == CALL[5:]
    assert spoken.calls == []
