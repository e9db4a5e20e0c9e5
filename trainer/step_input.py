"""What one step trains, as the trainer takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from connectors.records import Coordinate, Group, Version
from trainer.ages import Ages
from trainer.feed_state import FeedState
from trainer.overdue import Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInput:
    """`records` in order, those of live traffic last; `groups[i]` is the decoded record i,
    `version` the one it trains at (the manifest's is the next one), `ages` those of the groups'
    versions, `weights` those of tokens over age. `dropped`, `settings`, the policy's `actions` (as
    `FeedCore` counts them), the trainer's `waits` (in seconds, by what it waited for) and
    `mean_length` (generated tokens a sample, of all that arrived since the last step) go into the
    manifest, `snapshot` into the checkpoint of this step."""

    step: int
    version: Version
    records: tuple[Coordinate, ...]
    groups: tuple[Group, ...]
    dropped: tuple[str, ...]
    snapshot: FeedState
    ages: Ages
    weights: Weights = field(default_factory=dict)
    settings: Mapping[str, float | str] = field(default_factory=dict)
    actions: Mapping[str, int] = field(default_factory=dict)
    waits: Mapping[str, float] = field(default_factory=dict)
    mean_length: float | None = None
