"""How old a step's tokens are: the versions that wrote them enter, steps behind the version that is
trained leave.

A manifest names the age of each version in its step, so whoever executes it again needs no lineage.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from connectors.records import Fork, Group, Trajectory, Version
from operators.staleness.lineage import lag
from trainer import by_version

SETTING: Final = "token_ages"
"""Key of a manifest's settings."""

UNKNOWN: Final = np.iinfo(np.int32).min
"""The age of a token that no version wrote."""

Ages = Mapping[Version, int]
"""Steps behind the version that is trained; below 0 where a shadow trains what is ahead of it."""


def ages_of(groups: Sequence[Group], version: Version, lineage: Mapping[int, Fork]) -> Ages:
    """Of every version in `groups`, for a step that trains at `version`."""
    versions = {s.version for g in groups for t in g.trajectories for s in t.segments}
    return {written: lag(version, written, lineage) for written in sorted(versions)}


def row_ages(trajectory: Trajectory, ages: Ages) -> NDArray[np.int32]:
    """[T], of each token."""
    found = np.full(len(trajectory.tokens), UNKNOWN, np.int32)
    for segment in trajectory.segments:
        found[segment.start : segment.end] = ages.get(segment.version, UNKNOWN)
    return found


def histogram(
    trajectories: Iterable[Trajectory], ages: Ages, weights: Mapping[Version, float]
) -> Counter[int]:
    """Tokens that may be trained, by age. Those of versions of weight 0 are not, nor is a first
    one: nothing predicts it."""
    of_version: defaultdict[Version, int] = defaultdict(int)
    for trajectory in trajectories:
        for segment in trajectory.segments:
            trained = trajectory.loss_mask[max(segment.start, 1) : segment.end]
            of_version[segment.version] += int(np.count_nonzero(trained))
    found: Counter[int] = Counter()
    for version, count in of_version.items():
        if count and weights.get(version, 1.0) > 0:
            found[ages[version]] += count
    return found


def staleness(counts: Mapping[int, int]) -> dict[str, float]:
    """mean, p99 and max of a histogram; empty without tokens."""
    if not counts:
        return {}
    found, sizes = np.array(sorted(counts)), np.array([counts[age] for age in sorted(counts)])
    cumulated = np.cumsum(sizes)
    at = int(np.searchsorted(cumulated, math.ceil(0.99 * cumulated[-1])))
    return {
        "mean": float(np.average(found, weights=sizes)),
        "p99": float(found[at]),
        "max": float(found[-1]),
    }


def recorded(ages: Ages) -> dict[str, float | str]:
    """As a manifest's settings hold them."""
    return {SETTING: by_version.text(ages)}


def recorded_ages(settings: Mapping[str, float | str]) -> dict[Version, int]:
    """The opposite of `recorded`, exactly."""
    found = by_version.parsed(settings.get(SETTING, ""))
    return {version: int(age) for version, age in found.items()}
