"""Tokens over age: those a step does not train, or trains with less weight.

What is over age follows from the version v the step trains, each token's own and the policy's bound
eta. A step's manifest names the versions concerned with their weights, so whoever executes it again
needs neither policy nor lineage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from connectors.records import Fork, Group, Trajectory, Version
from operators.staleness.deadline import Deadline
from operators.staleness.lineage import lag
from operators.staleness.types import StalenessPolicy

SETTING: Final = "token_weights"
"""Key of a manifest's settings."""

Weights = Mapping[Version, float]
"""Of the tokens that a version wrote: 0 = not trained; 1 for versions that are not in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reweight:
    """A token that is n steps older than `bound` counts decay ** n."""

    bound: int
    decay: float


def reweight_of(policy: StalenessPolicy[Any]) -> Reweight | None:
    """What the policy demands, None when it weighs all tokens the same."""
    if isinstance(policy, Deadline) and policy.at_deadline == "reweight":
        return Reweight(bound=policy.max_age, decay=policy.decay)
    return None


def token_weights(
    groups: Sequence[Group],
    version: Version,
    lineage: Mapping[int, Fork],
    *,
    mask_before: Version | None = None,
    reweight: Reweight | None = None,
) -> dict[Version, float]:
    """Of the versions in `groups` whose tokens a step that trains `version` masks or weighs."""
    found: dict[Version, float] = {}
    for written in sorted({s.version for g in groups for t in g.trajectories for s in t.segments}):
        if mask_before is not None and written < mask_before:
            found[written] = 0.0
        elif reweight is not None:
            late = lag(version, written, lineage) - reweight.bound
            if late > 0 and reweight.decay < 1:
                found[written] = reweight.decay**late
    return found


def row_weights(trajectory: Trajectory, weights: Weights) -> NDArray[np.float32]:
    """[T], of each token; 1 for those that no version wrote."""
    found = np.ones(len(trajectory.tokens), np.float32)
    for segment in trajectory.segments:
        found[segment.start : segment.end] = weights.get(segment.version, 1.0)
    return found


def counts(groups: Sequence[Group], weights: Weights) -> dict[str, float]:
    """Metrics: of the tokens that could be trained, how many are masked and how many count less.
    Empty without weights."""
    if not weights:
        return {}
    masked = reweighted = 0
    for trajectory in (t for g in groups for t in g.trajectories):
        of_row = row_weights(trajectory, weights)[1:][trajectory.loss_mask[1:] != 0]
        masked += int((of_row == 0).sum())
        reweighted += int(((of_row > 0) & (of_row < 1)).sum())
    return {"tokens/masked": float(masked), "tokens/reweighted": float(reweighted)}


def recorded(weights: Weights) -> dict[str, float | str]:
    """As a manifest's settings hold them: `incarnation.number=weight`, blanks between."""
    if not weights:
        return {}
    return {SETTING: " ".join(f"{version}={weight!r}" for version, weight in weights.items())}


def weights_of(settings: Mapping[str, float | str]) -> dict[Version, float]:
    """The opposite of `recorded`, exactly."""
    found = {}
    for entry in str(settings.get(SETTING, "")).split():
        version, _, weight = entry.partition("=")
        incarnation, _, number = version.partition(".")
        found[Version(int(incarnation), int(number))] = float(weight)
    return found


def masked_versions(settings: Mapping[str, float | str]) -> set[Version]:
    """Whose tokens a step with these settings did not train."""
    return {version for version, weight in weights_of(settings).items() if weight == 0}
