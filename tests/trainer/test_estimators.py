"""Every estimator against values by hand and a reference in plain loops; what holds for all of
them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.algorithms import ESTIMATORS as TABLE
from connectors.algorithms import Advantage
from trainer.advantages import advantage
from trainer.estimators import ESTIMATORS, Units, whiten

RELATIVE = [n for n, e in TABLE.items() if not e.per_token and not e.needs_value and not e.whitens]
"""Whose advantage follows from the unit's own group (and, of gpg, a factor of the step)."""


def reference_whiten(tokens: list[float]) -> list[float]:
    mean = math.fsum(tokens) / len(tokens)
    variance = math.fsum((x - mean) ** 2 for x in tokens) / (len(tokens) - 1)
    return [(x - mean) / math.sqrt(variance + 1e-8) for x in tokens]


def reference(
    name: str, rewards: list[float], groups: list[int], lengths: list[int]
) -> list[float]:
    """One number a sample, in loops, with the standard library's statistics."""
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        members = [j for j, g in enumerate(groups) if g == group]
        values = [rewards[j] for j in members]
        others = [rewards[j] for j in members if j != i]
        mean = math.fsum(values) / len(values)
        if name == "grpo":
            result.append((reward - mean) / (statistics.stdev(values) + 1e-6))
        elif name == "dr-grpo":
            result.append(reward - mean)
        elif name == "grpo-passk":
            best = all(reward > other for other in others)
            lead = reward - max(others) if best else 0.0
            result.append(lead / (statistics.stdev(values) + 1e-6))
        elif name == "rloo":
            result.append(reward - math.fsum(others) / len(others))
        elif name == "leave-one-out":
            spread = statistics.stdev(others) if len(others) > 1 else 0.0
            gain = reward - math.fsum(others) / len(others)
            result.append(gain / (spread + 1e-6) if spread > 0 else gain)
        elif name == "maxrl":
            result.append((reward - mean) / (mean + 1e-6))
        elif name == "opo":
            weighted = math.fsum(lengths[j] * rewards[j] for j in members)
            result.append(reward - weighted / sum(lengths[j] for j in members))
        elif name == "gpg":
            result.append(len(rewards) / sum(r != 0 for r in rewards) * (reward - mean))
        else:
            result.append(reward - mean)  # reinforce++-baseline, before whitening
    if name == "reinforce++-baseline":
        tokens = [x for x, n in zip(result, lengths, strict=True) for _ in range(n)]
        white = reference_whiten(tokens)
        starts = np.cumsum([0, *lengths])
        result = [white[starts[i]] for i in range(len(lengths))]
    return result


def given_units(
    values: Sequence[float],
    groups: Sequence[int],
    num_tokens: Sequence[int] | None = None,
    baselines: Sequence[float] | None = None,
) -> Units:
    return Units(
        values=np.array(values, np.float64),
        groups=np.array(groups, np.int64),
        num_tokens=np.array(num_tokens or [1] * len(values), np.int64),
        baselines=np.array(baselines or [0.0] * len(values), np.float64),
    )


def test_the_table_of_names_and_the_functions_agree() -> None:
    assert set(get_args(Advantage)) == set(TABLE) == set(ESTIMATORS)
    for name, estimator in TABLE.items():
        defaults: dict[str, Any] = dict(ESTIMATORS[name].__kwdefaults__ or {})
        declared = {key: p.default for key, p in estimator.parameters.items()}
        if estimator.per_token:
            declared.pop("gamma")  # it goes into the returns, before the estimator
        assert declared == defaults, name


def test_those_that_need_a_group_are_the_ones_that_refuse_a_single_sample() -> None:
    for name, estimator in TABLE.items():

        def call(name: str = name) -> Any:
            return advantage(
                name,
                np.array([1.0, 0.0, 1.0]),
                np.array([5, 5, 6]),
                np.ones((3, 2)),
                values=np.array([0.5, 0.5, 0.25]),
            )

        if estimator.needs_group:
            with pytest.raises(ValueError, match=f"group 6 has one sample, row 2 .*{name} needs"):
                call()
        else:
            assert np.isfinite(call()).all()


