"""Sums over the steps of a chain, kept so that its last steps can be taken off again."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from typing import Final

from connectors.records import Manifest
from deploy.nearline_sums import Foretold

_METRICS: Final = (
    "tokens/generated", "tokens/trained", "seconds/wait", "seconds/logprobs", "seconds/update",
    "seconds/publish",
)  # fmt: skip
_ADDED: Final = (
    "groups", "skipped", "staleness_weight", "staleness_sum", "elapsed_s", "wait_s", *_METRICS,
)  # fmt: skip
_LARGEST: Final = ("staleness_p99", "staleness_max")
_ACTIONS: Final = (
    "staleness/", "seconds/wait/", "tokens/masked", "tokens/reweighted", "traffic/",
)  # fmt: skip
_COLUMNS: Final = {name: at for at, name in enumerate((*_ADDED, *_LARGEST, "reward"))}


class StepSums:
    """One row of numbers a step: what was summed up to it (`sums[name]` is the last row's), and its
    own reward.

    staleness   over trained tokens: weighted sum; p99 and max are the largest of the steps'
    groups      that were granted
    elapsed_s   from step to step of the same trainer; `wait_s`: the part of it spent in `take`
    foretold    what they counted of live traffic's labels
    """

    def __init__(self) -> None:
        self._rows = array("d")
        self._actions: dict[str, tuple[array[int], array[float]]] = {}  # rows and their values
        self.foretold = Foretold()

    def __len__(self) -> int:
        return len(self._rows) // len(_COLUMNS)

    def __getitem__(self, name: str) -> float:
        return self._at(len(self) - 1, name)

    def add(self, manifest: Manifest, last: Manifest | None) -> None:
        """`last`: the step before."""
        metrics, staleness = manifest.metrics, manifest.staleness
        weight = metrics.get("tokens/trained", 1.0) if staleness else 0.0
        values = {name: metrics.get(name, 0.0) for name in _METRICS}
        values |= {
            "groups": len(manifest.records) - metrics.get("traffic/groups", 0.0),
            "skipped": manifest.skipped is not None,
            "staleness_weight": weight,
            "staleness_sum": weight * staleness.get("mean", 0.0),
        }
        if last is not None and last.epoch == manifest.epoch:
            values["elapsed_s"] = manifest.finished_at - last.finished_at
            values["wait_s"] = metrics.get("seconds/wait", 0.0)
        row = [self[name] + values.get(name, 0.0) for name in _ADDED]
        row += [max(self[n], staleness.get(n.removeprefix("staleness_"), 0.0)) for n in _LARGEST]
        for name in (n for n, v in metrics.items() if v and n.startswith(_ACTIONS)):
            rows, values_of = self._actions.setdefault(name, (array("q"), array("d")))
            rows.append(len(self))
            values_of.append(metrics[name])
        self.foretold.add(len(self), metrics)
        self._rows.extend([*row, metrics.get("reward/mean", math.nan)])

    def add_nothing(self) -> None:
        """A step that is not to be summed."""
        self._rows.extend([*(self[name] for name in (*_ADDED, *_LARGEST)), math.nan])

    def cut(self, num_steps: int) -> dict[str, float]:
        """Takes the last steps off; what they had added."""
        before = {name: self[name] for name in _ADDED}
        del self._rows[len(self._rows) - num_steps * len(_COLUMNS) :]
        for rows, values_of in self._actions.values():
            kept = bisect_left(rows, len(self))
            del rows[kept:], values_of[kept:]
        self.foretold.cut(len(self))
        return {name: value - self[name] for name, value in before.items()}

    def actions(self) -> dict[str, float]:
        """Sums of what the steps' manifests say the staleness policy did, and of the waits."""
        return {name: sum(values) for name, (_, values) in self._actions.items() if values}

    def recent(self, name: str, num_steps: int) -> list[float]:
        """What each of the last steps added."""
        first = max(0, len(self) - num_steps)
        return [self._at(r, name) - self._at(r - 1, name) for r in range(first, len(self))]

    def rewards(self, last_step: int, num_steps: int | None = None) -> list[tuple[int, float]]:
        """(step, mean reward) of the last steps that have one; `last_step` is the number of the
        last."""
        count = len(self)
        first = 0 if num_steps is None else max(0, count - num_steps)
        found = [(last_step - count + 1 + r, self._at(r, "reward")) for r in range(first, count)]
        return [(step, reward) for step, reward in found if not math.isnan(reward)]

    def _at(self, row: int, name: str) -> float:
        return self._rows[row * len(_COLUMNS) + _COLUMNS[name]] if row >= 0 else 0.0
