"""Runs of both sides, as numbers and as a table.

A step's seconds are the mean over a run's steady state; shown are the median over the seeds and, in
brackets, the least and the most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Final

from benchmarks.trl_workload import Run, Workload

TRL: Final = "trl"
NUM_BLOCKS: Final = 6
"""That a curve of rewards is cut into."""


# ------------------------------------------------------------------------------------ one run
def step_s(run: Run, num_skipped: int) -> float:
    """Seconds from step to step."""
    window = run.ends_s[num_skipped - 1 :]
    return (window[-1] - window[0]) / (len(window) - 1)


def tokens_a_step(run: Run, num_skipped: int) -> float:
    """Generated and trained."""
    return fmean(run.num_tokens[num_skipped:])


def rollout_s(run: Run, num_skipped: int) -> float:
    """Mean seconds that TRL generates in a step."""
    return fmean(run.parts_s["rollout"][num_skipped:])


def curve(runs: Sequence[Run], num_blocks: int = NUM_BLOCKS) -> list[float]:
    """The mean reward over the seeds, of so many stretches of steps, about as long."""
    num_steps = min(len(run.rewards) for run in runs)
    bounds = [num_steps * block // num_blocks for block in range(num_blocks + 1)]
    return [
        fmean(fmean(run.rewards[first:last]) for run in runs)
        for first, last in pairwise(bounds)
        if last > first
    ]


# ------------------------------------------------------------------------------------ both sides
class Differ(ValueError):
    """The two sides were not given the same."""


def num_same_prompts(one: Run, other: Run) -> int:
    """Prompts that both trained. Differ when one of them has other token ids, or when they are
    fewer than half: those that differ are of groups still under way at the end. Also when the
    samples of the two end at other ids."""
    if one.settings["stop_ids"] != other.settings["stop_ids"]:
        raise Differ(f"{one.system} and {other.system} end a sample at other ids")
    both = one.prompt_ids.keys() & other.prompt_ids.keys()
    for name in sorted(both):
        if one.prompt_ids[name] != other.prompt_ids[name]:
            raise Differ(f"{one.system} and {other.system} read prompt {name} as other token ids")
    if 2 * len(both) < len(one.prompt_ids):
        raise Differ(f"{one.system} and {other.system} trained only {len(both)} prompts both")
    return len(both)


def summary(runs: Iterable[Run], workloads: Mapping[str, Workload]) -> list[dict[str, Any]]:
    """One entry a workload and system, TRL first; `of_trl` is of the medians."""
    sets: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        sets[run.workload, run.system].append(run)
    found = []
    for name, workload in workloads.items():
        systems = sorted((s for w, s in sets if w == name), key=lambda s: (s != TRL, s))
        for system in systems:
            of_both = sets.get((name, TRL), [])
            found.append(_entry(workload, sets[name, system], of_both))
    return found


def _entry(workload: Workload, runs: Sequence[Run], trl: Sequence[Run]) -> dict[str, Any]:
    def seconds(run: Run) -> float:
        return step_s(run, workload.num_skipped)

    def over(measure: Callable[[Run], float]) -> list[float]:
        values = [measure(run) for run in runs]
        return [median(values), min(values), max(values)]

    same = [num_same_prompts(a, b) for a in runs for b in trl if a.seed == b.seed]
    names = {name for run in runs for name in run.parts_s}
    processors = {name for run in runs for name in run.processor_s}
    return {
        "workload": workload.name,
        "system": runs[0].system,
        "seeds": sorted(run.seed for run in runs),
        "steps": len(runs[0].ends_s),
        "steps_skipped": workload.num_skipped,
        "step_s": over(seconds),
        "of_trl": median(map(seconds, runs)) / median(map(seconds, trl)) if trl else None,
        "target": workload.target,
        "trajectories_per_s": over(lambda run: workload.num_rows / seconds(run)),
        "tokens_a_step": over(lambda run: tokens_a_step(run, workload.num_skipped)),
        "first_step_after_s": over(lambda run: run.ends_s[0]),
        "staleness_mean": fmean(run.staleness_mean for run in runs),
        "rewards": curve(runs),
        "same_prompts": min(same, default=None),
        "sleep_s": runs[0].sleep_s,
        "load": [min(run.load for run in runs), max(run.load for run in runs)],
        "parts_s": {
            name: fmean(fmean(run.parts_s[name][workload.num_skipped :]) for run in runs)
            for name in sorted(names)
        },
        "processor_s": {
            name: fmean(run.processor_s.get(name, 0.0) for run in runs)
            for name in sorted(processors)
        },
        "settings": runs[0].settings,
        "versions": runs[0].versions,
    }


# ------------------------------------------------------------------------------------ text
HEAD: Final = (
    "workload", "system", "s a step", "of TRL's", "target", "trajectories/s", "tokens a step",
    "first step after, s", "staleness", "processor, s a step",
)  # fmt: skip


def table(entries: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown."""
    rows = [HEAD, tuple("---" for _ in HEAD), *map(_row, entries)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    is_trl, ratio = entry["system"] == TRL, entry["of_trl"]
    met = "met" if ratio is not None and ratio <= entry["target"] else "missed"
    return (
        entry["workload"],
        entry["system"],
        _band(entry["step_s"], 3),
        "" if is_trl or ratio is None else f"{ratio:.2f}",
        "" if is_trl or ratio is None else f"{entry['target']:g}, {met}",
        _band(entry["trajectories_per_s"], 0),
        f"{entry['tokens_a_step'][0]:.0f}",
        _band(entry["first_step_after_s"], 0),
        f"{entry['staleness_mean']:.2f}",
        f"{sum(entry['processor_s'].values()):.2f}",
    )


def _band(values: Sequence[float], digits: int) -> str:
    middle, least, most = (f"{value:.{digits}f}" for value in values)
    return f"{middle} ({least}-{most})"


def details(entries: Sequence[Mapping[str, Any]]) -> str:
    """Beside the table: rewards over the run, and where the time went."""
    lines = []
    for entry in entries:
        lines.append(f"{entry['workload']}, {entry['system']}:")
        rewards = "  ".join(f"{reward:.2f}" for reward in entry["rewards"])
        lines.append(f"  reward over the run    {rewards}")
        for shown, key in (("seconds of a step", "parts_s"), ("of processors", "processor_s")):
            said = "  ".join(f"{name} {value:.3f}" for name, value in entry[key].items())
            lines.append(f"  {shown:<22} {said}")
        said = ", ".join(f"{name} {value}" for name, value in entry["settings"].items())
        lines.append(f"  {'settings':<22} {said}")
        said = ", ".join(f"{name} {value}" for name, value in entry["versions"].items())
        lines.append(f"  {'versions':<22} {said}")
        if entry["same_prompts"] is not None:
            lines.append(
                f"  prompts trained by both sides, equal token by token: "
                f"{entry['same_prompts']} a seed at least"
            )
    return "\n".join(lines)
