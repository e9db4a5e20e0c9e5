"""From groups to micro-batches: coverage, budget, determinism, and masks by version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from connectors.records import Group, Origin, Prompt, Segment, Trajectory, Version
from trainer.ages import UNKNOWN
from trainer.batches import (
    BadTrajectory,
    Rows,
    assign,
    check_assignment,
    collate,
    cut,
    flatten,
    minibatch_of,
)


def trajectory(
    name: str,
    mask: Sequence[int],
    *,
    reward: float = 1.0,
    segments: tuple[Segment, ...] = (),
    logprobs: Sequence[float] | None = None,
) -> Trajectory:
    length = len(mask)
    values = [-0.5 if m else float("nan") for m in mask] if logprobs is None else logprobs
    return Trajectory(
        trajectory_id=name,
        group_id=name.rpartition("/")[0],
        task="t",
        tokens=np.arange(10, 10 + length, dtype=np.int32),
        loss_mask=np.array(mask, np.int8),
        logprobs=np.array(values, np.float32),
        segments=segments,
        origin=Origin("prompts", 0, 0),
        reward=reward,
    )


def group(name: str, *masks: Sequence[int]) -> Group:
    return Group(
        group_id=name,
        prompt=Prompt(task="t", prompt="?"),
        trajectories=tuple(
            trajectory(f"{name}/{k}", mask, reward=float(k)) for k, mask in enumerate(masks)
        ),
    )


def rows_of(lengths: Sequence[int], untrained: Sequence[int] = ()) -> Rows:
    masks = [[0] * n if i in untrained else [0] + [1] * (n - 1) for i, n in enumerate(lengths)]
    return flatten([group("g", *masks)])


def test_rows_stand_in_the_order_of_groups_and_trajectories() -> None:
    rows = flatten([group("a", [0, 1], [0, 0, 1]), group("b", [0, 1, 1])])
    assert rows.ids == ("a/0", "a/1", "b/0")
    assert rows.groups.tolist() == [0, 0, 1]
    assert rows.rewards.tolist() == [0, 1, 0]
    assert rows.num_tokens == 8
    assert rows.num_trained == 4
    assert [m.tolist() for m in rows.masks] == [[False, True], [False, False, True],
                                                [False, True, True]]  # fmt: skip


def test_the_first_token_is_never_trained() -> None:
    loss_mask = [1, 1, 1]
    found = group("a", loss_mask)
    assert flatten([found]).masks[0].tolist() == [False, True, True]
    assert found.trajectories[0].loss_mask.tolist() == loss_mask


def test_tokens_of_versions_without_weight_are_not_trained() -> None:
    segments = (Segment(1, 3, 0, 4), Segment(3, 4, 0, 9), Segment(4, 6, 1, 2))
    one = trajectory("a/0", [0, 1, 1, 1, 0, 1], segments=segments)
    found = Group(group_id="a", prompt=Prompt(task="t", prompt="?"), trajectories=(one,))
    masked = flatten([found], {Version(0, 4): 0.0, Version(0, 9): 0.5})
    assert masked.masks[0].tolist() == [False, False, False, True, False, True]
    assert flatten([found], {Version(0, 4): 0.0, Version(0, 9): 0.0}).num_trained == 1
    assert flatten([found], {Version(0, 5): 0.0}).num_trained == 4


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (trajectory("a/7", [0, 1], reward=float("nan")), "a/7: its reward is nan"),
        (trajectory("a/7", [0, 1], reward=float("-inf")), "a/7: its reward is -inf"),
        (
            trajectory("a/7", [0, 1, 1], logprobs=[0, -1, float("nan")]),
            "a/7: token 2 is trained but its log-prob is nan",
        ),
        (
            trajectory("a/7", [0, 1, 1], logprobs=[0, -3e38, -1]),
            "a/7: token 1 is trained but its log-prob is -3",
        ),
    ],
)
def test_a_trajectory_that_cannot_be_trained_is_named(bad: Trajectory, message: str) -> None:
    found = Group(group_id="a", prompt=Prompt(task="t", prompt="?"), trajectories=(bad,))
    with pytest.raises(BadTrajectory, match=message) as raised:
        flatten([found], needs_behaviour="correction 'tis'")
    assert raised.value.trajectory_id == "a/7"


def test_text_and_lost_log_probs_are_trained_by_what_does_not_read_them() -> None:
    lost = trajectory("a/0", [0, 1, 1], logprobs=[0, -1, float("nan")])
    text = replace(trajectory("a/1", [0, 1, 1]), behaviour="text")
    for bad, message in (
        (lost, "a/0: token 2 is trained but its log-prob is nan, which proximal 'x' needs"),
        (text, "a/1: it is text, which no policy sampled, and proximal 'x' needs"),
    ):
        found = Group(group_id="a", prompt=Prompt(task="t", prompt="?"), trajectories=(bad,))
        with pytest.raises(BadTrajectory, match=message):
            flatten([found], needs_behaviour="proximal 'x'")
        rows = flatten([found])
        assert rows.masks[0].tolist() == [False, True, True]
    assert np.isnan(rows.logprobs[0]).all()  # of the text, whatever it says of itself
    nothing = replace(text, loss_mask=np.zeros(3, np.int8))
    kept = Group(group_id="a", prompt=Prompt(task="t", prompt="?"), trajectories=(nothing,))
    assert flatten([kept], needs_behaviour="proximal 'x'").num_trained == 0


def test_each_token_has_the_age_of_its_version() -> None:
    segments = (Segment(1, 3, 0, 5), Segment(3, 4, 0, 7))
    found = Group(
        group_id="a",
        prompt=Prompt(task="t", prompt="?"),
        trajectories=(
            trajectory("a/0", [0, 1, 1, 1], segments=segments),
            trajectory("a/1", [0, 1]),
        ),
    )
    rows = flatten([found], ages={Version(0, 5): 3, Version(0, 7): -1})
    batch = collate(rows, (0, 1), [np.zeros(4), np.zeros(2)])
    assert batch.ages_BT.tolist() == [[UNKNOWN, 3, 3, -1], [UNKNOWN] * 4]
    unknown = collate(flatten([found]), (0,), [np.zeros(4)])
    assert unknown.ages_BT.tolist() == [[UNKNOWN] * 4]


def test_a_budget_by_hand() -> None:
    # Longest first: 9 | 6 + 6 = 12 | 6 then 4 padded to 6 = 12 | 3
    assert assign(rows_of([6, 4, 9, 6, 3, 6]), 12) == ((2,), (0, 3), (5, 1), (4,))


def test_a_row_longer_than_the_budget_gets_a_micro_batch_of_its_own() -> None:
    assert assign(rows_of([2, 100, 2, 50]), 10) == ((1,), (3,), (0, 2))


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    budget=st.integers(1, 200),
    data=st.data(),
)
def test_every_trained_row_is_in_one_micro_batch_within_the_budget(
    lengths: list[int], budget: int, data: st.DataObject
) -> None:
    untrained = data.draw(st.sets(st.integers(0, len(lengths) - 1)))
    rows = rows_of(lengths, sorted(untrained))
    batches = assign(rows, budget)
    check_assignment(rows, batches)
    assert not {i for batch in batches for i in batch} & untrained
    for batch in batches:
        width = max(lengths[i] for i in batch)
        assert len(batch) == 1 or len(batch) * width <= budget
    assert assign(rows, budget) == batches


@pytest.mark.parametrize("wrong", [((0, 1),), ((0, 1), (2, 2)), ((0, 1, 2, 3),), ((0, 1, 4), (2,))])
def test_an_assignment_that_does_not_cover_the_rows_once_is_refused(
    wrong: tuple[tuple[int, ...], ...],
) -> None:
    with pytest.raises(ValueError, match="do not cover the 3 trained rows once"):
        check_assignment(rows_of([3, 3, 3, 3], untrained=[3]), wrong)


def test_a_step_s_groups_are_cut_into_mini_batches_in_order_by_hand() -> None:
    masks = [0, 1], [0, 1, 1]
    rows = flatten([group(name, *masks) for name in "abcde"])
    # Five groups into two: 0 0 0 1 1; into three: 0 0 1 1 2; into seven: 0 1 2 4 5, two are empty.
    parts = {2: [0, 0, 0, 1, 1], 3: [0, 0, 1, 1, 2], 7: [0, 1, 2, 4, 5]}
    for num, expected in parts.items():
        assert minibatch_of(rows, num)[::2].tolist() == expected
        assert minibatch_of(rows, num)[1::2].tolist() == expected
    assert assign(rows, 100, 2) == ((1, 3, 5, 0, 2, 4), (7, 9, 6, 8))
    assert cut(rows, ((1, 3), (5, 0, 2, 4), (7, 9, 6, 8)), 2) == [
        [(1, 3), (5, 0, 2, 4)], [(7, 9, 6, 8)],
    ]  # fmt: skip


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    num_minibatches=st.integers(1, 14),
    budget=st.integers(1, 60),
    data=st.data(),
)
def test_no_micro_batch_is_of_two_mini_batches_and_theirs_follow_each_other(
    sizes: list[int], num_minibatches: int, budget: int, data: st.DataObject
) -> None:
    masks = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=9)
    groups = [group(f"g{i}", *(data.draw(masks) for _ in range(n))) for i, n in enumerate(sizes)]
    rows = flatten(groups)
    batches, part = assign(rows, budget, num_minibatches), minibatch_of(rows, num_minibatches)
    check_assignment(rows, batches, num_minibatches)
    parts = cut(rows, batches, num_minibatches)
    assert [batch for found in parts for batch in found] == list(batches)
    of_parts = [sorted({int(part[i]) for batch in found for i in batch}) for found in parts]
    assert all(len(numbers) == 1 for numbers in of_parts)
    assert of_parts == sorted(of_parts)


@pytest.mark.parametrize("wrong", [((0, 2), (1,), (3,)), ((2, 3), (0, 1)), ((0,), (2, 3), (1,))])
def test_micro_batches_of_other_mini_batches_are_refused(
    wrong: tuple[tuple[int, ...], ...],
) -> None:
    rows = flatten([group("a", [0, 1], [0, 1]), group("b", [0, 1], [0, 1])])
    check_assignment(rows, wrong)
    check_assignment(rows, ((1, 0), (2,), (3,)), 2)
    with pytest.raises(ValueError, match="are not those of 2 mini-batches in order"):
        check_assignment(rows, wrong, 2)


def test_tensors_are_padded_on_the_right_and_hide_what_is_not_trained() -> None:
    rows = flatten([group("a", [0, 1], [0, 0, 1, 1])])
    advantages = [np.array([0, 3.0]), np.array([0, 0, -1.0, -1.0])]
    batch = collate(rows, (1, 0), advantages)
    assert batch.indices == (1, 0)
    assert batch.tokens_BT.tolist() == [[10, 11, 12, 13], [10, 11, 0, 0]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.mask_BT.tolist() == [[False, False, True, True], [False, True, False, False]]
    assert batch.behaviour_logprobs_BT.tolist() == [[0, 0, -0.5, -0.5], [0, -0.5, 0, 0]]
    assert batch.advantages_BT.tolist() == [[0, 0, -1, -1], [0, 3, 0, 0]]


def test_the_same_records_and_indices_give_the_same_tensors() -> None:
    groups = [group("a", [0, 1, 1], [0, 1]), group("b", [0, 0, 1, 1], [0, 1, 0])]
    first, second = flatten(groups), flatten(groups)
    advantages = [np.ones(len(t)) for t in first.tokens]
    for indices in assign(first, 8):
        one, two = collate(first, indices, advantages), collate(second, indices, advantages)
        for name in ("tokens_BT", "position_ids_BT", "mask_BT", "behaviour_logprobs_BT",
                     "advantages_BT"):  # fmt: skip
            assert torch.equal(getattr(one, name), getattr(two, name))
