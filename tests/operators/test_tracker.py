"""The value tracker against values derived by hand and a loop of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.tracker import (
    Belief,
    Observation,
    TrackerState,
    ValueTracker,
    moved,
)

OBSERVATIONS = st.builds(
    Observation,
    key=st.sampled_from("abc"),
    reward=st.floats(-2.0, 3.0),
)
EVENTS = st.lists(st.one_of(OBSERVATIONS, st.floats(0.0, 1.0)), max_size=30)
"""Rewards, and steps that move the policy."""


def after(
    events: Iterable[Observation | float],
    tracker: ValueTracker,
    state: TrackerState | None = None,
) -> TrackerState:
    state = TrackerState() if state is None else state
    for event in events:
        match event:
            case float():
                state = moved(state, event)
            case Observation():
                state = tracker.update(state, [event])
    return state


def seen(reward: float, key: str = "p") -> Observation:
    return Observation(key=key, reward=reward)


def test_rewards_of_one_prompt_by_hand() -> None:
    tracker = ValueTracker(half_life=0.0625, rho_min=0.25, rho_max=1.0)
    state = TrackerState()
    assert tracker.value(state, "p") == 0.5
    state = tracker.update(state, [seen(1.0)])  # rho 1: (1.5, 0.5)
    assert tracker.value(state, "p") == 0.75
    state = after([0.0625, seen(0.0)], tracker, state)  # rho 1/2: (0.75, 1.25)
    assert state.beliefs["p"] == Belief(0.75, 1.25, 0.25)
    state = after([9.0, seen(0.5)], tracker, state)  # rho 1/4: (0.6875, 0.8125)
    assert state.beliefs["p"] == Belief(0.6875, 0.8125, 3.25)
    assert tracker.value(state, "other") == 0.5


def test_the_kl_since_a_reward_is_the_squared_length_of_the_path_not_the_sum_of_its_steps() -> None:
    tracker = ValueTracker(half_life=1.0, rho_min=0.0, rho_max=1.0)
    state = after([4.0, seen(1.0), 0.25, 0.25, seen(0.0)], tracker)
    # Twice sqrt(1/4) is 1, its square the half-life: (1.5, 0.5) / 2 + (0, 1). The 4 came before.
    assert state.beliefs["p"] == Belief(0.75, 1.25, 3.0)


def test_the_squared_path_bounds_the_kl_of_two_normal_policies() -> None:
    # KL(N(a, 1) || N(b, 1)) = (a - b)^2 / 2, to whichever order: there and half the way back.
    means = [0.0, 0.5, 1.0, 0.5]
    steps = [(b - a) ** 2 / 2 for a, b in pairwise(means)]
    length = after(steps[:2], ValueTracker()).length
    assert length**2 == pytest.approx((means[2] - means[0]) ** 2 / 2)  # one way: exact
    assert sum(steps[:2]) == pytest.approx(length**2 / 2)
    assert after(steps, ValueTracker()).length ** 2 > (means[3] - means[0]) ** 2 / 2


@pytest.mark.parametrize("drift", [math.inf, math.nan, 1e300])
def test_a_step_out_of_all_bounds_leaves_numbers(drift: float) -> None:
    tracker = ValueTracker()
    state = after([seen(1.0), drift, seen(1.0)], tracker)
    assert state.beliefs["p"] == Belief(0.875 * 1.48 + 1, 0.875 * 0.48, 1000.0)
    assert moved(state, -1e-9) == state
    assert msgspec.json.decode(msgspec.json.encode(state), type=TrackerState) == state


def test_the_prompt_whose_last_reward_is_the_oldest_is_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("operators.tracker.MOST_PROMPTS", 2)
    tracker = ValueTracker()
    state = tracker.update(TrackerState(), [seen(1.0, key=k) for k in "abac"])
    assert list(state.beliefs) == ["a", "c"]
    assert tracker.value(state, "b") == 0.5


def test_evidence_fades_with_the_policy_s_distance_within_bounds() -> None:
    tracker = ValueTracker()
    assert tracker.rho(0.0) == 0.96
    assert tracker.rho(0.006) == pytest.approx(2**-0.1, rel=1e-15)
    assert tracker.rho(1e6) == 0.875


def test_a_belief_weighs_no_more_than_its_rho_allows() -> None:
    tracker = ValueTracker()
    belief = tracker.update(TrackerState(), [seen(1.0)] * 1000).beliefs["p"]
    assert belief.alpha + belief.beta == pytest.approx(1 / (1 - 0.96))


def test_rewards_of_other_bounds_are_mapped_there_and_values_back() -> None:
    tracker = ValueTracker(low=-1.0, high=3.0, rho_min=1.0, rho_max=1.0)
    state = TrackerState()
    assert tracker.value(state, "p") == 1.0
    state = tracker.update(state, [seen(3.0)])
    assert tracker.value(state, "p") == 2.0  # 3/4 of the way from -1 to 3


@given(EVENTS)
def test_the_fold_is_pure_and_agrees_with_a_loop(events: list[Observation | float]) -> None:
    tracker = ValueTracker(low=-2.0, high=3.0)
    counts: dict[str, tuple[float, float, float]] = {}
    state, length = TrackerState(), 0.0
    for event in events:
        frozen = msgspec.json.encode(state)
        new = after([event], tracker, state)
        assert msgspec.json.encode(state) == frozen
        state = new
        if isinstance(event, float):
            length += math.sqrt(event)
            continue
        alpha, beta, at = counts.get(event.key, (0.5, 0.5, length))
        rho = min(0.96, max(0.875, math.pow(2.0, -((length - at) ** 2) / 0.06)))
        reward = (event.reward + 2.0) / 5.0
        counts[event.key] = (rho * alpha + reward, rho * beta + 1.0 - reward, length)
    assert set(state.beliefs) == set(counts)
    for key, (alpha, beta, _) in counts.items():
        assert tracker.value(state, key) == pytest.approx(-2 + 5 * alpha / (alpha + beta))
        assert -2.0 <= tracker.value(state, key) <= 3.0


@given(st.lists(OBSERVATIONS, max_size=30))
def test_several_rewards_at_once_are_the_same_as_one_by_one(several: list[Observation]) -> None:
    tracker = ValueTracker(low=-2.0, high=3.0)
    state = tracker.update(TrackerState(), several)
    assert state == after(several, tracker)
    assert list(state.beliefs) == list(dict.fromkeys(o.key for o in reversed(several)))[::-1]


@given(EVENTS)
def test_the_state_goes_through_json_without_the_loss_of_a_bit(
    events: list[Observation | float],
) -> None:
    state = after(events, ValueTracker(low=-2.0, high=3.0))
    back = msgspec.json.decode(msgspec.json.encode(state), type=TrackerState)
    assert back == state
    assert list(back.beliefs) == list(state.beliefs)


@pytest.mark.parametrize("reward", [-0.1, 1.1, math.nan, math.inf])
def test_a_reward_outside_the_bounds_is_refused_and_named(reward: float) -> None:
    with pytest.raises(ValueError, match=f"p: the reward must be between 0 and 1, got {reward}"):
        ValueTracker().update(TrackerState(), [seen(reward)])
