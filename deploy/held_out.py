"""What `status.eval` says: the evaluations of the first and the last version, as numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from connectors.records import Estimate, Evaluation
from operators.estimates import average


def held_out(evaluations: Sequence[tuple[int, Mapping[str, Evaluation]]]) -> dict[str, Any]:
    """Of `Fold.held_out()`. Everything but `first` is of the version that was evaluated last:

    first, last  mean reward, every task weighing the same
    low, high    95% interval of `last`; null where it has none
    pass_at      by k: mean, low, high
    num_prompts, num_samples
                 prompts of all tasks, samples of each
    versions     that wrote its tokens: more than one when weights changed meanwhile
    tasks        reward, low, high, pass_at, num_prompts of each
    """
    last = evaluations[-1][1] if evaluations else {}
    rewards = curve(evaluations)
    newest = list(last.values())
    reward = average([_reward(e) for e in newest]) if newest else None
    ks = set.intersection(*(set(e.pass_at) for e in newest)) if newest else set()
    passes = {k: average([e.pass_at[k] for e in newest]) for k in sorted(ks)}
    return {
        "first": rewards[0][1] if rewards else None,
        "last": reward and reward.mean,
        "low": reward and reward.low,
        "high": reward and reward.high,
        "pass_at": _plain(passes),
        "num_prompts": sum(e.num_prompts for e in newest),
        "num_samples": max((e.num_samples for e in newest), default=1),
        "versions": [str(v) for v in sorted({v for e in newest for v in e.versions})],
        "tasks": {
            task: {
                "reward": e.reward, "low": e.low, "high": e.high, "pass_at": _plain(e.pass_at),
                "num_prompts": e.num_prompts,
            }
            for task, e in last.items()
        },
    }  # fmt: skip


def curve(
    evaluations: Sequence[tuple[int, Mapping[str, Evaluation]]],
) -> list[tuple[int, float]]:
    """(version's number, mean reward over the tasks)."""
    return [
        (number, average([_reward(e) for e in tasks.values()]).mean)
        for number, tasks in evaluations
    ]


def _reward(evaluation: Evaluation) -> Estimate:
    return Estimate(evaluation.reward, evaluation.low, evaluation.high)


def _plain(passes: Mapping[int, Estimate]) -> dict[str, dict[str, float | None]]:
    return {str(k): msgspec.structs.asdict(found) for k, found in passes.items()}
