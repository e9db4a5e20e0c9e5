"""Simulated users of the near-line example: what they ask, and what they say of the answers.

They want digits sorted, and judge by looking. What they say is like real feedback: it comes after
minutes, or hours, or never, and some change their mind.

All numbers are of simulated minutes.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

NUM_DIGITS = 5
SHARE_SILENT = 0.15
"""Of users who never say anything."""
SHARE_LATE = 0.05
"""Who speak long after: their word corrects a label, or comes too late."""
SHARE_HASTY = 0.05
"""Who press the wrong thumb, and then the right one."""
SHARE_WRONG = 0.02
"""Who press the wrong thumb and leave it at that."""
SHARE_AGAIN = 0.2
"""Who ask a second time, in the same session."""
MEAN_DELAY, MEAN_PAUSE, MEAN_LATE = 6.0, 2.0, 120.0


@dataclass(frozen=True, slots=True)
class Thumb:
    """What a user presses, so long after the answer."""

    value: float
    after: float


def question(rng: random.Random) -> tuple[str, str]:
    """What a user writes, and the answer that would please."""
    digits = [rng.choice(string.digits) for _ in range(NUM_DIGITS)]
    return "sort " + "".join(digits), "".join(sorted(digits))


def thumbs(is_right: bool, rng: random.Random) -> list[Thumb]:
    """What one user says of one answer, in the order in which it is said."""
    value = float(is_right)
    draw = rng.random()
    if draw < SHARE_SILENT:
        return []
    if draw < SHARE_SILENT + SHARE_LATE:
        return [Thumb(value, rng.expovariate(1 / MEAN_LATE))]
    after = rng.expovariate(1 / MEAN_DELAY)
    if draw < SHARE_SILENT + SHARE_LATE + SHARE_HASTY:
        return [Thumb(1 - value, after), Thumb(value, after + rng.expovariate(1 / MEAN_PAUSE))]
    if draw < SHARE_SILENT + SHARE_LATE + SHARE_HASTY + SHARE_WRONG:
        value = 1 - value
    return [Thumb(value, after)]
