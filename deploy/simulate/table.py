"""Simulated policies as a table for a terminal."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH: Final = 132
"""What the table needs beside long names."""
_COLUMNS: Final = (
    "steps/h", "trained\ntok/s", "trainer\nwaits", "slots\nused", "staleness\nmean", "\np99",
    "\nmax", "bound\nkept", "dropped\ntok", "masked\ntok", "cancelled\ntok", "length\nratio",
)  # fmt: skip
LEGEND: Final = (
    "length ratio: mean trained length over that of all lengths; below 1, long trajectories are "
    "trained less often than they are sampled"
)


def table_lines(
    labels: Sequence[str],
    found: Sequence[Mapping[str, Any]],
    measured: Mapping[str, Any] | None = None,
    *,
    colour: bool = False,
) -> list[str]:
    """One row a policy (its JSON), one of what the run itself came to; then each stall's
    report."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column("policy", no_wrap=True, vertical="bottom")
    for title in _COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    if measured is not None:
        table.add_row(Text("the run itself, measured", style="italic"), *_measured(measured))
    for name, one in zip(labels, found, strict=True):
        table.add_row(name, *_row(one))
    out = io.StringIO()
    width = WIDTH + max(map(len, labels))
    console = Console(file=out, width=width, force_terminal=colour, highlight=False)
    console.print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
    lines.append(LEGEND)
    for name, one in zip(labels, found, strict=True):
        if one["stalled"] is not None:
            lines += ["", f"{name} {one['stalled'].removeprefix(one['name'] + ' ')}"]
    return lines


def bound_kept(one: Mapping[str, Any]) -> bool | None:
    """None: the policy promises none."""
    if one["bound"] is None:
        return None
    return bool(one["staleness"]["max"] <= one["bound"])


def _row(one: Mapping[str, Any]) -> list[str | Text]:
    staleness, kept = one["staleness"], bound_kept(one)
    rate = _rate(one["steps_per_hour"]) + _spread(one)
    promise = "-" if kept is None else f"<= {one['bound']:g} {'yes' if kept else 'NO'}"
    return [
        Text("stalled", style="bold red") if one["stalled"] is not None else rate,
        _count(one["trained_tokens_per_s"]),
        f"{one['trainer_wait_share']:.0%}",
        f"{one['slot_use']:.0%}",
        f"{staleness['mean']:.2f}",
        f"{staleness['p99']:.3g}",
        f"{staleness['max']:g}",
        Text(promise, style="bold red" if kept is False else ""),
        *(_count(one[f"{what}_tokens"]) for what in ("dropped", "masked", "cancelled")),
        f"{one['trained_length_ratio']:.2f}",
    ]


def _measured(measured: Mapping[str, Any]) -> list[str]:
    staleness = measured["staleness"]
    return [
        _rate(measured["steps_per_hour"]),
        _count(measured["trained_tokens_per_s"]),
        f"{measured['trainer_wait_share']:.0%}",
        "",
        "-" if staleness["mean"] is None else f"{staleness['mean']:.2f}",
        f"{staleness['p99']:.3g}",
        f"{staleness['max']:g}",
    ]


def _spread(one: Mapping[str, Any]) -> str:
    """Half of what the seeds differ by."""
    if "spread" not in one:
        return ""
    ends = one["spread"]["steps_per_hour"]
    return f" ±{_rate((ends['most'] - ends['least']) / 2)}"


def _rate(number: float) -> str:
    return f"{number:.1f}" if number < 1000 else f"{number:.0f}"


def _count(number: float) -> str:
    if number == 0:
        return "-"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / (1e3 if unit == 'k' else limit):.1f}{unit}"
    return f"{number:.0f}"
