"""From rows to packs: coverage, budget, balance, shared prefixes once, and the same each time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from trainer.batches import Rows, minibatch_of
from trainer.packing import (
    Assignment,
    BudgetTooSmall,
    Pack,
    assign,
    check_assignment,
    empty_pack,
    minibatches,
    pack,
    prefix,
)


def rows_of(
    tokens: Sequence[Sequence[int]], groups: Sequence[int], untrained: Sequence[int] = ()
) -> Rows:
    """All tokens but the first are trained."""
    count = len(tokens)
    return Rows(
        ids=tuple(f"{groups[i]}/{i}" for i in range(count)),
        tokens=tuple(np.array(row, np.int32) for row in tokens),
        masks=tuple(
            np.zeros(len(row), bool) if i in untrained else np.arange(len(row)) > 0
            for i, row in enumerate(tokens)
        ),
        logprobs=tuple(-np.arange(len(row), dtype=np.float32) for row in tokens),
        rewards=np.zeros(count),
        groups=np.array(groups, np.int64),
        ages=tuple(np.arange(len(row), dtype=np.int32) for row in tokens),
    )


def distinct(lengths: Sequence[int], groups: Sequence[int] | None = None, **more: object) -> Rows:
    """Rows that share nothing."""
    start = np.concatenate([[0], np.cumsum(lengths)])
    tokens = [list(range(a, a + n)) for a, n in zip(start.tolist(), lengths, strict=False)]
    return rows_of(tokens, groups or [0] * len(lengths), **more)  # type: ignore[arg-type]


def packed(rows: Rows, indices: Sequence[int]) -> Pack:
    return pack(rows, indices, [np.arange(len(t)) * 10.0 for t in rows.tokens])


def expanded(one: Pack) -> list[NDArray[np.int64]]:
    """The tokens of each row of a pack."""
    places = torch.arange(one.starts[-1]) if one.expand_E is None else one.expand_E
    return np.split(one.tokens_P[places].numpy(), one.starts[1:-1])


# ------------------------------------------------------------------------------------ assignment
def test_best_fit_by_hand() -> None:
    # Each its own group. Longest first into bins of 12: 9 | 6 6 | 6 4 | and 3 where it just fits.
    found = assign(distinct([6, 4, 9, 6, 3, 6], [0, 1, 2, 3, 4, 5]), 12)
    assert found == Assignment(micro_batches=((2, 4), (0, 3), (5, 1)), ranks=(0, 0, 0))


def test_a_shared_prompt_counts_once() -> None:
    prompt = list(range(100, 108))
    rows = rows_of([[*prompt, i] for i in range(6)], [0] * 6)
    # 9 for the first, 1 and a quarter of 8 for each other one: 24 instead of 54; 14 are computed.
    assert assign(rows, 24).micro_batches == ((0, 1, 2, 3, 4, 5),)
    assert assign(rows, 23).micro_batches == ((0, 1, 2, 3, 4), (5,))
    one = packed(rows, range(6))
    assert len(one.tokens_P) == 14


def test_a_row_longer_than_a_micro_batch_is_refused_with_both_numbers() -> None:
    with pytest.raises(BudgetTooSmall, match=r"0/1 has 100 tokens, a micro-batch takes 10 \("):
        assign(distinct([2, 100, 2]), 10)
    assert assign(distinct([2, 100], untrained=[1]), 10).micro_batches == ((0,),)


lengths_and_groups = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=30
)


def grown(drawn: list[tuple[int, int]], prompt: int) -> Rows:
    """Rows of random groups in order, each group's beginning with a prompt of its own."""
    drawn = sorted(drawn, key=lambda one: one[1])
    tokens = [
        [1000 * group + t for t in range(prompt)] + [5000 + 50 * i + t for t in range(length)]
        for i, (length, group) in enumerate(drawn)
    ]
    numbers = {group: k for k, group in enumerate(sorted({group for _, group in drawn}))}
    return rows_of(tokens, [numbers[group] for _, group in drawn])


@given(
    drawn=lengths_and_groups,
    prompt=st.integers(0, 30),
    budget=st.integers(70, 200),
    num_minibatches=st.integers(1, 4),
    num_ranks=st.integers(1, 5),
)
def test_each_trained_row_is_in_one_micro_batch_of_its_mini_batch_within_the_budget(
    drawn: list[tuple[int, int]], prompt: int, budget: int, num_minibatches: int, num_ranks: int
) -> None:
    rows = grown(drawn, prompt)
    found = assign(rows, budget, num_minibatches, num_ranks)
    check_assignment(rows, found.micro_batches, num_minibatches)
    assert len(found.ranks) == len(found.micro_batches)
    assert set(found.ranks) <= set(range(num_ranks))
    for batch in found.micro_batches:
        assert len(packed(rows, batch).tokens_P) <= budget
    assert assign(rows, budget, num_minibatches, num_ranks) == found
    of_parts = minibatches(rows, found.micro_batches, num_minibatches)
    assert [m for part in of_parts for m in part] == list(range(len(found.micro_batches)))
    part_N = minibatch_of(rows, num_minibatches)
    for part in of_parts:
        assert len({int(part_N[i]) for m in part for i in found.micro_batches[m]}) == 1


def test_ranks_get_about_equally_many_tokens() -> None:
    rng = np.random.default_rng(0)
    rows = distinct(rng.integers(10, 200, 64).tolist(), np.repeat(np.arange(8), 8).tolist())
    found = assign(rows, 2000, 1, 4)
    loads = np.zeros(4)
    for batch, rank in zip(found.micro_batches, found.ranks, strict=True):
        loads[rank] += sum(len(rows.tokens[i]) for i in batch)
    assert loads.max() < 1.1 * loads.mean()