# ------------------------------------------------------------------ by hand
BY_HAND: list[tuple[str, dict[str, Any], list[float], list[float]]] = [
    # rewards 0, 0, 1, 3 of one group: mean 1, squares 1 + 1 + 0 + 4, std sqrt(2)
    ("grpo", {}, [0, 0, 1, 3], [-1 / 1.4142145623, -1 / 1.4142145623, 0, 2 / 1.4142145623]),
    ("grpo", {"epsilon": 1.0}, [0, 1], [-0.5 / (0.5**0.5 + 1), 0.5 / (0.5**0.5 + 1)]),
    ("dr-grpo", {}, [0, 0, 1, 3], [-1, -1, 0, 2]),
    ("grpo-passk", {"normalise": False}, [0, 0, 1, 3], [0, 0, 0, 2]),
    ("grpo-passk", {}, [0, 0, 1, 3], [0, 0, 0, 2 / 1.4142145623]),
    ("grpo-passk", {}, [0, 3, 1, 3], [0, 0, 0, 0]),
    ("rloo", {}, [0, 0, 1, 3], [-4 / 3, -4 / 3, 0, 8 / 3]),
    # against 1 and 3 of mean 2 and std sqrt(2); 0 and 3: 3/2, 3/sqrt(2); 0 and 1: 1/2, 1/sqrt(2)
    (
        "leave-one-out",
        {},
        [0, 1, 3],
        [-2 / (2**0.5 + 1e-6), -0.5 / (4.5**0.5 + 1e-6), 2.5 / (0.5**0.5 + 1e-6)],
    ),
    ("leave-one-out", {}, [0, 4], [-4, 4]),
    # the last one's others do not differ
    ("leave-one-out", {}, [1, 1, 3], [-1 / (2**0.5 + 1e-6), -1 / (2**0.5 + 1e-6), 2]),
    ("maxrl", {}, [0, 0, 0, 1], [-0.25 / 0.250001] * 3 + [0.75 / 0.250001]),
    ("maxrl", {}, [0, 0], [0, 0]),
    ("gpg", {}, [0, 0, 1, 3], [-2, -2, 0, 4]),
    ("gpg", {"f_norm": 4.0}, [0, 0, 1, 3], [-0.5, -0.5, 0, 1]),
    ("gpg", {}, [0, 0], [0, 0]),
]


@pytest.mark.parametrize(("name", "parameters", "rewards", "expected"), BY_HAND)
def test_one_group_by_hand(
    name: str, parameters: dict[str, Any], rewards: list[float], expected: list[float]
) -> None:
    got = ESTIMATORS[name](given_units(rewards, [3] * len(rewards)), **parameters)
    np.testing.assert_allclose(got, expected, rtol=1e-9)


def test_opo_weighs_the_baseline_by_length() -> None:
    # 1 token of reward 1, 3 of reward 0: baseline 1/4
    got = ESTIMATORS["opo"](given_units([1, 0], [0, 0], [1, 3]))
    np.testing.assert_allclose(got, [0.75, -0.25])
    assert ESTIMATORS["opo"](given_units([1, 0], [0, 0], [0, 0])).tolist() == [1.0, 0.0]


def test_a_group_of_one_keeps_its_reward_where_the_source_says_so() -> None:
    units = given_units([2.0, 0.0, 1.0], [7, 8, 8])
    assert ESTIMATORS["opo"](units).tolist() == [2.0, -0.5, 0.5]
    assert ESTIMATORS["gpg"](units).tolist() == [3.0, -0.75, 0.75]  # alpha 3/2
    np.testing.assert_allclose(
        ESTIMATORS["reinforce++-baseline"](units), reference_whiten([2.0, -0.5, 0.5])
    )


def test_spo_normalises_what_the_value_did_not_foresee() -> None:
    # gains 0.5, -0.5, 0: mean 0, std 1/2
    got = ESTIMATORS["spo"](given_units([1, 0, 1], [0, 0, 1], None, [0.5, 0.5, 1.0]))
    np.testing.assert_allclose(got, [1, -1, 0], rtol=1e-7)
    assert ESTIMATORS["spo"](given_units([1, 1], [0, 1], None, [0.3, 0.3])).tolist() == [0, 0]


def test_whitening_counts_each_token() -> None:
    # 0, 0, 0, 4: mean 1, variance (3 + 9) / 3 = 4
    got = whiten(np.array([0.0, 4.0]), np.array([3, 1]))
    np.testing.assert_allclose(got, np.array([-1, 3]) / math.sqrt(4 + 1e-8), rtol=1e-12)
    with pytest.raises(ValueError, match="at least two trained tokens, got 1"):
        whiten(np.array([0.0, 4.0]), np.array([0, 1]))


def test_reinforce_pp_by_hand() -> None:
    # Row 0 trains tokens 1 and 3 of reward 1 at the end: returns 1/2 and 1 at gamma 1/2. Row 1: 0.
    mask = np.array([[0, 1, 0, 1], [0, 0, 1, 0]])
    got = advantage("reinforce++", np.array([1.0, 0.0]), np.array([0, 0]), mask, gamma=0.5)
    white = reference_whiten([0.5, 1.0, 0.0])
    np.testing.assert_allclose(got, [[0, white[0], 0, white[1]], [0, 0, white[2], 0]], rtol=1e-12)


# ------------------------------------------------------------------ against the loops
@pytest.mark.parametrize("name", [*RELATIVE, "reinforce++-baseline"])
def test_mixed_groups_interleaved_against_the_loops(name: str) -> None:
    rng = np.random.default_rng(1)
    groups = [3, 9, 3, 9, 9, 3, 1, 1, 9]
    rewards = rng.random(9).round(2).tolist()
    lengths = rng.integers(1, 5, 9).tolist()
    got = ESTIMATORS[name](given_units(rewards, groups, lengths))
    np.testing.assert_allclose(
        got, reference(name, rewards, groups, lengths), rtol=1e-10, atol=1e-12
    )


