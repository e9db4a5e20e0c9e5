"""How fast a run was, from its own log: what enters are times and token counts as arrays, what
leaves are a workload's seconds. Fits are least absolute deviations, so a hiccup, a checkpoint or a
warm-up among the measurements moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MIN_STEPS: Final = 4
"""Steps of which the time from the one before is known; fewer are no measurement."""
MIN_SAMPLES: Final = 16
MOST_SAMPLES: Final = 4096
"""Enough for any fit here; more are thinned out evenly."""
FEW: Final = 0.25
"""Share of the answers: fewer that cannot have queued are those of an engine less busy than it is
most of the time."""
VARIES: Final = 0.25
"""Between its 10th and its 90th percentile, a share of its median: less is no variation to fit
to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """A request takes overhead_s + tokens x (token_s + running x per_running_s) when its engine
    decodes `running` sequences together. `how` says from what that was read."""

    overhead_s: float
    token_s: float
    per_running_s: float
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A step takes fixed_s + tokens x token_s."""

    fixed_s: float
    token_s: float
    how: str


def decode_times(
    started: Floats, ended: Floats, tokens: Floats, *, num_slots: int, num_engines: int
) -> Decode:
    """From each sample's start, end and number of generated tokens, and how many sequences all
    engines decode together. A sample that shared the engines with more than `num_slots` waited in
    a queue, which its time does not tell apart; where all did, the engines' throughput gives the
    time of a token. ValueError when there is too little to measure."""
    if len(tokens) < MIN_SAMPLES:
        raise ValueError(f"at least {MIN_SAMPLES} samples are needed, got {len(tokens)}")
    together = in_flight(started, ended)
    unqueued = np.flatnonzero((together <= num_slots) & (tokens > 0) & (ended > started))
    if len(unqueued) < MIN_SAMPLES:
        token_s = num_slots * busy_s(started, ended) / max(1.0, float(tokens.sum()))
        how = f"the throughput of {num_slots} full slots, whatever runs beside"
        return Decode(overhead_s=0.0, token_s=token_s, per_running_s=0.0, how=how)
    at = unqueued[:: -(-len(unqueued) // MOST_SAMPLES)]
    length, running, took = tokens[at], together[at] / num_engines, (ended - started)[at]
    ones = np.ones_like(length)
    lengths_vary, load_varies = varies(length), varies(running)
    # Columns that no measurement tells apart would share their coefficients out at random.
    overhead = ones if lengths_vary else 0 * ones
    per_running = length * running if load_varies else 0 * ones
    fitted = least_absolute(np.stack([overhead, length, per_running], axis=1), took)
    how = f"{len(unqueued)} of {len(tokens)} answers, those that cannot have queued, "
    how += f"{np.median(running):.0f} of them together on an engine"
    if len(unqueued) < FEW * len(tokens):
        how += f"; less than {FEW:.0%} of all, so the prediction may be too fast"
    if not lengths_vary:
        how += "; lengths hardly vary, so all of a sample's time is its tokens'"
    if not load_varies:
        how += "; that number hardly varies, so tokens take as long beside more"
    return Decode(
        overhead_s=float(fitted[0]), token_s=float(fitted[1]), per_running_s=float(fitted[2]),
        how=how,
    )  # fmt: skip


def train_times(seconds: Floats, tokens: Floats) -> Training:
    """From the seconds that each step took, waiting left out, and the tokens it trained. ValueError
    when there are too few."""
    if len(seconds) < MIN_STEPS:
        raise ValueError(
            f"at least {MIN_STEPS} steps with a step before them are needed, got {len(seconds)}"
        )
    if not varies(tokens):
        how = f"{len(seconds)} steps of about as many tokens, so its time is the step's"
        return Training(fixed_s=float(np.median(seconds)), token_s=0.0, how=how)
    fitted = least_absolute(np.stack([np.ones_like(tokens), tokens], axis=1), seconds)
    how = f"{len(seconds)} steps"
    return Training(fixed_s=float(fitted[0]), token_s=float(fitted[1]), how=how)


def in_flight(started: Floats, ended: Floats) -> Floats:
    """Of each sample, how many were under way during it on average, itself included."""
    times = np.concatenate([started, ended])
    steps = np.concatenate([np.ones_like(started), -np.ones_like(ended)])
    order = np.argsort(times, kind="stable")
    times, running = times[order], np.cumsum(steps[order])
    area = np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(times))])
    during = np.interp(ended, times, area) - np.interp(started, times, area)
    mean: Floats = during / np.maximum(ended - started, 1e-9)
    return np.maximum(mean, 1.0)


def busy_s(started: Floats, ended: Floats) -> float:
    """How long any sample was under way."""
    order = np.argsort(started)
    first = started[order]
    reached = np.maximum.accumulate(ended[order])
    gaps = np.maximum(0.0, first[1:] - reached[:-1]).sum()
    return float(reached[-1] - first[0] - gaps)


def varies(values: Floats) -> bool:
    low, middle, high = np.quantile(values, [0.1, 0.5, 0.9])
    return bool(high - low > VARIES * max(middle, 1e-12))


def least_absolute(columns: Floats, values: Floats) -> Floats:
    """The coefficients >= 0 that leave the least sum of absolute errors, by iteratively reweighted
    least squares; a column that would need a negative one, or is all zero, gets 0.

    columns  [n, k]
    values   [n]
    """
    scale = np.abs(columns).max(axis=0)
    active = [int(k) for k in np.flatnonzero(scale > 0)]
    found = np.zeros(columns.shape[1])
    while active:
        part = columns[:, active] / scale[active]
        fitted = _reweighted(part, values)
        worst = int(np.argmin(fitted))
        if fitted[worst] >= 0:
            found[active] = fitted / scale[active]
            break
        del active[worst]
    return found


def _reweighted(columns: Floats, values: Floats) -> Floats:
    nearly = 1e-6 * max(float(np.abs(values).max()), 1e-12)
    weight = np.ones_like(values)
    for _ in range(60):
        root = np.sqrt(weight)
        fitted: Floats = np.linalg.lstsq(columns * root[:, None], values * root, rcond=None)[0]
        weight = 1 / np.maximum(np.abs(values - columns @ fitted), nearly)
    return fitted
