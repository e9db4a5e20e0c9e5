"""The reward curve in the terminal, at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence

import plotext


def draw(
    rewards: Sequence[tuple[int, float]],
    evaluations: Sequence[tuple[int, float]],
    control: Sequence[tuple[int, float]] = (),
    *,
    title: str,
    width: int = 80,
    height: int = 18,
) -> str:
    """Text of a plot: training reward a step as a line, held-out reward as points, of `control` as
    crosses; points are (step, reward). Empty text when there is nothing to draw."""
    if not rewards and not evaluations:
        return ""
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, height)
    if rewards:
        plotext.plot(*zip(*rewards, strict=True), label="training, sampled", marker="braille")
    if evaluations:
        plotext.scatter(*zip(*evaluations, strict=True), label="held out", marker="●")
    if control:
        plotext.scatter(*zip(*control, strict=True), label="held out, control", marker="x")
    plotext.title(title)
    plotext.xlabel("step")
    plotext.ylabel("reward")
    return str(plotext.uncolorize(plotext.build()))
