"""From groups to rows: their order, masks by version, and which mini-batch each is of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from connectors.records import Group, Origin, Prompt, Segment, Trajectory, Version
from trainer.ages import UNKNOWN
from trainer.batches import flatten, lacks_behaviour, minibatch_of


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
    ("logprobs", "message"),
    [
        ([0, -1, float("nan")], "token 2 is trained but its log-prob is nan, which proximal 'x'"),
        ([0, -3e38, -1], "token 1 is trained but its log-prob is -3"),
    ],
)
def test_a_trained_token_without_a_log_prob_of_its_own_is_named(
    logprobs: Sequence[float], message: str
) -> None:
    lost = trajectory("a/7", [0, 1, 1], logprobs=logprobs)
    assert (lacks_behaviour(lost, "proximal 'x'") or "").startswith(message)
    whole = replace(lost, loss_mask=np.array([1, *(np.abs(logprobs[1:]) < 2)], np.int8))
    assert lacks_behaviour(whole, "proximal 'x'") is None


def test_text_has_no_log_probs_whatever_it_says() -> None:
    text = replace(trajectory("a/1", [0, 1, 1]), behaviour="text")
    assert lacks_behaviour(text, "loss 'x'") == (
        "it is text, which no policy sampled, and loss 'x' needs the log-probs of one that did"
    )
    assert lacks_behaviour(replace(text, loss_mask=np.zeros(3, np.int8)), "loss 'x'") is None
    rows = flatten([Group(group_id="a", prompt=Prompt(task="t", prompt="?"), trajectories=(text,))])
    assert rows.masks[0].tolist() == [False, True, True]
    assert np.isnan(rows.logprobs[0]).all()


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
    assert rows.ages is not None
    assert [ages.tolist() for ages in rows.ages] == [[UNKNOWN, 3, 3, -1], [UNKNOWN] * 2]
    unknown = flatten([found]).ages
    assert unknown is not None
    assert unknown[0].tolist() == [UNKNOWN] * 4


def test_some_of_the_rows_keep_their_groups() -> None:
    rows = flatten([group("a", [0, 1], [0, 0, 1]), group("b", [0, 1, 1])])
    some = rows.chosen((2, 0))
    assert some.ids == ("b/0", "a/0")
    assert some.groups.tolist() == [1, 0]
    assert some.rewards.tolist() == [0, 0]
    assert [m.tolist() for m in some.masks] == [[False, True, True], [False, True]]
    assert len(rows.chosen(())) == 0


def test_a_step_s_groups_are_cut_into_mini_batches_in_order_by_hand() -> None:
    masks = [0, 1], [0, 1, 1]
    rows = flatten([group(name, *masks) for name in "abcde"])
    # Five groups into two: 0 0 0 1 1; into three: 0 0 1 1 2; into seven: 0 1 2 4 5, two are empty.
    parts = {2: [0, 0, 0, 1, 1], 3: [0, 0, 1, 1, 2], 7: [0, 1, 2, 4, 5]}
    for num, expected in parts.items():
        assert minibatch_of(rows, num)[::2].tolist() == expected
        assert minibatch_of(rows, num)[1::2].tolist() == expected
