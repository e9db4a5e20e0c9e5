"""What a step trains, told apart: reward by task and by age, tokens by age, lengths.

Groups, the ages of their versions and the weights of tokens over age enter; metrics leave, and the
histogram of ages. A sample counts once, however many branches it has.

    reward/task/NAME         mean over the samples of the task
    reward/staleness/BUCKET  mean over the samples whose oldest trained token is of that age
    tokens/age/BUCKET        trained tokens of that age
    tokens/generated         tokens sampled
    length/generated         their mean, a sample that a version sampled
    length/trained           mean trained tokens, a sample
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from connectors.records import Group, Trajectory, Version
from trainer.ages import Ages, histogram
from trainer.credit import samples
from trainer.overdue import row_weights


def step_metrics(
    groups: Sequence[Group], ages: Ages, weights: Mapping[Version, float]
) -> tuple[dict[str, float], Counter[int]]:
    """Of one step, and its trained tokens by age (`ages.histogram`); what nothing falls under is
    left out. Rewards are those of the records, before any shaping. A token that no version wrote
    has no age."""
    by_task: defaultdict[str, list[float]] = defaultdict(list)
    by_age: defaultdict[str, list[float]] = defaultdict(list)
    tokens, trained = Counter[int](), list[int]()
    generated = Lengths()
    for group in groups:
        for rows in samples(group):
            generated.add_sample(rows)
            by_task[rows[0].task].append(rows[0].reward)
            trained.append(sum(_num_trained(row, weights) for row in rows))
            found = histogram(rows, ages, weights)
            if found:
                by_age[bucket(max(found))].append(rows[0].reward)
            tokens.update(found)
    by_bucket = Counter[str]()
    for age, count in tokens.items():
        by_bucket[bucket(age)] += count
    metrics = {f"reward/task/{name}": float(np.mean(r)) for name, r in by_task.items()}
    metrics |= {f"reward/staleness/{name}": float(np.mean(r)) for name, r in by_age.items()}
    metrics |= {f"tokens/age/{name}": float(count) for name, count in by_bucket.items()}
    if trained:
        metrics["length/trained"] = float(np.mean(trained))
    if (mean := generated.mean()) is not None:
        metrics |= {"length/generated": mean, "tokens/generated": float(generated.num_tokens)}
    return metrics, tokens


def bucket(age: int) -> str:
    """`ahead` below 0, each of 0 to 4 by itself, then 5-8, 9-16 and so on, twice as wide each."""
    if age < 0:
        return "ahead"
    if age <= 4:
        return str(age)
    last = 1 << (age - 1).bit_length()
    return f"{last // 2 + 1}-{last}"


class Lengths:
    """Tokens sampled, of groups added one by one. A sample of which no version wrote a token, text
    that is trained on, has no length."""

    def __init__(self) -> None:
        self.num_tokens = self._num_samples = 0

    def add(self, group: Group) -> None:
        for rows in samples(group):
            self.add_sample(rows)

    def add_sample(self, rows: Sequence[Trajectory]) -> None:
        """Of one of its samples, all its branches."""
        segments = [segment for row in rows for segment in row.segments]
        self._num_samples += bool(segments)
        self.num_tokens += sum(s.end - s.start for s in segments)

    def mean(self) -> float | None:
        """A sample; None without any."""
        return self.num_tokens / self._num_samples if self._num_samples else None


def _num_trained(row: Trajectory, weights: Mapping[Version, float]) -> int:
    counted = row.loss_mask * row_weights(row, weights) if weights else row.loss_mask
    return int(np.count_nonzero(counted[1:]))
