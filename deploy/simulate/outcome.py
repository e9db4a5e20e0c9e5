"""What a simulated run came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

SHOWN_STEPS: Final = 30
"""Of which a timeline has the slots' use."""


class StepTimes(NamedTuple):
    """Seconds from the start of the run: the trainer waits from `wait_from` to `train_from`;
    `publish_to` is None while its weights, or newer ones, are not held by the engines."""

    step: int
    wait_from: float
    train_from: float
    train_to: float
    publish_to: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """slot_use  (second, share of the slots that run a sequence from then on), in order, until
    SHOWN_STEPS steps are trained"""

    steps: tuple[StepTimes, ...]
    slot_use: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Staleness:
    """In versions, over the trained tokens."""

    mean: float
    p99: int
    max: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Of `num_steps` trained steps, `seconds` long; tokens are those the policy wrote.

    parameters           of the policy, as whoever built it says
    trainer_wait_share   of the time, the trainer waits for a full step
    slot_use             share of the slots that run a sequence, over the time
    dropped_tokens       of groups that the policy dropped
    masked_tokens        in trained groups, below the choice's `mask_before`
    cancelled_tokens     lost to cancels, restarts and the time cap
    failed_tokens        of groups that failed
    trained_length_ratio mean trained length over the mean of the workload's lengths: below 1, long
                         trajectories are trained less often than they are sampled
    closed               groups that ended untrained, by reason
    stalled              why and where nothing could happen any more, with the ledger; None = it ran
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    bound: int | None
    num_steps: int
    seconds: float
    steps_per_hour: float
    trained_tokens_per_s: float
    trainer_wait_share: float
    slot_use: float
    staleness: Staleness
    dropped_tokens: int
    masked_tokens: int
    cancelled_tokens: int
    failed_tokens: int
    trained_length_ratio: float
    closed: Mapping[str, int]
    stalled: str | None
    timeline: Timeline

    def as_json(self) -> dict[str, Any]:
        """What `headwater simulate --json` says of one policy: all but the timeline."""
        said: dict[str, Any] = msgspec.to_builtins(self)
        del said["timeline"]
        return said
