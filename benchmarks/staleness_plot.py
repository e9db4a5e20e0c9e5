"""The curves and points of the records, as SVG: what enters are records, what leaves are
OUT/cost.svg and OUT/presets.svg."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.staleness_records import Record
from benchmarks.staleness_tables import (
    WINDOW,
    Floats,
    agreement,
    by_shared,
    grouped,
    oldest,
    rate,
    seeds_apart,
    smoothed,
)
from deploy.simulate.plot import COLOURS, LEFT, RIGHT, SCATTER_BOTTOM, WIDTH, scatter
from deploy.simulate.svg import FAINT, INK, Drawing, Point, ticks

NUM_TIMES: Final = 200
PANEL: Final = (410.0, 270.0)
COLUMNS: Final = (70.0, 560.0)
TOP: Final = 120.0
ROW: Final = 350.0
AGREED: Final = 0.2
BARS_TOP: Final = 560.0
BAR: Final = 26.0


class Curve(NamedTuple):
    """Over the seeds, at each of `x`."""

    x: Floats
    mean: Floats
    least: Floats
    most: Floats


def draw(out: Path, cost: Sequence[Record], presets: Sequence[Record]) -> None:
    """Of each experiment the settings that were recorded last, where there are several."""
    for name, records, picture in (("cost", cost, draw_cost), ("presets", presets, draw_presets)):
        if records:
            *_, alike = by_shared(records).values()
            file = out / f"{name}.svg"
            picture(file, alike)
            print(file)


# ------------------------------------------------------------------------------------ curves
def by_step(records: Sequence[Record]) -> Curve:
    """Up to the last step that all of them have."""
    rewards = [smoothed(record) for record in records]
    num = min(map(len, rewards))
    return _curve(np.arange(1, num + 1, dtype=float), [reward[:num] for reward in rewards])


def by_second(records: Sequence[Record]) -> Curve:
    """From when all have a first step until the first of them is through."""
    times = [np.array([step.at_s for step in record.steps]) for record in records]
    x = np.linspace(max(at[0] for at in times), min(at[-1] for at in times), NUM_TIMES)
    rewards = map(smoothed, records)
    return _curve(x, [np.interp(x, at, reward) for at, reward in zip(times, rewards, strict=True)])


def _curve(x: Floats, rewards: Sequence[Floats]) -> Curve:
    rewards_RX = np.stack(rewards)
    return Curve(x, rewards_RX.mean(axis=0), rewards_RX.min(axis=0), rewards_RX.max(axis=0))


# ------------------------------------------------------------------------------------ cost
def draw_cost(file: Path, records: Sequence[Record]) -> None:
    """A row a correction: reward against steps, and against seconds; a colour a bound."""
    trained = [record for record in records if record.steps]
    by_correction = grouped(trained, lambda setting: setting.correction)
    bounds = sorted({record.setting.parameters["bound"] for record in trained})
    height = TOP + ROW * len(by_correction)
    drawing = Drawing(WIDTH, height, "Reward under several staleness bounds")
    drawing.text((LEFT, 34), "What staleness costs", size=18, weight="bold")
    drawing.text(
        (LEFT, 56),
        f"training reward, mean of the last {WINDOW} steps; lines: means over the seeds, "
        "bands: their range",
        fill=FAINT,
    )
    _legend(drawing, bounds)
    for row, (correction, alike) in enumerate(by_correction.items()):
        top = TOP + ROW * row
        drawing.text((LEFT, top - 12), f"correction = {correction}", weight="bold")
        for left, title, curve in (
            (COLUMNS[0], "steps", by_step), (COLUMNS[1], "seconds", by_second),
        ):  # fmt: skip
            seeds = grouped(alike, lambda setting: int(setting.parameters["bound"]))
            curves = {bound: curve(seeds[bound]) for bound in bounds if bound in seeds}
            colours = {bound: COLOURS[bounds.index(bound)] for bound in curves}
            _panel(drawing, (left, top), title, [(colours[b], curves[b]) for b in curves])
    drawing.write(file)


def _legend(drawing: Drawing, bounds: Sequence[int]) -> None:
    x = LEFT
    for i, bound in enumerate(bounds):
        drawing.rect(x, 68, 11, 11, fill=COLOURS[i])
        drawing.text((x + 16, 78), f"bound {bound}")
        x += 90


def _panel(
    drawing: Drawing, corner: Point, title: str, curves: Sequence[tuple[str, Curve]]
) -> None:
    width, height = PANEL
    left, top = corner
    bottom = top + height
    most_x = max(float(curve.x[-1]) for _, curve in curves)
    most_y = max(float(curve.most.max()) for _, curve in curves)

    def place(x: float, y: float) -> Point:
        return left + x / most_x * width, bottom - y / most_y * height

    for y in ticks(0, most_y):
        drawing.line(place(0, y), place(most_x, y))
        drawing.text((left - 8, place(0, y)[1] + 4), f"{y:g}", fill=FAINT, anchor="end")
    for x in ticks(0, most_x):
        drawing.line(place(x, 0), place(x, most_y))
        drawing.text((place(x, 0)[0], bottom + 18), f"{x:g}", fill=FAINT, anchor="middle")
    drawing.text((left + width / 2, bottom + 36), title, anchor="middle")
    for colour, curve in curves:
        upper = [place(x, y) for x, y in zip(curve.x, curve.most, strict=True)]
        lower = [place(x, y) for x, y in zip(curve.x, curve.least, strict=True)]
        drawing.area([*upper, *reversed(lower)], fill=colour, opacity=0.15)
    for colour, curve in curves:
        points = [place(x, y) for x, y in zip(curve.x, curve.mean, strict=True)]
        drawing.curve(points, stroke=colour, width=2)


# ------------------------------------------------------------------------------------ presets
def draw_presets(file: Path, records: Sequence[Record]) -> None:
    """Throughput against mean staleness, and below it how far the simulator is off."""
    by_setting = [
        alike
        for alike in grouped(records, seeds_apart).values()
        if all(record.steps for record in alike)
    ]
    labels = [alike[0].setting.label for alike in by_setting]
    height = BARS_TOP + BAR * len(labels) + 60
    drawing = Drawing(WIDTH, height, "Strict policies, live")
    drawing.text((LEFT, 34), "Strict policies, live", size=18, weight="bold")
    drawing.text((LEFT, 56), f"long-tailed rollouts: {records[0].setting.waits}", fill=FAINT)
    scatter(drawing, labels, [_outcome(alike) for alike in by_setting])
    _agreements(drawing, labels, [_mean(agreement, alike) for alike in by_setting])
    drawing.write(file)


def _outcome(records: Sequence[Record]) -> dict[str, Any]:
    """As the simulator's JSON has it."""
    return {
        "bound": records[0].bound,
        "steps_per_hour": _mean(rate, records),
        "staleness": {
            "mean": _mean(lambda record: record.staleness_mean, records),
            "max": max(map(oldest, records)),
        },
        "stalled": next((one.stalled for one in records if one.stalled is not None), None),
    }


