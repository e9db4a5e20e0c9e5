"""The JSON of simulated policies: one seed's outcome, or the means over several."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from deploy.simulate.lengths import KINDS, Trace
from deploy.simulate.workload import Workload

SPREAD: Final = ("steps_per_hour", "trained_tokens_per_s", "trainer_wait_share", "slot_use")
"""Of which several seeds give the least and the most, too."""


def of_seeds(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One policy's outcomes, as JSON, under several seeds: means, of staleness.max the largest, of
    `stalled` the first there is, and `spread`. One outcome is itself."""
    if len(found) == 1:
        return dict(found[0])
    means: dict[str, Any] = _mean(found)
    means["staleness"]["max"] = max(one["staleness"]["max"] for one in found)
    means["stalled"] = next((one["stalled"] for one in found if one["stalled"] is not None), None)
    means["num_stalled"] = sum(one["stalled"] is not None for one in found)
    means["spread"] = {
        name: {"least": min(one[name] for one in found), "most": max(one[name] for one in found)}
        for name in SPREAD
    }
    return means


def workload_json(workload: Workload) -> dict[str, Any]:
    """All of it; of measured lengths and times their number, their mean and their longest."""
    found = dataclasses.asdict(workload)
    kind = next(name for name, known in KINDS.items() if isinstance(workload.lengths, known))
    about = {"mean": workload.lengths.mean(), "longest": workload.lengths.longest}
    if isinstance(workload.lengths, Trace):
        found["lengths"] = {"num": len(workload.lengths.tokens)}
    if isinstance(workload.reward_s, tuple):
        times = workload.reward_s
        found["reward_s"] = {"num": len(times), "mean": fmean(times), "longest": max(times)}
    found["lengths"] = {"kind": kind, **found["lengths"], **about}
    return found


def _mean(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = found[0]
    means: dict[str, Any] = {}
    for key in dict.fromkeys(key for one in found for key in one):
        values = [one.get(key, 0) for one in found]
        if all(value == values[0] for value in values):
            means[key] = values[0]
        elif isinstance(first.get(key), Mapping):
            means[key] = _mean(values)
        elif all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            mean = sum(values) / len(values)
            means[key] = round(mean) if key.endswith("_tokens") else mean
        else:
            means[key] = first.get(key)
    return means
