"""The picture of simulated policies: well-formed, complete, and true to the numbers."""

from __future__ import annotations

import resource
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from connectors.config import ConfigError
from deploy.simulate import plot
from deploy.simulate.outcome import StepTimes, Timeline
from deploy.simulate.svg import ticks
from deploy.simulate.workload import WORKLOADS

SVG = "{http://www.w3.org/2000/svg}"


def policy(mean: float, rate: float, *, bound: int | None, stalled: str | None = None) -> Any:
    staleness = {"mean": mean, "p99": 3, "max": 3}
    return {"staleness": staleness, "steps_per_hour": rate, "bound": bound, "stalled": stalled}


def timeline(wait_s: float, num_steps: int = 10) -> Timeline:
    """Each step waits, trains for 10 s and is published for 2 s; half the slots are in use while
    the trainer waits, all of them while it trains."""
    steps, slot_use = [], []
    for step in range(num_steps):
        begun = step * (wait_s + 10)
        trains = begun + wait_s
        steps.append(StepTimes(step + 1, begun, trains, trains + 10, trains + 12))
        slot_use += [(begun, 0.5), (trains, 1.0)]
    return Timeline(steps=tuple(steps), slot_use=tuple(slot_use))


def drawn(file: Path, labels: list[str], found: list[Any], times: list[Timeline]) -> Any:
    plot.draw(file, WORKLOADS["standard"], labels, found, times)
    return ElementTree.parse(file).getroot()


def texts(root: Any) -> list[str]:
    return [element.text for element in root.iter(f"{SVG}text")]


def test_every_policy_is_named_at_its_point_and_at_its_strip(tmp_path: Path) -> None:
    labels = ["sync", "a<b>&c", "deadline(bound=4,lookahead=2)"]
    found = [policy(i, 10.0 * i, bound=4) for i in range(3)]
    root = drawn(tmp_path / "a.svg", labels, found, [timeline(5.0)] * 3)
    assert root.tag == f"{SVG}svg"
    for label in labels:
        assert f"{label} · max 3" in texts(root)
        assert label in texts(root)


def test_a_point_lies_where_its_staleness_and_its_throughput_say(tmp_path: Path) -> None:
    found = [policy(0.0, 20.0, bound=None), policy(2.0, 40.0, bound=2), policy(4.0, 0.0, bound=3)]
    root = drawn(tmp_path / "a.svg", ["a", "b", "c"], found, [timeline(5.0)] * 3)
    at = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter(f"{SVG}circle")]
    assert at[1][0] - at[0][0] == pytest.approx(at[2][0] - at[1][0], abs=0.02)
    assert at[2][1] - at[0][1] == pytest.approx(at[0][1] - at[1][1], abs=0.02)
    assert at[1][1] < at[0][1] < at[2][1]  # up is more


def test_only_a_bound_that_was_kept_is_filled(tmp_path: Path) -> None:
    found = [policy(1.0, 20.0, bound=b) for b in (None, 2, 3)]
    root = drawn(tmp_path / "a.svg", ["none", "exceeded", "kept"], found, [timeline(5.0)] * 3)
    fills = [circle.get("fill") == "#ffffff" for circle in root.iter(f"{SVG}circle")]
    assert fills == [True, True, False]


def test_the_strips_show_waiting_training_publishing_and_idle_slots(tmp_path: Path) -> None:
    """Waiting takes a third of the time, a quarter of the slots' time is idle."""
    root = drawn(tmp_path / "a.svg", ["a"], [policy(1.0, 20.0, bound=1)], [timeline(5.0)])
    widths: dict[str, float] = {}
    for rect in root.iter(f"{SVG}rect"):
        if rect.find(f"{SVG}title") is not None:
            colour = rect.get("fill")
            widths[colour] = widths.get(colour, 0.0) + float(rect.get("width"))
    assert widths[plot.WAITS] / widths[plot.TRAINS] == pytest.approx(0.5, rel=0.05)
    assert widths[plot.PUBLISHES] / widths[plot.TRAINS] == pytest.approx(0.2, rel=0.1)
    [area] = root.iter(f"{SVG}polygon")
    points = [tuple(map(float, pair.split(","))) for pair in area.get("points").split()]
    high = max(y for _, y in points) - min(y for _, y in points)
    used = sum((x2 - x1) * (points[0][1] - y1) for (x1, y1), (x2, _) in pairwise(points))
    width = points[-1][0] - points[0][0]
    assert used / (width * high) == pytest.approx((0.5 * 5 + 10) / 15, rel=0.02)


def test_a_policy_that_stalled_before_its_first_step_is_drawn_as_stalled(tmp_path: Path) -> None:
    never = Timeline(steps=(), slot_use=())
    found = [policy(0.0, 0.0, bound=0, stalled="why"), policy(1.0, 20.0, bound=1)]
    root = drawn(tmp_path / "a.svg", ["stuck", "runs"], found, [never, timeline(5.0)])
    assert "stuck · stalled" in texts(root)
    drawn(tmp_path / "b.svg", ["stuck"], found[:1], [never])


def test_a_stall_does_not_shorten_what_is_shown_of_the_others(tmp_path: Path) -> None:
    found = [policy(0.0, 0.0, bound=0, stalled="why"), policy(1.0, 20.0, bound=1)]
    times = [timeline(5.0, 2), timeline(5.0, 10)]
    root = drawn(tmp_path / "a.svg", ["stuck", "runs"], found, times)
    trained = [r for r in root.iter(f"{SVG}rect") if r.get("fill") == plot.TRAINS]
    assert len(trained) == 2 + 10 + 1  # and the legend's


def test_a_long_name_is_cut_at_its_point_and_whole_at_its_strip(tmp_path: Path) -> None:
    name = "policy(" + ",".join(f"parameter_{i}={i}" for i in range(6)) + ")"
    root = drawn(tmp_path / "a.svg", [name], [policy(1.0, 20.0, bound=3)], [timeline(5.0)])
    assert "policy(…) · max 3" in texts(root)
    assert name in texts(root)


@pytest.mark.parametrize("count", [1, 6, 21])
def test_labels_of_points_in_one_place_do_not_cover_each_other(count: int) -> None:
    names = [f"policy-{i} · max 4" for i in range(count)]
    places = plot._label_places([(500.0, 250.0)] * count, names)
    boxes = [plot._box(at, 100.0) for at in places]
    overlaps = [plot._overlap(a, b) for i, a in enumerate(boxes) for b in boxes[:i]]
    assert sum(overlaps) == 0


@pytest.mark.parametrize("name", ["a.png", "a", "a.svg.pdf", "none/a.svg"])
def test_what_cannot_be_drawn_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--plot: .*(only \.svg is drawn|there is no folder)"):
        plot.check(tmp_path / name)
    plot.check(tmp_path / "a.SVG")


def test_a_disk_that_is_full_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "a.svg"
    drawn(file, ["a"], [policy(1.0, 20.0, bound=1)], [timeline(5.0)])
    before = file.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            drawn(file, ["b"], [policy(1.0, 20.0, bound=1)], [timeline(5.0)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_ticks_are_round_and_within() -> None:
    assert ticks(0, 4.7) == [0, 1, 2, 3, 4]
    assert ticks(0, 66.0) == [0, 20, 40, 60]
    assert ticks(3, 3) == [3]
