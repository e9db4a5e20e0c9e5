"""The learning rate of each step: where a run is in its steps enters, a rate leaves.

       peak ┤    ╭───────────────  constant
            │   ╱ ╲ ╌ ╌
            │  ╱    ╲     ╌ ╌      linear, cosine
            │ ╱       ╲________╌_  min_ratio * peak
            └┬───┬─────────┬─────
             1   warmup    num_steps

A function of the step's number alone, so that a run that goes on from a checkpoint, or takes a step
again from its manifest, has the rate it would have had.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final


def rate(
    step: int,
    *,
    num_steps: int,
    peak: float,
    schedule: str = "constant",
    warmup_steps: int = 0,
    min_ratio: float = 0.0,
) -> float:
    """Of step `step`, from 1: linear up to `peak`, which step `warmup_steps` has (step 1 without a
    warm-up), then along `schedule` to min_ratio * peak at step `num_steps`, and that from there on.
    "constant" stays at the peak. ValueError, by key, for what cannot be."""
    for problem, key, rule, value in (
        (step < 1, "step", "at least 1", step),
        (num_steps < 1, "num_steps", "at least 1", num_steps),
        (not 0 <= peak < math.inf, "learning_rate", "finite and not below 0", peak),
        (not 0 <= min_ratio <= 1, "min_learning_rate_ratio", "from 0 to 1", min_ratio),
        (
            not 0 <= warmup_steps < max(1, num_steps),
            "warmup_steps",
            f"from 0 to below num_steps ({num_steps})",
            warmup_steps,
        ),
        (
            schedule not in SCHEDULES,
            "learning_rate_schedule",
            f"one of {', '.join(SCHEDULES)}",
            repr(schedule),
        ),
    ):
        if problem:
            raise ValueError(f"{key}: must be {rule}, got {value}")
    if step < warmup_steps:
        return peak * step / warmup_steps
    first = max(1, warmup_steps)
    progress = min(1.0, (step - first) / max(1, num_steps - first))
    return peak * (min_ratio + (1 - min_ratio) * SCHEDULES[schedule](progress))


SCHEDULES: Final[dict[str, Callable[[float], float]]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
}
"""What is left of the way from the peak to the lowest, 1 at the peak; `progress` from 0 to 1."""
