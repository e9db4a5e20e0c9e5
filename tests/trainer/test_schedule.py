"""The learning rate of each step: by hand, at its ends, and refused where it cannot be."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.config import Trainer
from trainer.schedule import SCHEDULES, rate

HALF = 0.5 * (1 + math.cos(math.pi / 4))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Six steps, two of warm-up: 1/2, 1, then a quarter of the way each.
        ({"schedule": "constant"}, [0.5, 1, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [0.5, 1, 0.75, 0.5, 0.25, 0]),
        ({"schedule": "linear", "min_ratio": 0.2}, [0.5, 1, 0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "cosine"}, [0.5, 1, HALF, 0.5, 1 - HALF, 0]),
        ({"schedule": "constant", "warmup_steps": 0}, [1, 1, 1, 1, 1, 1]),
        ({"schedule": "linear", "warmup_steps": 0}, [1, 0.8, 0.6, 0.4, 0.2, 0]),
        ({"schedule": "linear", "warmup_steps": 5}, [0.2, 0.4, 0.6, 0.8, 1, 0]),
    ],
)
def test_a_schedule_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    options = {"num_steps": 6, "peak": 3.0, "warmup_steps": 2} | options
    found = [rate(step, **options) for step in range(1, 7)]
    assert found == pytest.approx([3.0 * share for share in expected], abs=1e-15)


def test_after_the_last_step_it_stays_where_it_ended() -> None:
    for schedule in ("linear", "cosine"):
        options: dict[str, Any] = {"num_steps": 6, "peak": 3.0, "schedule": schedule}
        assert [rate(n, **options, min_ratio=0.5) for n in (6, 7, 700)] == [1.5, 1.5, 1.5]
    assert [rate(n, num_steps=1, peak=3.0, schedule="cosine") for n in (1, 2)] == [3.0, 0.0]


@given(
    schedule=st.sampled_from(sorted(SCHEDULES)),
    num_steps=st.integers(2, 200),
    warmup=st.floats(0, 1, exclude_max=True),
    min_ratio=st.floats(0, 1),
)
def test_it_rises_to_the_peak_once_and_never_again(
    schedule: str, num_steps: int, warmup: float, min_ratio: float
) -> None:
    warmup_steps = int(warmup * num_steps)
    rates = [
        rate(
            step, num_steps=num_steps, peak=2.0, schedule=schedule, warmup_steps=warmup_steps,
            min_ratio=min_ratio,
        )
        for step in range(1, num_steps + 1)
    ]  # fmt: skip
    top = max(0, warmup_steps - 1)
    assert rates[top] == 2.0
    assert all(0 < a < b for a, b in pairwise(rates[: top + 1]))
    assert all(a >= b for a, b in pairwise(rates[top:]))
    assert rates[-1] == pytest.approx(2.0 if schedule == "constant" else 2.0 * min_ratio)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"step": 0}, "step: must be at least 1, got 0"),
        ({"num_steps": 0}, "num_steps: must be at least 1, got 0"),
        ({"peak": -1.0}, "learning_rate: must be finite and not below 0, got -1.0"),
        ({"peak": math.nan}, "learning_rate: must be finite and not below 0, got nan"),
        ({"min_ratio": 1.5}, "min_learning_rate_ratio: must be from 0 to 1, got 1.5"),
        ({"warmup_steps": -1}, r"warmup_steps: must be from 0 to below num_steps \(4\), got -1"),
        ({"warmup_steps": 4}, r"warmup_steps: must be from 0 to below num_steps \(4\), got 4"),
        (
            {"schedule": "cosin"},
            "learning_rate_schedule: must be one of constant, linear, cosine, got 'cosin'",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_key_and_value(changed: dict[str, Any], message: str) -> None:
    options = {"step": 1, "num_steps": 4, "peak": 1.0} | changed
    with pytest.raises(ValueError, match=message):
        rate(**options)


def test_the_configuration_knows_the_same_schedules() -> None:
    declared = Trainer.model_fields["learning_rate_schedule"].annotation
    assert set(get_args(declared)) == set(SCHEDULES)
