"""Records of several seeds, as numbers and as tables in Markdown.

A reward is the mean over a step's samples; what is compared is its mean over the last WINDOW steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.staleness_records import Record, Setting, steps_per_hour

WINDOW: Final = 10
WIDTH: Final = 240
Floats = NDArray[np.float64]
K = TypeVar("K", bound=Hashable)


class Band(NamedTuple):
    """Over the seeds."""

    mean: float
    least: float
    most: float


def band(values: Iterable[float | None]) -> Band | None:
    """None unless every seed has a value."""
    found = list(values)
    known = [value for value in found if value is not None]
    if not known or len(known) < len(found):
        return None
    return Band(float(np.mean(known)), min(known), max(known))


# ------------------------------------------------------------------------------------ one record
def smoothed(record: Record) -> Floats:
    """The reward of each step and the steps before it, WINDOW in all where there are as many."""
    sums = np.cumsum([0.0, *(step.reward for step in record.steps)])
    last = np.arange(1, len(sums))
    first = np.maximum(0, last - WINDOW)
    return np.asarray((sums[last] - sums[first]) / (last - first))


def final_reward(record: Record) -> float | None:
    return float(smoothed(record)[-1]) if record.steps else None


def seconds_to(record: Record, target: float) -> float | None:
    """Until the smoothed reward, of a whole window, is as high."""
    reached = np.flatnonzero(smoothed(record)[WINDOW - 1 :] >= target)
    return record.steps[int(reached[0]) + WINDOW - 1].at_s if len(reached) else None


def rate(record: Record) -> float:
    return steps_per_hour([step.at_s for step in record.steps])


def oldest(record: Record) -> int:
    return max((step.oldest for step in record.steps), default=0)


def wait_share(record: Record) -> float | None:
    """From the first step's end on."""
    if len(record.steps) < 2:
        return None
    elapsed_s = record.steps[-1].at_s - record.steps[0].at_s
    return sum(step.wait_s for step in record.steps[1:]) / elapsed_s


def agreement(record: Record) -> float | None:
    """Live steps an hour over predicted ones."""
    predicted = record.predicted
    if predicted is None or predicted.stalled is not None or not predicted.steps_per_hour:
        return None
    return rate(record) / predicted.steps_per_hour


# ------------------------------------------------------------------------------------ groups
def grouped(records: Iterable[Record], key: Callable[[Setting], K]) -> dict[K, list[Record]]:
    """In the order of their first ones."""
    found: dict[K, list[Record]] = {}
    for record in records:
        found.setdefault(key(record.setting), []).append(record)
    return found


def by_shared(records: Iterable[Record]) -> Mapping[tuple[tuple[str, ...], str], list[Record]]:
    """Only what was run alike is compared."""
    return grouped(records, lambda setting: (setting.shared, setting.waits))


def seeds_apart(setting: Setting) -> bytes:
    """What all seeds of a setting have in common."""
    return msgspec.json.encode(msgspec.structs.replace(setting, seed=0))


# ------------------------------------------------------------------------------------ tables
def show(cost: Sequence[Record], presets: Sequence[Record], *, target: float) -> None:
    console = Console(width=WIDTH, highlight=False, markup=False)
    for records, tabulate in ((cost, cost_table), (presets, presets_table)):
        for (shared, waits), alike in by_shared(records).items():
            console.print(f"\n{', '.join(shared)}" + (f"; waits {waits}" if waits else ""))
            console.print(tabulate(alike, target))
            for record in alike:
                if record.stalled is not None:
                    console.print(f"{record.setting.name} {record.stalled}")


def cost_table(records: Sequence[Record], target: float) -> Table:
    table = _table(
        "bound", "correction", "seeds", "staleness mean", "max", "steps/h",
        f"reward, last {WINDOW} steps", "held out, first", "last", f"s to reward {target:g}",
    )  # fmt: skip
    by_setting = grouped(records, lambda s: (s.parameters["bound"], s.correction))
    for (bound, correction), alike in sorted(by_setting.items(), key=lambda item: item[0]):
        table.add_row(
            str(bound),
            correction,
            str(len(alike)),
            said(band(one.staleness_mean for one in alike), 2),
            str(max(map(oldest, alike))),
            said(band(map(rate, alike)), 0),
            said(band(map(final_reward, alike)), 3),
            said(band(one.held_out[0] for one in alike), 3),
            said(band(one.held_out[1] for one in alike), 3),
            reached(alike, target),
        )
    return table


def presets_table(records: Sequence[Record], target: float) -> Table:
    table = _table(
        "policy", "seeds", "bound", "max", "kept", "staleness mean", "simulated", "steps/h",
        "simulated", "live/simulated", "trainer waits", "not trained", f"s to reward {target:g}",
    )  # fmt: skip
    for alike in grouped(records, seeds_apart).values():
        first, most = alike[0], max(map(oldest, alike))
        predicted = [one.predicted for one in alike]
        share = band(map(wait_share, alike))
        stalled = any(one.stalled is not None for one in alike)
        table.add_row(
            first.setting.label + (" STALLED" if stalled else ""),
            str(len(alike)),
            str(first.bound),
            str(most),
            "yes" if first.bound is not None and most <= first.bound else "NO",
            said(band(one.staleness_mean for one in alike), 2),
            said(band(p and p.staleness_mean for p in predicted), 2),
            said(band(map(rate, alike)), 0),
            said(band(p and p.steps_per_hour for p in predicted), 0),
            said(band(map(agreement, alike)), 2),
            "-" if share is None else f"{share.mean:.0%}",
            f"{sum(one.num_dropped for one in alike) / len(alike):.3g}",
            reached(alike, target),
        )
    return table


def reached(records: Sequence[Record], target: float) -> str:
    """Over the seeds that came there, and how many these are if it is not all."""
    found = [s for s in (seconds_to(one, target) for one in records) if s is not None]
    if not found:
        return "-"
    some = "" if len(found) == len(records) else f" ({len(found)} of {len(records)})"
    return said(band(found), 0) + some


def said(values: Band | None, digits: int) -> str:
    """The mean and what the seeds span."""
    if values is None:
        return "-"
    mean, least, most = (f"{value:.{digits}f}" for value in values)
    return mean if least == most else f"{mean} ({least}..{most})"


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.MARKDOWN)
    table.add_column(first, no_wrap=True)
    for title in others:
        table.add_column(title, justify="right", no_wrap=True)
    return table
