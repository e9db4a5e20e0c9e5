"""Tokens over age: those a step does not train, or trains with less weight.

What is over age follows from the version v the step trains, each token's own and the policy's bound
eta. A step's manifest names the versions concerned with their weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from connectors.records import Group, Trajectory, Version
from operators.staleness.deadline import Deadline
from operators.staleness.types import StalenessPolicy
from trainer import by_version
from trainer.ages import Ages

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
    ages: Ages, *, mask_before: Version | None = None, reweight: Reweight | None = None
) -> dict[Version, float]:
    """Of the versions of a step whose tokens it masks or weighs."""
    found: dict[Version, float] = {}
    for written, age in ages.items():
        if mask_before is not None and written < mask_before:
            found[written] = 0.0
        elif reweight is not None and age > reweight.bound and reweight.decay < 1:
            found[written] = reweight.decay ** (age - reweight.bound)
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
    """As a manifest's settings hold them."""
    return {SETTING: by_version.text(weights)} if weights else {}


def weights_of(settings: Mapping[str, float | str]) -> dict[Version, float]:
    """The opposite of `recorded`, exactly."""
    return by_version.parsed(settings.get(SETTING, ""))


def masked_versions(settings: Mapping[str, float | str]) -> set[Version]:
    """Whose tokens a step with these settings did not train."""
    return {version for version, weight in weights_of(settings).items() if weight == 0}
