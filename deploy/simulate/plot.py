"""A picture of simulated policies, as SVG: throughput against mean staleness, and below it what
engines, trainer and publishing did over time, one strip a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from connectors.config import ConfigError
from deploy.simulate.outcome import SHOWN_STEPS, Timeline
from deploy.simulate.svg import FAINT, INK, Drawing, Point, text_width, ticks
from deploy.simulate.table import bound_kept
from deploy.simulate.workload import Workload

Floats = NDArray[np.float64]
WIDTH: Final = 1000.0
LEFT, RIGHT = 70.0, 970.0
SCATTER_TOP, SCATTER_BOTTOM = 84.0, 440.0
STRIPS_TOP: Final = 560.0
STRIP: Final = 84.0
STRIP_LEFT: Final = 150.0
MOST_NAMED: Final = 44
"""Letters of a name at its point; its strip has room for all of it."""
MOST_POINTS: Final = 800
"""Of a strip's area: about what a screen tells apart."""
COLOURS: Final = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7b4173", "#637939",
    "#ad494a", "#393b79",
)  # fmt: skip
ENGINES, IDLE, TRAINS, WAITS, PUBLISHES = "#5b8db8", "#dfe7f0", "#2f855a", "#f3b8a0", "#9f7aea"


def check(file: Path) -> None:
    """ConfigError for what cannot be written."""
    if file.suffix.lower() != ".svg":
        raise ConfigError(f"--plot: {file}: only .svg is drawn, got {file.suffix or 'no ending'!r}")
    if not file.parent.is_dir():
        raise ConfigError(f"--plot: {file}: there is no folder {file.parent}")


def draw(
    file: Path,
    workload: Workload,
    labels: Sequence[str],
    found: Sequence[Mapping[str, Any]],
    timelines: Sequence[Timeline],
) -> None:
    """`found` is each policy's JSON, `timelines` of one seed."""
    height = STRIPS_TOP + STRIP * len(labels) + 50
    drawing = Drawing(WIDTH, height, f"Staleness policies on the workload {workload.name}")
    drawing.text((LEFT, 34), f"Throughput and staleness: {workload.name}", size=18, weight="bold")
    steps = f"{workload.batch_size} groups of {workload.group_size} a step"
    drawing.text((LEFT, 56), steps, fill=FAINT)
    scatter(drawing, labels, found)
    _strips(drawing, labels, timelines)
    drawing.write(file)


# --------------------------------------------------------------------------------------- scatter
def scatter(drawing: Drawing, labels: Sequence[str], found: Sequence[Mapping[str, Any]]) -> None:
    """Steps an hour against mean staleness, in the drawing's upper part."""
    values = [(one["staleness"]["mean"], one["steps_per_hour"]) for one in found]
    most_x = max(1.0, *(x for x, _ in values)) * 1.25
    most_y = max(1.0, *(y for _, y in values)) * 1.12

    def place(x: float, y: float) -> Point:
        return (
            LEFT + x / most_x * (RIGHT - LEFT),
            SCATTER_BOTTOM - y / most_y * (SCATTER_BOTTOM - SCATTER_TOP),
        )

    for y in ticks(0, most_y):
        drawing.line(place(0, y), place(most_x, y))
        drawing.text((LEFT - 8, place(0, y)[1] + 4), f"{y:g}", fill=FAINT, anchor="end")
    for x in ticks(0, most_x, 8):
        drawing.line(place(x, 0), place(x, most_y))
        drawing.text((place(x, 0)[0], SCATTER_BOTTOM + 18), f"{x:g}", fill=FAINT, anchor="middle")
    middle = (LEFT + RIGHT) / 2, (SCATTER_TOP + SCATTER_BOTTOM) / 2
    drawing.text((middle[0], SCATTER_BOTTOM + 38), "mean staleness of a trained token, in steps",
                 anchor="middle")  # fmt: skip
    drawing.text((22, middle[1]), "steps per hour", anchor="middle", turned=True)
    drawing.text((RIGHT, 56), "filled: bound kept · hollow: no bound, or exceeded", fill=FAINT,
                 anchor="end", size=11)  # fmt: skip
    points = [place(*value) for value in values]
    texts = [_caption(name, one) for name, one in zip(labels, found, strict=True)]
    for i, at in enumerate(_label_places(points, texts)):
        colour = COLOURS[i % len(COLOURS)]
        fill = colour if bound_kept(found[i]) else "#ffffff"
        drawing.circle(points[i], 6, fill=fill, stroke=colour, said=texts[i])
        drawing.text(at, texts[i], fill=colour, weight="bold")


def _caption(name: str, one: Mapping[str, Any]) -> str:
    if len(name) > MOST_NAMED:
        name = name.partition("(")[0] + "(…)"
    if one["stalled"] is not None:
        return f"{name} · stalled"
    return f"{name} · max {one['staleness']['max']:g}"


def _label_places(points: Sequence[Point], texts: Sequence[str]) -> list[Point]:
    """Where each text starts: near its point, clear of the others as far as there is room."""
    taken = [(x - 7, y - 7, x + 7, y + 7) for x, y in points]
    places = []
    for (x, y), text in zip(points, texts, strict=True):
        width = text_width(text, 12) + 6
        tried = [
            (x + dx if dx > 0 else x + dx - width, y + dy)
            for dy in (4, -10, 18, -24, 32, -38, 46, -52, 60, -66, 74)
            for dx in (12, -12)
        ]
        inside = [at for at in tried if at[0] >= LEFT and at[0] + width <= WIDTH] or tried
        chosen = min(inside, key=lambda at: sum(_overlap(_box(at, width), t) for t in taken))
        taken.append(_box(chosen, width))
        places.append(chosen)
    return places


