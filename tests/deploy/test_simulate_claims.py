"""What docs/staleness.md says of the policies on the named workloads, means of 5 seeds each."""

from __future__ import annotations

from functools import cache
from statistics import fmean
from typing import Any

import pytest

from deploy.simulate.workload import WORKLOADS
from deploy.simulate.world import simulate
from operators.staleness import policy_for

pytestmark = pytest.mark.slow

NUM_SEEDS = 5
NUM_STEPS = 60


@cache
def mean_of_runs(workload: str, name: str, **parameters: Any) -> tuple[float, float, float]:
    """Steps an hour, mean staleness, length ratio. The bound is kept in every run."""
    simulated = WORKLOADS[workload]
    subject = policy_for(name, simulated.shape, **parameters)
    runs = [
        simulate(simulated, subject, num_steps=NUM_STEPS, seed=seed) for seed in range(NUM_SEEDS)
    ]
    assert all(run.stalled is None for run in runs)
    assert subject.bound is None or max(run.staleness.max for run in runs) <= subject.bound
    return (
        fmean(run.steps_per_hour for run in runs),
        fmean(run.staleness.mean for run in runs),
        fmean(run.trained_length_ratio for run in runs),
    )


def deadline(workload: str, bound: int, lookahead: int) -> tuple[float, float, float]:
    return mean_of_runs(workload, "deadline", bound=bound, lookahead=lookahead)


def weight_fifo(workload: str, bound: int) -> tuple[float, float, float]:
    return mean_of_runs(workload, "nemo-weight-fifo", max_staleness_versions=bound)


def test_standard_is_as_fast_as_first_in_first_out_at_less_than_0_6_of_its_mean_staleness() -> None:
    ours, fifo = deadline("standard", 4, 2), weight_fifo("standard", 4)
    assert ours[0] == pytest.approx(fifo[0], rel=0.02)
    assert ours[1] < 0.6 * fifo[1]


def test_with_few_slots_it_is_at_least_as_fast_and_with_bound_8_faster() -> None:
    assert deadline("slot-limited", 4, 3)[0] >= weight_fifo("slot-limited", 4)[0]
    assert deadline("slot-limited", 8, 2)[0] > 1.04 * weight_fifo("slot-limited", 8)[0]


@pytest.mark.parametrize("workload", ["standard", "slot-limited"])
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("trl", {"max_staleness": 4}),
        ("prime-rl", {"max_off_policy_steps": 4}),
        ("nemo-windowed", {"max_staleness_versions": 4}),
        ("verl-drop", {"max_off_policy_threshold": 5, "num_warmup_batches": 4}),
        ("deadline", {"at_deadline": "drop"}),
    ],
)
def test_who_drops_trains_shorter_trajectories_than_were_sampled(
    workload: str, name: str, parameters: dict[str, Any]
) -> None:
    whole = deadline(workload, 4, 2)[2]
    assert mean_of_runs(workload, name, **parameters)[2] < whole - 0.01
