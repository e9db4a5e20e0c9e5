"""Live traffic in `status`: how it ended, and how well its labels were foretold, by task and by the
version that served it (trainer/prequential.py says what the steps count)."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from trainer.actions import PREFIX, TRAFFIC
from trainer.feed_state import TrafficState
from trainer.remembered import Remembered
from trainer.traffic import is_traffic

_PREFIX: Final = "prequential/"
_SUMS: Final = ("n", "reward", "squared", "absolute")
_SHOWN: Final = 5
"""Versions of a task for people; --json lists all."""


class Foretold:
    """What the steps of a chain counted, kept so that its last steps can be taken off again: 48
    bytes for each task and version of a step."""

    def __init__(self) -> None:
        self._keys: dict[tuple[str, str], int] = {}
        self._rows, self._places = array("q"), array("q")
        self._values = array("d")  # len(_SUMS) for each of the rows

    def add(self, row: int, metrics: Mapping[str, float]) -> None:
        """Of step number `row`."""
        found: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * len(_SUMS))
        for name, value in metrics.items():
            if name.startswith(_PREFIX):
                task, version, what = name.removeprefix(_PREFIX).rsplit("/", 2)
                if what in _SUMS:
                    found[task, version][_SUMS.index(what)] += value
        for key, values in found.items():
            self._rows.append(row)
            self._places.append(self._keys.setdefault(key, len(self._keys)))
            self._values.extend(values)

    def cut(self, num_rows: int) -> None:
        """Keeps the first so many steps."""
        kept = bisect_left(self._rows, num_rows)
        del self._rows[kept:], self._places[kept:], self._values[kept * len(_SUMS) :]

    def table(self) -> list[dict[str, Any]]:
        """`prequential` of the status object, by task and version: the mean label, the Brier score
        and the mean absolute error of the values."""
        if not self._keys:
            return []
        values = np.array(self._values).reshape(-1, len(_SUMS))
        sums = np.zeros((len(self._keys), len(_SUMS)))
        np.add.at(sums, np.array(self._places), values)
        found = []
        for (task, version), at in sorted(self._keys.items(), key=_by_number):
            num, reward, squared, absolute = sums[at].tolist()
            if num:
                found.append(
                    {
                        "task": task,
                        "version": version,
                        "sessions": int(num),
                        "reward": reward / num,
                        "brier": squared / num,
                        "absolute_error": absolute / num,
                    }
                )
        return found


def _by_number(item: tuple[tuple[str, str], int]) -> tuple[str, bool, list[int]]:
    (task, version), _ = item
    numbers = [int(part) for part in version.split(".") if part.isdigit()]
    return task, len(numbers) < 2, numbers


class Ends:
    """Terminals of live traffic: how many there are, and why those groups closed that did, by the
    first of each. `topics`: those that name its groups; `state`: where the kept log begins."""

    def __init__(self, topics: tuple[str, ...] = (), state: TrafficState | None = None) -> None:
        self._topics, state = topics, state or TrafficState()
        self.base = state.counts
        self.closed_by_reason = Counter(self.base.closed_by_reason)
        self.num_terminals = 0
        self._ended = {lane: Remembered(bits) for lane, bits in state.ended.items()}

    def owns(self, group_id: str) -> bool:
        return is_traffic(group_id, self._topics)

    def add(self, group_id: str, closed: Callable[[], str | None]) -> None:
        """A terminal was read. `closed`: why its group closed, None if it did not."""
        self.num_terminals += 1
        lane, _, offset = group_id.rpartition("/")
        ended = self._ended.setdefault(lane, Remembered())
        if ended.has(int(offset)) is False:
            ended.add(int(offset))
            if (reason := closed()) is not None:
                self.closed_by_reason[reason] += 1


def nearline_of(ends: Ends, actions: Mapping[str, float], foretold: Foretold) -> dict[str, Any]:
    """`nearline` of the status object. `actions`: sums of the steps'. Of a trimmed log,
    `corrections` and `prequential` are of the steps that are kept."""
    dropped = Counter(ends.base.dropped_by_reason)
    prefix = PREFIX + TRAFFIC
    for name, count in actions.items():
        if name.startswith(prefix):
            dropped[name.removeprefix(prefix)] += int(count)
    return {
        "groups": ends.base.trained + int(actions.get("traffic/groups", 0)),
        "corrections": int(actions.get("traffic/corrections", 0)),
        "dropped_by_reason": dict(dropped),
        "closed_by_reason": dict(ends.closed_by_reason),
        "prequential": foretold.table(),
    }


def nearline_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The same for reading."""
    ended = [f"{found['groups']} groups trained ({found['corrections']} corrections)"]
    for how in ("dropped", "closed"):
        ended += [f"{how} ({r}) {n}" for r, n in sorted(found[f"{how}_by_reason"].items())]
    yield f"traffic    {', '.join(ended)}"
    for task in sorted({row["task"] for row in found["prequential"]}):
        rows = [row for row in found["prequential"] if row["task"] == task]
        if len(rows) > _SHOWN:
            yield f"foretold   {task}: {len(rows)} versions, the last {_SHOWN}:"
        for row in rows[-_SHOWN:]:
            yield (
                f"foretold   {task} {row['version']}: {row['sessions']} sessions, reward "
                f"{row['reward']:.4g}, off by {row['absolute_error']:.4g} (Brier "
                f"{row['brier']:.4g})"
            )
