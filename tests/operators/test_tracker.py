"""The value tracker against values derived by hand and a loop of its own."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.tracker import Belief, Observation, Score, TrackerState, ValueTracker

OBSERVATIONS = st.lists(
    st.builds(
        Observation,
        key=st.sampled_from("abc"),
        reward=st.floats(-2.0, 3.0),
        kl=st.floats(0.0, 1.0),
        label=st.sampled_from([None, "maths", "code"]),
    ),
    max_size=30,
)


def test_rewards_of_one_prompt_by_hand() -> None:
    tracker = ValueTracker(half_life=0.06, rho_min=0.25, rho_max=1.0)
    state = tracker.start()
    assert tracker.value(state, "p") == 0.5
    state = tracker.update(state, "p", 1.0)  # rho 1: (1.5, 0.5)
    assert tracker.value(state, "p") == 0.75
    state = tracker.update(state, "p", 0.0, kl=0.06)  # rho 1/2: (0.75, 1.25)
    assert state.beliefs["p"] == Belief(0.75, 1.25)
    state = tracker.update(state, "p", 0.5, kl=10.0)  # rho 1/4: (0.6875, 0.8125)
    assert state.beliefs["p"] == Belief(0.6875, 0.8125)
    assert tracker.value(state, "other") == 0.5


def test_evidence_fades_with_the_policy_s_distance_within_bounds() -> None:
    tracker = ValueTracker()
    assert tracker.rho(0.0) == 0.96
    assert tracker.rho(0.006) == pytest.approx(2**-0.1, rel=1e-15)
    assert tracker.rho(1e6) == 0.875


def test_a_belief_weighs_no_more_than_its_rho_allows() -> None:
    tracker, state = ValueTracker(), TrackerState()
    for _ in range(1000):
        state = tracker.update(state, "p", 1.0)
    belief = state.beliefs["p"]
    assert belief.alpha + belief.beta == pytest.approx(1 / (1 - 0.96))


def test_rewards_of_other_bounds_are_mapped_there_and_values_back() -> None:
    tracker = ValueTracker(low=-1.0, high=3.0, rho_min=1.0, rho_max=1.0)
    state = tracker.start()
    assert tracker.value(state, "p") == 1.0
    state = tracker.update(state, "p", 3.0)
    assert tracker.value(state, "p") == 2.0  # 3/4 of the way from -1 to 3


def test_predictions_are_scored_before_their_reward_goes_in() -> None:
    tracker = ValueTracker(rho_min=1.0, rho_max=1.0)
    state = tracker.update(tracker.start(), "p", 1.0, label="maths")  # said 1/2
    state = tracker.update(state, "p", 0.0, label="maths")  # said 3/4
    state = tracker.update(state, "p", 0.0)  # nobody's
    score = state.scores["maths"]
    assert score == Score(2, 0.25 + 0.5625, 0.5 + 0.75)
    assert (score.brier, score.absolute) == (0.40625, 0.625)
    assert list(state.scores) == ["maths"]
    assert math.isnan(Score().brier)


@given(OBSERVATIONS)
def test_the_fold_is_pure_and_agrees_with_a_loop(observations: list[Observation]) -> None:
    tracker = ValueTracker(low=-2.0, high=3.0)
    counts: dict[str, tuple[float, float]] = {}
    state = tracker.start()
    for seen in observations:
        frozen = msgspec.json.encode(state)
        after = tracker.update(state, seen.key, seen.reward, seen.kl, seen.label)
        assert msgspec.json.encode(state) == frozen
        state = after
        alpha, beta = counts.get(seen.key, (0.5, 0.5))
        rho = min(0.96, max(0.875, math.pow(2.0, -seen.kl / 0.06)))
        reward = (seen.reward + 2.0) / 5.0
        counts[seen.key] = (rho * alpha + reward, rho * beta + 1.0 - reward)
    assert state == tracker.update_all(tracker.start(), observations)
    assert set(state.beliefs) == set(counts)
    for key, (alpha, beta) in counts.items():
        assert tracker.value(state, key) == pytest.approx(-2 + 5 * alpha / (alpha + beta))
        assert -2.0 <= tracker.value(state, key) <= 3.0


@given(OBSERVATIONS)
def test_the_state_goes_through_json_without_the_loss_of_a_bit(seen: list[Observation]) -> None:
    tracker = ValueTracker(low=-2.0, high=3.0)
    state = tracker.update_all(tracker.start(), seen)
    assert msgspec.json.decode(msgspec.json.encode(state), type=TrackerState) == state


@pytest.mark.parametrize("reward", [-0.1, 1.1, math.nan, math.inf])
def test_a_reward_outside_the_bounds_is_refused_and_named(reward: float) -> None:
    with pytest.raises(ValueError, match=f"p: the reward must be between 0 and 1, got {reward}"):
        ValueTracker().update(TrackerState(), "p", reward)


@pytest.mark.parametrize("kl", [-0.1, math.nan, math.inf])
def test_a_kl_that_is_none_is_refused(kl: float) -> None:
    with pytest.raises(ValueError, match=f"the KL must be finite and at least 0, got {kl}"):
        ValueTracker().update(TrackerState(), "p", 1.0, kl)


@pytest.mark.parametrize(
    "wrong",
    [{"half_life": 0.0}, {"rho_min": 0.97}, {"rho_max": 1.1}, {"low": 1.0}, {"high": math.nan}],
)
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"(?s){next(iter(wrong))}.*got"):
        ValueTracker(**wrong)