@pytest.mark.parametrize(("num_rows", "num_ranks", "busy"), [(10, 4, 4), (1, 2, 1)])
def test_few_rows_on_many_ranks(num_rows: int, num_ranks: int, busy: int) -> None:
    found = assign(distinct([20] * num_rows), 100, 1, num_ranks)
    assert len(set(found.ranks)) == busy


@pytest.mark.parametrize("wrong", [((0, 1),), ((0, 1), (2, 2)), ((0, 1, 2, 3),), ((0, 1, 4), (2,))])
def test_an_assignment_that_does_not_cover_the_rows_once_is_refused(
    wrong: tuple[tuple[int, ...], ...],
) -> None:
    with pytest.raises(ValueError, match="do not cover the 3 trained rows once"):
        check_assignment(distinct([3, 3, 3, 3], untrained=[3]), wrong)


@pytest.mark.parametrize("wrong", [((0, 2), (1,), (3,)), ((2, 3), (0, 1)), ((0,), (2, 3), (1,))])
def test_micro_batches_of_other_mini_batches_are_refused(
    wrong: tuple[tuple[int, ...], ...],
) -> None:
    rows = distinct([2, 2, 2, 2], [0, 0, 1, 1])
    check_assignment(rows, wrong)
    check_assignment(rows, ((1, 0), (2,), (3,)), 2)
    with pytest.raises(ValueError, match="are not those of 2 mini-batches in order"):
        check_assignment(rows, wrong, 2)


# --------------------------------------------------------------------------------------- tensors
def test_rows_stand_one_after_another_and_only_trained_tokens_are_asked_for() -> None:
    rows = distinct([3, 2, 4], [0, 1, 2])
    one = packed(rows, (2, 0))
    assert one.tokens_P.tolist() == [5, 6, 7, 8, 0, 1, 2]
    assert one.position_ids_P.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert one.starts == (0, 4, 7)
    assert one.expand_E is None
    assert one.predictor_N.tolist() == [0, 1, 2, 4, 5]
    assert one.targets_N.tolist() == [6, 7, 8, 1, 2]
    assert one.row_N.tolist() == [0, 0, 0, 1, 1]
    assert one.behaviour_logprobs_N.tolist() == [-1, -2, -3, -1, -2]
    assert one.advantages_N.tolist() == [10, 20, 30, 10, 20]
    assert one.ages_N.tolist() == [1, 2, 3, 1, 2]


def test_a_shared_prefix_stands_once_and_predicts_for_every_row() -> None:
    rows = rows_of([[7, 8, 9, 1], [3, 3], [7, 8, 9, 2, 4], [7, 8, 9]], [0, 1, 0, 0])
    one = packed(rows, (0, 1, 2, 3))
    assert one.tokens_P.tolist() == [7, 8, 9, 1, 3, 3, 2, 4]
    assert one.position_ids_P.tolist() == [0, 1, 2, 3, 0, 1, 3, 4]
    assert one.expand_E is not None
    assert one.expand_E.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 6, 7, 0, 1, 2]
    assert one.predictor_N.tolist() == [0, 1, 2, 4, 0, 1, 2, 6, 0, 1]
    assert one.targets_N.tolist() == [8, 9, 1, 3, 8, 9, 2, 4, 8, 9]


def test_a_prefix_of_less_than_an_eighth_is_computed_again() -> None:
    long = [[1, *range(100 + 20 * i, 110 + 20 * i)] for i in range(2)]
    assert packed(rows_of(long, [0, 0]), (0, 1)).expand_E is None
    short = [[1, *range(100 + 20 * i, 106 + 20 * i)] for i in range(2)]
    assert packed(rows_of(short, [0, 0]), (0, 1)).expand_E is not None


@given(drawn=lengths_and_groups, prompt=st.integers(0, 30), data=st.data())
def test_a_pack_holds_its_rows_whatever_they_share(
    drawn: list[tuple[int, int]], prompt: int, data: st.DataObject
) -> None:
    rows = grown(drawn, prompt)
    order = data.draw(st.permutations(range(len(rows))))
    one = packed(rows, order)
    for i, tokens, positions in zip(
        order, expanded(one), np.split(one.position_ids_P.numpy()[
            np.arange(one.starts[-1]) if one.expand_E is None else one.expand_E.numpy()
        ], one.starts[1:-1]), strict=True,
    ):  # fmt: skip
        assert tokens.tolist() == rows.tokens[i].tolist()
        assert positions.tolist() == list(range(len(tokens)))
    assert len(one.targets_N) == rows.num_trained
    assert one.tokens_P[one.predictor_N].tolist() == [
        t for i in order for t in rows.tokens[i][:-1].tolist()
    ]


def test_common_beginnings() -> None:
    assert prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5])) == 2
    assert prefix(np.array([1, 2]), np.array([1, 2, 4])) == 2
    assert prefix(np.array([1]), np.array([2])) == 0
    assert prefix(np.array([]), np.array([2])) == 0


def test_the_pack_of_nobody_trains_one_token_that_counts_nothing() -> None:
    one = empty_pack()
    assert one.tokens_P.tolist() == [0, 0]
    assert one.targets_N.tolist() == [0]
    assert one.advantages_N.tolist() == [0]
