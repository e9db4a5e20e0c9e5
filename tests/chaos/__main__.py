"""`make chaos`: chaos runs one after the other, each result a line of a file; called again, it goes
on where it stopped, and a seed that failed is run anew.

    python -P -m tests.chaos --seeds 0-49        every seed without a good result, then the table
    python -P -m tests.chaos --seed 7            that one, whatever its result was
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tests.chaos.run import Result, chaos_run
from tests.chaos.schedule import schedule
from tests.models import tiny_model

COLUMNS = (
    "seed", "steps", "kills", "stops", "drops", "disk_full", "corruptions", "restarts", "seconds",
    "granted", "trained", "closed", "open", "lost", "trained_twice", "bound_violations", "balance",
    "chain_ok", "replay_equal",
)  # fmt: skip
HEADS = {
    "disk_full": "full", "corruptions": "torn", "trained_twice": "twice",
    "bound_violations": "bound", "chain_ok": "chain", "replay_equal": "replay",
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -P -m tests.chaos", description=__doc__)
    parser.add_argument("--seeds", metavar="A-B", default="0-49", help="from A to B")
    parser.add_argument("--seed", type=int, metavar="K", help="only this one")
    parser.add_argument("--results", type=Path, default=Path("chaos-results.jsonl"))
    parser.add_argument("--folder", type=Path, default=Path("runs/chaos"), help="of the runs")
    arguments = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    first, _, last = arguments.seeds.partition("-")
    wanted = range(int(first), int(last or first) + 1)
    known = read(arguments.results)
    todo = [s for s in wanted if s not in known or known[s].failure]
    if arguments.seed is not None:
        wanted, todo = range(arguments.seed, arguments.seed + 1), [arguments.seed]
    for seed in todo:
        known[seed] = run(seed, arguments.folder.resolve())
        with arguments.results.open("ab") as file:
            file.write(msgspec.json.encode(known[seed]) + b"\n")
    shown = [known[seed] for seed in wanted]
    print("\n".join(table(shown)))
    return 1 if any(result.failure for result in shown) else 0


def read(file: Path) -> dict[int, Result]:
    """The last result of each seed."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    results = (msgspec.json.decode(line, type=Result) for line in lines)
    return {result.seed: result for result in results}


def run(seed: int, folder: Path) -> Result:
    """One chaos run; its folder is kept if it fails."""
    model = folder / "model"
    if not model.exists():
        tiny_model(model)
    place = folder / f"seed-{seed}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    result = chaos_run(schedule(seed), place, model)
    if result.failure:
        print(f"seed {seed} FAILED: {result.failure}; kept in {place}", flush=True)
    else:
        print(f"seed {seed} ok: {result.kills} kills, {result.seconds:.0f} s", flush=True)
        shutil.rmtree(place)
    return result


def table(results: Iterable[Result]) -> list[str]:
    """A line a run, and the totals."""
    results = list(results)
    rows = [[_text(getattr(r, c)) for c in COLUMNS] for r in results]
    sums = [[getattr(r, c) for r in results] for c in COLUMNS]
    total = ["all", *(_text(all(s) if isinstance(s[0], bool) else sum(s)) for s in sums[1:])]
    heads = [HEADS.get(c, c) for c in COLUMNS]
    widths = [max(map(len, column)) for column in zip(heads, *rows, total, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in (heads, *rows, total)
    ]
    failures = [f"seed {r.seed} failed: {r.failure}" for r in results if r.failure]
    return [*lines, *failures, f"{len(results) - len(failures)} of {len(results)} runs ok"]


def _text(value: float | bool) -> str:
    if isinstance(value, bool):
        return "ok" if value else "NO"
    return f"{value:g}" if value < 1e5 else f"{value:.0f}"


if __name__ == "__main__":
    sys.exit(main())
