"""What a step's tokens are credited with, from groups as the log holds them: by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.algorithms import ESTIMATORS, MOST_REWARD
from connectors.config import Overlong, Trainer
from connectors.parameters import Number
from connectors.records import Group, Origin, Prompt, Segment, Trajectory, Version
from operators.tracker import TrackerState
from trainer import batches
from trainer.credit import advantages, alone, too_few
from trainer.execute import untrainable
from trainer.values import tracker_of
from trainer.values import values as tracker_values

Rewards = Sequence[tuple[int, float]]


def row(
    name: int | str, mask: Sequence[int], reward: float, rewards: Rewards = (), offset: int = 0
) -> Trajectory:
    """Of `name`, K or K/BRANCH, written by version 0.0."""
    group_id = f"p/0/{offset}"
    return Trajectory(
        trajectory_id=f"{group_id}/{name}",
        group_id=group_id,
        task="a",
        tokens=np.arange(4, 4 + len(mask), dtype=np.int32),
        loss_mask=np.array(mask, np.int8),
        logprobs=np.where(mask, -1.0, np.nan).astype(np.float32),
        segments=(Segment(0, len(mask), 0, 0),),
        origin=Origin("p", 0, offset),
        reward=reward,
        rewards=tuple((token, value, "turn") for token, value in rewards),
    )


def group(*rows: Trajectory) -> Group:
    prompt = Prompt(task="a", prompt="x")
    return Group(group_id=rows[0].group_id, prompt=prompt, trajectories=rows)


FORKED = group(
    row(0, [0, 1, 1, 0, 1], 1.5, [(2, 0.5)]),  # turns 0 and 1
    row(1, [0, 1, 0], 0.0),
    row("0/1", [0, 0, 1, 1], 1.5),  # turn 2
)
"""Sample 0 earned 0.5 with its first turn and the rest, 1, at the end of its last."""


def test_a_sample_s_branches_are_credited_with_all_of_its_reward() -> None:
    got = alone(FORKED, Trainer(advantage="dr-grpo"))  # 1.5 and 0: mean 0.75
    assert [a.tolist() for a in got] == [
        [0, 0.75, 0.75, 0, 0.75],
        [0, -0.75, 0],
        [0, 0, 0.75, 0.75],
    ]


def test_a_turn_is_credited_with_what_it_and_later_ones_earned_over_all_branches() -> None:
    got = alone(FORKED, Trainer(advantage="dr-grpo", credit="turn", discount=0.5))
    # Returns of sample 0: 0.5 + 0.5 * 0.5, 0 + 0.5 * 1, 1; of sample 1: 0. Mean 2.25 / 4.
    mean = 0.5625
    assert [a.tolist() for a in got] == [
        [0, 0.75 - mean, 0.75 - mean, 0, 0.5 - mean],
        [0, -mean, 0],
        [0, 0, 1 - mean, 1 - mean],
    ]


def test_branches_need_not_follow_each_other_and_groups_keep_apart() -> None:
    other = group(
        row(0, [0, 1], 3.0, offset=1), row(1, [0, 1], 1.0, offset=1), row("0/1", [1], 3.0, offset=1)
    )
    trainer = Trainer(advantage="dr-grpo", credit="turn")
    together = [FORKED, other]
    got = advantages(together, batches.flatten(together), trainer)
    for of, expected in zip(got, alone(FORKED, trainer) + alone(other, trainer), strict=True):
        assert of.tolist() == expected.tolist()


def test_rewards_at_tokens_are_in_the_returns_of_an_estimator_that_credits_tokens() -> None:
    early = group(row(0, [0, 1, 1, 1], 1.0, [(2, 1.0)]), row(1, [0, 1], 0.0))
    got = alone(early, Trainer(advantage="reinforce++", advantage_parameters={"gamma": 0.5}))
    returns = np.array([0.5, 1.0, 0.0, 0.0])  # of the three tokens and the one
    expected = (returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.concatenate([got[0][1:], got[1][1:]]), expected, rtol=1e-12)


def test_a_sample_s_length_is_punished_over_all_its_branches() -> None:
    # Generated: 5 and 1; from 3 to 5 tokens the penalty grows to 0.5.
    overlong = Overlong(max_length=5, buffer=2, penalty=0.5)
    got = alone(FORKED, Trainer(advantage="dr-grpo", overlong=overlong))
    assert got[0].tolist() == [0, 0.5, 0.5, 0, 0.5]  # 1 and 0
    assert got[2].tolist() == [0, 0, 0.5, 0.5]


def test_the_penalty_falls_on_a_sample_s_last_turn_and_those_before_it() -> None:
    overlong = Overlong(max_length=5, buffer=2, penalty=0.5)
    got = alone(FORKED, Trainer(advantage="dr-grpo", credit="turn", overlong=overlong))
    values = np.array([1.0, 0.5, 0.0, 0.5])  # two turns, sample 1's, and the branch's
    assert [got[0][1], got[0][4], got[1][1], got[2][2]] == (values - 0.5).tolist()


def test_rounding_of_a_sum_of_parts_is_no_turn_s_reward() -> None:
    one, other = float(np.float32(0.2)), float(np.float32(0.3))
    total = float(np.float32(one + other))
    assert total < one + other  # so that what is left for the last turn would be below 0
    parts = group(
        row(0, [0, 1, 0, 1, 0, 1], total, [(1, one), (3, other), (5, 0.0)]),
        row(1, [0, 1], 0.0),
    )
    trainer = Trainer(advantage="maxrl", credit="turn")
    assert untrainable(parts, trainer, 300) is None
    got = alone(parts, trainer)
    assert got[0][5] == got[1][1]  # both earned nothing


def test_a_token_over_age_weighs_less() -> None:
    step = [group(row(0, [0, 1], 1.0), row(1, [0, 1], 0.0))]
    got = advantages(
        step, batches.flatten(step), Trainer(advantage="dr-grpo"), weights={Version(0, 0): 0.25}
    )
    assert [a.tolist() for a in got] == [[0, 0.125], [0, -0.125]]


ONE_TOKEN = group(row(0, [0, 0, 1], 1.0))
TWO_TOKENS = group(row(0, [0, 1, 1], 1.0))
NONE = group(row(0, [0, 0, 0], 1.0), row(1, [1], 0.0))  # nothing predicts a first token


@pytest.mark.parametrize(
    ("step", "settings", "expected"),
    [
        (ONE_TOKEN, {"advantage": "reinforce++"}, "one_token"),
        (ONE_TOKEN, {"advantage": "reinforce++-baseline"}, "one_token"),
        (ONE_TOKEN, {"advantage": "reinforce++-baseline", "credit": "turn"}, "one_token"),
        (ONE_TOKEN, {"advantage": "spo"}, "one_sample"),
        (ONE_TOKEN, {"advantage": "gpg"}, None),
        (TWO_TOKENS, {"advantage": "reinforce++"}, None),
        (TWO_TOKENS, {"advantage": "spo"}, "one_sample"),
        (FORKED, {"advantage": "spo"}, None),
        (NONE, {"advantage": "spo"}, "no_tokens"),
        (NONE, {"advantage": "grpo"}, "no_tokens"),
        (NONE, {"advantage": "reinforce++"}, "no_tokens"),
    ],
)
def test_too_few_to_normalise_over_is_known_before(
    step: Group, settings: dict[str, str], expected: str | None
) -> None:
    trainer = Trainer.model_validate(settings)
    rows = batches.flatten([step])
    assert too_few([step], rows, trainer) == expected
    if expected in (None, "no_tokens"):
        values = np.full(len(rows), 0.5)
        found = advantages([step], rows, trainer, values=values)
        assert all(np.isfinite(of).all() for of in found)


@pytest.mark.parametrize(
    ("bad", "settings", "why"),
    [
        (
            group(row(0, [0, 1], 1.0, [(2, 1.0)])),
            {},
            "p/0/0/0: its reward 'turn' is 1.0 at token 2",
        ),
        (group(row(0, [0, 1], 1.0, [(-1, 1.0)])), {}, "its reward 'turn' is 1.0 at token -1"),
        (group(row(0, [0, 1], 1.0, [(1, np.nan)])), {}, "its reward 'turn' is nan at token 1"),
        (group(row(0, [0, 1], 3e38)), {}, "p/0/0/0: its reward is 3e+38, which is beyond 1e+12"),
        (group(row(0, [0, 1], -3e38)), {}, "p/0/0/0: its reward is -3e+38, which is beyond 1e+12"),
        (group(row(0, [0, 1], 0.0, [(1, 3e38)])), {}, "p/0/0/0: its reward 'turn' is 3e+38"),
        (group(row(0, [0, 1], 0.0, [(1, np.inf)])), {}, "p/0/0/0: its reward 'turn' is inf"),
        (
            group(row(0, [1, 0], 1.0), row(1, [0, 0], 0.0)),  # a turn, of which nothing is trained
            {"advantage": "grpo", "credit": "turn"},
            "one turn; grpo needs at least two",
        ),
        (
            group(row(0, [0, 1], 1.25)),
            {"advantage": "spo"},
            "spo takes rewards between 0 and 1, got 1.25 to 1.25",
        ),
        (
            group(row(0, [0, 1], -1.5), row(1, [0, 1], 0.0)),
            {"advantage": "spo", "advantage_parameters": {"low": -1}},
            "spo takes rewards between -1 and 1, got -1.5 to 0",
        ),
        (
            group(row(0, [0, 1], 1.0), row(1, [0, 0], 0.0)),
            {"advantage": "grpo", "credit": "turn"},
            "one turn; grpo needs at least two",
        ),
        (
            group(row(0, [0, 1, 0, 1], 0.5, [(1, 1.0)]), row(1, [0, 1], 0.0)),
            {"advantage": "maxrl", "credit": "turn"},
            "maxrl needs rewards of at least 0",
        ),
    ],
)
def test_what_the_mathematics_cannot_take_is_refused_a_group_at_a_time(
    bad: Group, settings: dict[str, object], why: str
) -> None:
    trainer = Trainer.model_validate({"advantage": "opo", **settings})
    assert why in str(untrainable(bad, trainer, 300))


MASKS = st.lists(st.integers(0, 1), min_size=1, max_size=4)
BESIDE = group(row(0, [0, 1], 1.0, offset=1), row(1, [0, 1], 0.0, offset=1))


@settings(deadline=None)
@given(st.lists(st.tuples(MASKS, st.sampled_from([-1.0, 0.0, 0.5, 1.0])), min_size=1, max_size=3))
def test_what_is_refused_a_group_at_a_time_is_what_a_step_would_refuse(
    rows: list[tuple[list[int], float]],
) -> None:
    step = [group(*(row(k, *given) for k, given in enumerate(rows))), BESIDE]
    for name, credit in product(("grpo", "maxrl", "opo", "gpg"), ("sample", "turn")):
        trainer = Trainer.model_validate({"advantage": name, "credit": credit})
        if untrainable(step[0], trainer, 300) is None:
            advantages(step, batches.flatten(step), trainer)
        else:
            with pytest.raises(ValueError, match=r"one (turn|sample)|at least 0"):
                advantages(step, batches.flatten(step), trainer)


def extreme(name: str, credit: str, *, punished: bool) -> Trainer:
    """With the least parameters, or the widest, that it may have."""
    of = ESTIMATORS[name]
    least = {k: p.least for k, p in of.parameters.items() if isinstance(p, Number) and p.least > 0}
    bounds = {"low": -MOST_REWARD, "high": MOST_REWARD} if of.tracker else {}
    overlong = {"max_length": 3, "buffer": 2, "penalty": MOST_REWARD} if punished else None
    return Trainer.model_validate(
        {
            "advantage": name,
            "advantage_parameters": least | bounds,
            "credit": credit,
            "overlong": overlong,
        }
    )


TRAINERS = [
    trainer
    for name, credit, punished in product(ESTIMATORS, ("sample", "turn"), (False, True))
    if (trainer := extreme(name, credit, punished=punished)).problem() is None
]
LARGEST = float(np.float32(MOST_REWARD))
REWARDS = st.floats(-LARGEST, LARGEST, width=32) | st.sampled_from(
    [0.0, 1e-45, -1e-45, 1.0, LARGEST, -LARGEST, 999999930368.0]
).map(lambda reward: float(np.float32(reward)))


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.lists(st.tuples(REWARDS, REWARDS), min_size=1, max_size=5), min_size=1, max_size=3)
)
def test_advantages_of_any_rewards_that_are_taken_are_finite_in_float32(
    rewards: list[list[tuple[float, float]]],
) -> None:
    made = [
        group(*(row(k, [0, 1, 1, 0, 1], r, [(2, part)], offset) for k, (r, part) in enumerate(of)))
        for offset, of in enumerate(rewards)
    ]
    for trainer in TRAINERS:
        step = [g for g in made if untrainable(g, trainer, 300) is None]
        rows = batches.flatten(step)
        if not step or too_few(step, rows, trainer) is not None:
            continue
        tracker = tracker_of(trainer)
        values = None if tracker is None else tracker_values(tracker, TrackerState(), step)
        for of in advantages(step, rows, trainer, values=values):
            assert np.isfinite(of.astype(np.float32)).all(), trainer.advantage


def test_a_bound_that_float32_rounds_takes_the_reward_that_is_the_bound() -> None:
    most = group(row(0, [0, 1], float(np.float32(0.1))))
    trainer = Trainer(advantage="spo", advantage_parameters={"high": 0.1})
    assert most.trajectories[0].reward > 0.1
    assert untrainable(most, trainer, 300) is None
