"""A session's calls become rows: sampled ids stay, every token trains once, whatever came how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from connectors.records import Segment, Version
from connectors.traffic import Call
from operators.traces import Traced, assemble, recomputed, same_question
from tests.operators.live_calls import EOS, call, choice, words


def rows(*calls: Call, temperature: float = 1.0) -> list[Traced]:
    found, problems = assemble(calls, temperature=temperature, tokenise=words)
    assert problems == []
    return found


def trained(traced: Traced) -> list[int]:
    return [int(i) for i in traced.row.tokens[traced.row.loss_mask == 1]]


def ids(traced: Traced) -> list[int]:
    return [int(i) for i in traced.row.tokens]


# ------------------------------------------------------------------------------------------ splice
OWN = [11, 12, 13, 40, 41, 220, 17, EOS]
"""The first two are the prompt; the rest was sampled."""


def test_the_next_turn_extends_the_sampled_ids() -> None:
    (row,) = rows(
        call("a", OWN[:2], OWN[2:]),
        call("b", [*OWN, 21, 22, 40, 41], [50, EOS], time=1),
    )
    assert ids(row) == [*OWN, 21, 22, 40, 41, 50, EOS]
    assert row.row.loss_mask.tolist() == [0] * 2 + [1] * 6 + [0] * 4 + [1] * 2
    assert row.behaviour == "exact"
    assert row.calls == ("a", "b")
    assert row.row.turns == 2


def test_a_rendering_that_spells_an_answer_otherwise_forks_and_trains_what_was_sampled() -> None:
    rendered = [11, 12, 13, 40, 41, 1001, EOS]
    first, second = rows(
        call("a", OWN[:2], OWN[2:]), call("b", [*rendered, 21, 22], [50, EOS], time=1)
    )
    assert ids(first) == OWN
    assert trained(first) == OWN[2:]
    assert ids(second) == [*rendered, 21, 22, 50, EOS]
    assert trained(second) == [50, EOS]


def test_stripped_thoughts_fork_and_the_stripped_answer_is_context() -> None:
    thought = call("a", [10], [7, 8, 9, EOS])
    first, second = rows(thought, call("b", [10, 9, EOS, 20], [30, EOS], time=1))
    assert trained(first) == [7, 8, 9, EOS]
    assert trained(second) == [30, EOS]


def test_the_separator_after_a_turn_is_the_next_prompts() -> None:
    (row,) = rows(call("a", [10], [7, EOS]), call("b", [10, 7, EOS, 198, 20], [8, EOS], time=1))
    assert row.row.loss_mask.tolist() == [0, 1, 1, 0, 0, 1, 1]


# ----------------------------------------------------------------------------------------- retries
def test_of_two_answers_to_one_input_the_continued_one_stays() -> None:
    (row,) = rows(
        call("first", [10], [7, EOS]),
        call("again", [10], [8, EOS], time=1),
        call("next", [10, 7, EOS, 20], [9, EOS], time=2),
    )
    assert ids(row) == [10, 7, EOS, 20, 9, EOS]


def test_of_two_answers_that_nobody_continued_the_newest_stays() -> None:
    (row,) = rows(call("first", [10], [7, EOS], time=1), call("again", [10], [8, EOS], time=2))
    assert trained(row) == [8, EOS]


def test_a_late_attempt_counts_once() -> None:
    late, accepted = call("0", [10], [7, EOS], time=0), call("1", [10], [8, EOS], time=5)
    following = call("2", [10, 8, EOS, 20], [9, EOS], time=6)
    (row,) = rows(accepted, following, late)  # attempt 0 arrives last
    assert ids(row) == [10, 8, EOS, 20, 9, EOS]


def test_a_retry_in_mid_session_leaves_one_row() -> None:
    (row,) = rows(
        call("a", [10], [7, EOS]),
        call("lost", [10, 7, EOS, 20], [8, EOS], time=1),
        call("kept", [10, 7, EOS, 20], [9, EOS], time=2),
        call("c", [10, 7, EOS, 20, 9, EOS, 30], [4, EOS], time=3),
    )
    assert ids(row) == [10, 7, EOS, 20, 9, EOS, 30, 4, EOS]


def test_the_answers_of_one_call_are_no_retries_of_each_other() -> None:
    left, right = rows(call("n", [10], [7, EOS], [8, EOS]))
    assert (trained(left), trained(right)) == ([7, EOS], [8, EOS])
    assert left.calls == ("n",)
    assert right.calls == ()


def test_of_a_calls_answers_those_that_were_continued_stay() -> None:
    (row,) = rows(
        call("n", [10], [7, EOS], [8, EOS]), call("next", [10, 8, EOS, 20], [9, EOS], time=1)
    )
    assert ids(row) == [10, 8, EOS, 20, 9, EOS]


def test_an_empty_answer_is_no_retry_of_the_one_that_came() -> None:
    (row,) = rows(call("cancelled", [10], []), call("again", [10], [7, EOS], time=1))
    assert trained(row) == [7, EOS]


# -------------------------------------------------------------------------------------------- forks
def test_what_two_branches_share_is_trained_in_the_first() -> None:
    first, second = rows(
        call("a", [10], [7, EOS]),
        call("b", [10, 7, EOS, 20], [8, EOS], time=1),
        call("c", [10, 7, EOS, 21, 22], [9, EOS], time=2),
    )
    assert trained(first) == [7, EOS, 8, EOS]
    assert trained(second) == [9, EOS]
    assert ids(second)[:3] == [10, 7, EOS]
    assert np.isnan(second.row.logprobs[:3]).all()


def test_a_sub_agent_has_a_row_of_its_own() -> None:
    main, sub = rows(
        call("main", [10, 11], [7, EOS]),
        call("sub", [90], [91, EOS], time=1),
        call("main again", [10, 11, 7, EOS, 91], [8, EOS], time=2),
    )
    assert trained(main) == [7, EOS, 8, EOS]
    assert trained(sub) == [91, EOS]


def test_a_clock_that_ran_backwards_changes_nothing_about_who_continues_whom() -> None:
    (row,) = rows(
        call("b", [10, 7, EOS, 20], [8, EOS], time=1), call("a", [10], [7, EOS], time=100)
    )
    assert trained(row) == [7, EOS, 8, EOS]


def test_a_duplicate_of_a_call_is_the_call() -> None:
    a, b = call("a", [10], [7, EOS]), call("b", [10, 7, EOS, 20], [8, EOS], time=1)
    assert [ids(r) for r in rows(b, a, a, b)] == [ids(r) for r in rows(a, b)]


# ------------------------------------------------------------------------------------------ classes
def test_versions_stay_with_their_tokens() -> None:
    swapped = choice([7, 8, EOS], segments=(Segment(0, 1, 0, 3), Segment(1, 3, 0, 4)))
    (row,) = rows(call("a", [10, 11], swapped))
    assert row.row.segments == (Segment(2, 3, 0, 3), Segment(3, 5, 0, 4))
    assert row.row.logprobs[2:].tolist() == [-1 / 8, -2 / 8, -3 / 8]


def test_a_call_at_another_temperature_keeps_its_versions_and_loses_its_logprobs() -> None:
    (row,) = rows(call("a", [10], [7, EOS], temperature=0.5))
    assert row.behaviour == "recomputed"
    assert row.why == "its log-probs are at 0.5, not at temperature 1"
    assert row.row.segments == (Segment(1, 3, 0, 0),)
    assert np.isnan(row.row.logprobs).all()


def test_ids_alone_are_of_the_version_that_the_model_names() -> None:
    (row,) = rows(call("a", [10], choice([7, EOS], version=None, logprobs=False), model="2.5"))
    assert row.behaviour == "recomputed"
    assert row.row.segments == (Segment(1, 3, 2, 5),)


def test_a_row_is_of_the_least_known_of_its_parts() -> None:
    (row,) = rows(
        call("a", [10], [7, EOS]),
        call("b", [10, 7, EOS, 20], choice([8, EOS], logprobs=False), time=1),
    )
    assert row.behaviour == "recomputed"
    assert row.row.logprobs[1:3].tolist() == [-1 / 8, -2 / 8]
    assert np.isnan(row.row.logprobs[4:]).all()


def of_version(known: Sequence[Version]) -> Any:
    def recompute(
        version: Version, tokens: NDArray[np.int32], mask: NDArray[np.int8]
    ) -> NDArray[np.float32] | None:
        if version not in known:
            return None
        return np.where(mask == 1, -np.float32(version.number), np.float32("nan"))

    return recompute


def test_what_is_missing_is_computed_by_the_version_that_wrote_it() -> None:
    (row,) = rows(
        call("a", [10], [7, EOS]),
        call("b", [10, 7, EOS, 20], choice([8, EOS], version=3, logprobs=False), time=1),
    )
    whole = recomputed(row, of_version([Version(0, 3)])).row
    assert whole.logprobs[1:3].tolist() == [-1 / 8, -2 / 8]
    assert whole.logprobs[4:].tolist() == [-3.0, -3.0]


def test_tokens_of_a_version_that_is_gone_are_context() -> None:
    (row,) = rows(
        call("a", [10], choice([7, EOS], version=1, logprobs=False)),
        call("b", [10, 7, EOS, 20], [8, EOS], time=1),
    )
    whole = recomputed(row, of_version([]))
    assert trained(whole) == [8, EOS]
    assert whole.row.segments == (Segment(4, 6, 0, 0),)


def text_call(id: str, *messages: tuple[str, str], answer: str, time: float = 0.0) -> Call:
    said = [{"role": role, "content": content} for role, content in messages]
    return call(
        id, None, choice(None, text=answer), time=time, messages=said, model="gpt", temperature=None
    )


def test_text_is_put_together_by_its_messages_and_learns_each_answer_once() -> None:
    first = text_call("a", ("user", "q"), answer="yes")
    left = text_call("b", ("user", "q"), ("assistant", "yes"), ("user", "r"), answer="no", time=1)
    right = text_call("c", ("user", "q"), ("assistant", "yes"), ("user", "s"), answer="so", time=2)
    found = rows(first, left, right)
    assert [r.behaviour for r in found] == ["text", "text"]
    written = ["".join(map(chr, trained(r))).replace("\x01", "|") for r in found]
    assert written == ["yes|no|", "so|"]
    assert all(np.isnan(r.row.logprobs).all() and r.row.segments == () for r in found)
    assert [r.calls for r in found] == [("a", "b"), ("c",)]


def test_an_answer_that_a_history_has_and_no_call_wrote_is_context() -> None:
    (row,) = rows(
        text_call("a", ("user", "q"), ("assistant", "shown"), ("user", "r"), answer="yes")
    )
    assert "".join(map(chr, trained(row))) == "yes\x01"


def test_a_foreign_models_ids_are_text() -> None:
    message = {"role": "user", "content": "q"}
    foreign = call(
        "a", [10], choice([7, EOS], version=None, text="hi"), model="gpt-9", messages=[message]
    )
    (row,) = rows(foreign)
    assert row.behaviour == "text"
    assert row.why == "no version of this run wrote it, but gpt-9"


def test_a_text_that_cannot_be_learnt_is_named_and_the_rest_stays() -> None:
    def refuses(messages: Any, tools: Any) -> Any:
        raise ValueError("the template refuses")

    found, problems = assemble(
        [call("a", [10], [7, EOS]), text_call("b", ("user", "q"), answer="x")],
        temperature=1.0,
        tokenise=refuses,
    )
    assert [trained(r) for r in found] == [[7, EOS]]
    assert problems == ["b: the template refuses"]


def test_classes_of_a_session_keep_to_themselves() -> None:
    found = rows(call("a", [10], [7, EOS]), text_call("b", ("user", "q"), answer="x", time=1))
    assert [r.behaviour for r in found] == ["exact", "text"]


def test_no_calls_make_no_rows() -> None:
    assert rows() == []


@pytest.mark.parametrize(("other", "same"), [([10], True), ([10, 11], False)])
def test_a_question_is_its_ids(other: list[int], same: bool) -> None:
    assert same_question(call("a", [10], [7]), call("b", other, [8])) is same