Box = tuple[float, float, float, float]


def _box(at: Point, width: float) -> Box:
    return at[0], at[1] - 11, at[0] + width, at[1] + 3


def _overlap(a: Box, b: Box) -> float:
    wide = min(a[2], b[2]) - max(a[0], b[0])
    high = min(a[3], b[3]) - max(a[1], b[1])
    return max(0.0, wide) * max(0.0, high)


# ---------------------------------------------------------------------------------------- strips
def _strips(drawing: Drawing, labels: Sequence[str], timelines: Sequence[Timeline]) -> None:
    end_s = _shown_s(timelines)
    bottom = STRIPS_TOP + STRIP * len(labels)

    def at(second: float) -> float:
        return STRIP_LEFT + min(second, end_s) / end_s * (RIGHT - STRIP_LEFT)

    drawing.text((LEFT, STRIPS_TOP - 34), "What each did over time", size=15, weight="bold")
    _legend(drawing)
    for second in ticks(0, end_s, 8):
        drawing.line((at(second), STRIPS_TOP), (at(second), bottom))
        drawing.text((at(second), bottom + 18), f"{second:g}", fill=FAINT, anchor="middle")
    drawing.text(((STRIP_LEFT + RIGHT) / 2, bottom + 38), "seconds", anchor="middle")
    for i, (name, timeline) in enumerate(zip(labels, timelines, strict=True)):
        top = STRIPS_TOP + STRIP * i
        drawing.text((LEFT - 48, top + 14), name, weight="bold", fill=COLOURS[i % len(COLOURS)])
        for height, what in ((36, "engines"), (57, "trainer"), (70, "publish")):
            drawing.text((STRIP_LEFT - 8, top + height), what, size=10, fill=FAINT, anchor="end")
        _engines(drawing, timeline, at, end_s, top + 20)
        _trainer(drawing, timeline, at, end_s, top + 48)


def _shown_s(timelines: Sequence[Timeline]) -> float:
    """Until the fastest has made SHOWN_STEPS, or all of it: of the others no more is known."""
    num = min(SHOWN_STEPS, max(len(timeline.steps) for timeline in timelines))
    if num == 0:
        return 1.0
    return max(1e-9, min(t.steps[num - 1].train_to for t in timelines if len(t.steps) >= num))


def _legend(drawing: Drawing) -> None:
    x = RIGHT
    for colour, said in (
        (PUBLISHES, "weights being published"), (WAITS, "trainer waits"), (TRAINS, "trains"),
        (IDLE, "idle"), (ENGINES, "slots in use"),
    ):  # fmt: skip
        x -= text_width(said, 11)
        drawing.text((x, STRIPS_TOP - 34), said, size=11, fill=INK)
        x -= 16
        drawing.rect(x, STRIPS_TOP - 44, 11, 11, fill=colour)
        x -= 14


def _engines(
    drawing: Drawing, timeline: Timeline, at: Callable[[float], float], end_s: float, top: float
) -> None:
    """The share of slots in use, over the share that is not."""
    high = 24.0
    drawing.rect(at(0), top, at(end_s) - at(0), high, fill=IDLE)
    if not timeline.slot_use:
        return
    edges = np.linspace(0.0, end_s, MOST_POINTS + 1)
    used = _averages(timeline.slot_use, edges)
    points = [(at(0), top + high)]
    for first, last, share in zip(edges, edges[1:], used, strict=False):
        y = top + high * (1 - share)
        points += [(at(first), y), (at(last), y)]
    drawing.area([*points, (at(end_s), top + high)], fill=ENGINES)


def _averages(steps: Sequence[tuple[float, float]], edges: Floats) -> Floats:
    """Of a step function (second, value from then on), between each edge and the next."""
    times, values = np.array(steps, dtype=np.float64).T
    times = np.append(times, max(float(edges[-1]), float(times[-1])))
    area = np.concatenate([[0.0], np.cumsum(values * np.diff(times))])
    means: Floats = np.diff(np.interp(edges, times, area)) / np.diff(edges)
    return means


def _trainer(
    drawing: Drawing, timeline: Timeline, at: Callable[[float], float], end_s: float, top: float
) -> None:
    """Training and waiting, and below it the weights on their way to the engines."""
    for one in timeline.steps:
        spans = [
            (one.wait_from, one.train_from, top, 12, WAITS, "waits"),
            (one.train_from, one.train_to, top, 12, TRAINS, "trains"),
        ]
        if one.publish_to is not None:
            spans.append((one.train_to, one.publish_to, top + 15, 7, PUBLISHES, "is published"))
        for first, last, y, high, colour, what in spans:
            if first < end_s and (last > first or what == "is published"):
                said = f"step {one.step} {what}: {first:.1f} to {last:.1f} s"
                gap = 0.6 if what == "trains" and at(last) - at(first) > 3 else 0.0
                width = max(1.0, at(last) - at(first) - gap)
                drawing.rect(at(first), y, width, high, fill=colour, said=said)