def _mean(number: Callable[[Record], float | None], records: Sequence[Record]) -> float | None:
    found = [value for value in map(number, records) if value is not None]
    return float(np.mean(found)) if found else None


def _agreements(drawing: Drawing, labels: Sequence[str], ratios: Sequence[float | None]) -> None:
    left, most = 330.0, max(1.5, *(ratio or 0.0 for ratio in ratios))
    bottom = BARS_TOP + BAR * len(labels)

    def at(ratio: float) -> float:
        return left + ratio / most * (RIGHT - left)

    title = f"Live steps an hour, over what is simulated; shaded: within {AGREED:.0%}"
    drawing.text((LEFT, SCATTER_BOTTOM + 80), title, size=15, weight="bold")
    drawing.rect(at(1 - AGREED), BARS_TOP, at(2 * AGREED) - left, bottom - BARS_TOP, fill="#dfe7f0")
    for x in ticks(0, most):
        drawing.line((at(x), BARS_TOP), (at(x), bottom))
        drawing.text((at(x), bottom + 18), f"{x:g}", fill=FAINT, anchor="middle")
    drawing.line((at(1), BARS_TOP), (at(1), bottom), stroke=INK)
    for i, (name, ratio) in enumerate(zip(labels, ratios, strict=True)):
        y, colour = BARS_TOP + BAR * (i + 0.5), COLOURS[i % len(COLOURS)]
        drawing.text((left - 12, y + 4), name, anchor="end", fill=colour, size=11)
        if ratio is not None:
            drawing.circle(
                (at(ratio), y), 5, fill=colour, stroke=colour, said=f"{name}: {ratio:.2f}"
            )
