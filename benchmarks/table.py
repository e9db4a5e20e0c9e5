"""What the benchmarks of one process share: a table for people, one JSON object for programs."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


def machine() -> str:
    return (
        f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, one thread, "
        f"load {os.getloadavg()[0]:.1f}"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, figures to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    )


def ratio(these: Sequence[float], those: Sequence[float]) -> float:
    """The median of the ratios of each round: rounds differ with what else the machine does."""
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def write(found: dict[str, Any], to: str) -> None:
    """One JSON object, to the file `to`, or printed where that is "-"."""
    text = json.dumps(found, indent=2)
    if to == "-":
        print(text)
    else:
        Path(to).write_text(text + "\n")


def main(doc: str, parts: Sequence[Callable[[int], tuple[dict[str, Any], str]]]) -> None:
    """Runs the parts, each of which is told the number of rounds and gives its name, figures and
    table."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured")
    parser.add_argument("--json", metavar="FILE", help="one JSON object, '-' prints it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"machine": machine()}
    print(found["machine"])
    for part in parts:
        figures, shown = part(arguments.rounds)
        found |= figures
        print(f"\n{shown}", flush=True)
    if arguments.json:
        write(found, arguments.json)
