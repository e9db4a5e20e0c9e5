"""Signals become one label, the same in whatever order they came."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from operators.labels import Label, NoLabel, Rule, Signal, combined, values_of
from operators.user_code import UserCode


def signal(id: str, value: float, *, time: float = 0.0, name: str = "thumb", at: int = 0) -> Signal:
    return Signal(at, id, name, value, time)


def label(signals: Sequence[Signal], **rule: Any) -> Label | None:
    async def run() -> Label | None:
        return await combined(Rule(window_s=60.0, **rule), signals, UserCode("test"))

    return asyncio.run(run())


SAID = [signal("a", 1.0, time=1), signal("b", 0.0, time=3), signal("c", 0.5, time=2)]


@pytest.mark.parametrize(
    ("combine", "value"),
    [("mean", 0.5), ("last", 0.0), ("min", 0.0), ("max", 1.0), ("sum", 1.0)],
)
def test_signals_are_combined_in_whatever_order_they_came(combine: str, value: float) -> None:
    for order in itertools.permutations(SAID):
        found = label(order, combine=combine)
        assert found is not None
        assert found.value == value
        assert found.kind == "final"


def test_the_same_id_counts_once_and_the_first_in_the_log_counts() -> None:
    found = label([signal("a", 0.0, at=7), signal("a", 1.0, at=3)])
    assert found == Label(1.0, "final")


def test_a_value_outside_the_bounds_is_cut_and_says_so() -> None:
    assert label([signal("a", 5.0)], combine="sum") == Label(1.0, "final", 5.0)
    assert label([signal("a", -1.0)], low=-0.5) == Label(-0.5, "final", -1.0)


def test_a_label_is_what_a_record_can_hold() -> None:
    assert label([signal("a", 0.1)]) == Label(float(np.float32(0.1)), "final")


def test_only_the_names_asked_for_count() -> None:
    said = [signal("a", 1.0), signal("b", 0.0, name="latency")]
    assert label(said, names=("thumb",)) == Label(1.0, "final")
    assert label(said[1:], names=("thumb",)) is None


def test_a_users_function_gets_the_values_by_name_in_order_of_time() -> None:
    given = []

    async def mine(values: dict[str, list[float]]) -> float:
        given.append(values)
        return 0.25

    assert label([*SAID, signal("d", 3.0, name="stars")], combine=mine) == Label(0.25, "final")
    assert given == [{"thumb": [1.0, 0.5, 0.0], "stars": [3.0]}]
    assert values_of(SAID) == {"thumb": [1.0, 0.5, 0.0]}


def raises(values: object) -> float:
    raise RuntimeError("no")


@pytest.mark.parametrize(
    ("combine", "reason"),
    [
        (raises, "reward_failed"),
        (lambda values: "good", "reward_failed"),
        (lambda values: float("nan"), "reward_nan"),
    ],
)
def test_a_users_function_that_gives_no_number_closes_with_the_reason(
    combine: Any, reason: str
) -> None:
    with pytest.raises(NoLabel) as caught:
        label(SAID, combine=combine)
    assert caught.value.reason == reason


def test_enormous_values_are_cut_like_others() -> None:
    assert label([signal("a", 1e308), signal("b", 1e308)], combine="sum") == Label(
        1.0, "final", float("inf")
    )