GROUPED = st.lists(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.5]), st.integers(0, 4)),
        min_size=2,
        max_size=5,
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(grouped=GROUPED, name=st.sampled_from(sorted(TABLE)), seed=st.integers(0, 99))
def test_every_estimator_is_finite_and_zero_where_a_group_is_homogeneous(
    grouped: list[list[tuple[float, int]]], name: str, seed: int
) -> None:
    flat = [(r, n, g) for g, members in enumerate(grouped) for r, n in members]
    rewards = [r for r, _, _ in flat]
    order = np.random.default_rng(seed).permutation(len(flat))
    units = given_units(
        [flat[i][0] for i in order], [flat[i][2] for i in order], [flat[i][1] for i in order]
    )
    if TABLE[name].whitens and units.num_tokens.sum() < 2:
        return
    got = ESTIMATORS[name](units)
    assert np.isfinite(got).all()
    # the order of the rows is nothing to the result
    sorted_units = given_units(rewards, [g for _, _, g in flat], [n for _, n, _ in flat])
    again = ESTIMATORS[name](sorted_units)
    np.testing.assert_allclose(got, again[order], rtol=1e-9, atol=1e-9)
    if name in RELATIVE:
        for g, members in enumerate(grouped):
            if len({r for r, _ in members}) == 1:
                assert (got[units.groups == g] == 0).all()


@settings(max_examples=40, deadline=None)
@given(grouped=GROUPED, name=st.sampled_from(["grpo", "dr-grpo", "rloo", "leave-one-out", "gpg"]))
def test_centred_estimators_do_not_see_a_shift_of_the_rewards(
    grouped: list[list[tuple[float, int]]], name: str
) -> None:
    flat = [(r, g) for g, members in enumerate(grouped) for r, _ in members]
    values, groups = np.array([r for r, _ in flat]) + 1.0, [g for _, g in flat]
    got = ESTIMATORS[name](given_units(values.tolist(), groups))
    shifted = ESTIMATORS[name](given_units((values + 8.0).tolist(), groups))
    np.testing.assert_allclose(got, shifted, rtol=1e-6, atol=1e-9)


# ------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("gro", {}, "unknown advantage 'gro', did you mean 'grpo'"),
        ("grpo", {"epsilom": 1.0}, "grpo: unknown parameter 'epsilom', did you mean 'epsilon'"),
        ("rloo", {"epsilon": 1.0}, "rloo: unknown parameter 'epsilon': it takes none"),
        (
            "grpo",
            {"epsilon": 0.0},
            "grpo: epsilon must be a finite number of at least 1e-12, got 0",
        ),
        (
            "grpo",
            {"epsilon": True},
            "grpo: epsilon must be a finite number of at least 1e-12, got True",
        ),
        ("reinforce\\+\\+", {"gamma": 1.5}, "must be a number of at least 0 and at most 1"),
        ("grpo-passk", {"normalise": 1}, "grpo-passk: normalise must be true or false, got 1"),
    ],
)
def test_a_wrong_name_or_parameter_is_refused_with_the_rule(
    name: str, parameters: dict[str, Any], message: str
) -> None:
    call: Callable[[], Any] = lambda: advantage(  # noqa: E731
        name.replace("\\", ""), np.zeros(2), np.zeros(2), np.ones((2, 2)), **parameters
    )
    with pytest.raises(ValueError, match=message):
        call()


def test_one_trained_token_cannot_be_whitened_and_its_row_is_named() -> None:
    mask = np.array([[0, 0], [0, 1]])
    for name in ("reinforce++", "reinforce++-baseline"):
        with pytest.raises(ValueError, match=r"two trained tokens, got 1, in row 1 \(t/0/4/1, gro"):
            advantage(
                name, np.array([1.0, 0]), np.array([0, 0]), mask, row_names=["t/0/4/0", "t/0/4/1"]
            )
        with pytest.raises(ValueError, match="got 0: all are masked"):
            advantage(name, np.array([1.0, 0]), np.array([0, 0]), np.zeros((2, 2)))


def test_maxrl_refuses_a_reward_below_zero_and_spo_a_missing_value() -> None:
    rewards, groups, mask = np.array([1.0, -1.0]), np.array([4, 4]), np.ones((2, 1))
    with pytest.raises(ValueError, match=r"row 1 \(group 4\) is -1.0; maxrl needs .* at least 0"):
        advantage("maxrl", rewards, groups, mask)
    with pytest.raises(ValueError, match="spo needs values"):
        advantage("spo", rewards, groups, mask)
    with pytest.raises(ValueError, match=r"spo normalises .* at least two, got 1"):
        advantage("spo", np.ones(1), np.ones(1), np.ones((1, 3)), values=np.zeros(1))
