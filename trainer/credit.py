"""Credit: what each trained token of a step is held to have earned.

    groups ──▶ samples, rewards shaped, rewards placed at tokens, turns ──▶ trainer.advantages

A sample is what was sampled once: all its branches, `GROUP/k` and `GROUP/k/branch`. Its unit of
credit is itself or, with `credit = "turn"`, each of its turns (connectors/turns.py). A trajectory's
`rewards` are parts of its `reward`, earned at their tokens. Groups that correct a label
(`trainer.late_labels`) stand outside of the estimator and of all it normalises over.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from connectors.algorithms import estimator
from connectors.config import Trainer
from connectors.records import Group, Trajectory
from connectors.turns import turns_of
from trainer import batches, late_labels
from trainer.advantages import advantage
from trainer.overdue import Weights, row_weights
from trainer.shaping import overlong

_SAMPLE: Final = re.compile(r"(/(0|[1-9][0-9]{0,8})){1,2}")
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def advantages(
    groups: Sequence[Group],
    rows: batches.Rows,
    trainer: Trainer,
    *,
    weights: Weights | None = None,
    values: Floats | None = None,
) -> list[Floats]:
    """Of every token, [T_i] a row; 0 where a row's mask is. `rows` are those of `groups`. `values`:
    [N], the baseline of each row's prompt. `weights`: of tokens over age; a token's advantage is
    multiplied by its own, and with it a policy gradient's loss.

    ValueError, naming the row or group, for what the estimator refuses; a step that is whole gives
    none where `too_few` gives None and `untrainable` refused no group of it."""
    if rows.num_trained == 0:
        return [np.zeros(len(mask)) for mask in rows.masks]
    found = _credited(groups, rows, trainer, values)
    if weights:
        of_rows = (row_weights(t, weights) for t in trajectories(groups))
        found = [of_row * a for of_row, a in zip(of_rows, found, strict=True)]
    return found


def alone(group: Group, trainer: Trainer) -> list[Floats]:
    """As `advantages`, of a step of this group alone; what is refused in a step, beside groups that
    have trained tokens, is refused here, whether this one has any. Where an estimator compares the
    samples of a group only, that says whether the group carries any signal."""
    return _credited([group], batches.flatten([group]), trainer, None)


def _credited(
    groups: Sequence[Group], rows: batches.Rows, trainer: Trainer, values: Floats | None
) -> list[Floats]:
    """Of corrections by their own rule, of the others by the estimator."""
    corrected = late_labels.corrected(rows, groups)
    if not corrected.any():
        return _estimated(groups, rows, trainer, values)
    found = late_labels.advantages(rows, groups)
    at = np.flatnonzero(~corrected)
    others = rows.chosen(at.tolist())
    if others.num_trained:
        compared = [group for group in groups if not late_labels.is_correction(group)]
        of_others = None if values is None else values[at]
        for i, of_row in zip(at, _estimated(compared, others, trainer, of_others), strict=True):
            found[i] = of_row
    return found


def _estimated(
    groups: Sequence[Group], rows: batches.Rows, trainer: Trainer, values: Floats | None
) -> list[Floats]:
    samples = samples_of(groups)
    found: list[Floats] = advantage(
        trainer.advantage,
        rewards=_rewards(groups, rows, samples, trainer),
        groups=rows.groups,
        mask=rows.masks,
        samples=samples,
        token_rewards=_placed(groups),
        turns=_turns(groups) if trainer.credit == "turn" else None,
        discount=trainer.discount,
        values=values,
        row_names=rows.ids,
        **trainer.advantage_parameters,
    )
    return found


def no_signal(group: Group, trainer: Trainer) -> bool:
    """Whether `trainer.filter_groups` drops it: every token's advantage is 0, so it carries no
    reward signal."""
    return trainer.filter_groups and not any(row.any() for row in alone(group, trainer))


def too_few(groups: Sequence[Group], rows: batches.Rows, trainer: Trainer) -> str | None:
    """Why these have no advantages but those of corrections, or None: an estimator that normalises
    over the step needs two of what it normalises over."""
    chosen = estimator(trainer.advantage, {})
    if rows.num_trained == 0:
        return "no_tokens"
    compared = [group for group in groups if not late_labels.is_correction(group)]
    if not compared:
        return None
    num_trained = rows.num_trained_N[~late_labels.corrected(rows, groups)].sum()
    if chosen.whitens and num_trained == 1:
        return "one_token"
    if chosen.needs_value and sum(1 for group in compared for _ in samples(group)) < 2:
        return "one_sample"
    return None


def trajectories(groups: Sequence[Group]) -> Iterator[Trajectory]:
    """A step's rows, in order."""
    return (trajectory for group in groups for trajectory in group.trajectories)


def is_sample(trajectory: Trajectory) -> bool:
    """Whether its id is one of its group: `GROUP/k` or `GROUP/k/branch`, in ASCII digits and each
    number written one way, of nine digits at most."""
    prefix, rest = trajectory.group_id, trajectory.trajectory_id
    return rest.startswith(prefix) and _SAMPLE.fullmatch(rest.removeprefix(prefix)) is not None


def sample_of(trajectory: Trajectory) -> int:
    """k of `GROUP/k` or `GROUP/k/branch`."""
    return int(trajectory.trajectory_id.removeprefix(trajectory.group_id + "/").split("/")[0])


def samples(group: Group) -> Iterator[list[Trajectory]]:
    """The rows of each sample, in the order of their first ones; of rows with any id."""
    found: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in group.trajectories:
        name = trajectory.trajectory_id.removeprefix(f"{group.group_id}/")
        found[name.split("/")[0]].append(trajectory)
    yield from found.values()


def samples_of(groups: Sequence[Group]) -> Ints:
    """[N], the sample of each row within its group."""
    return np.array([sample_of(t) for t in trajectories(groups)], np.int64)


def _rewards(
    groups: Sequence[Group], rows: batches.Rows, samples: Ints, trainer: Trainer
) -> Floats:
    """[N], of each row's sample, shaped by its length. A reward that is the sum of its parts as far
    as a record, which holds float32, can tell is their sum: rounding is nobody's merit."""
    keys = np.stack([rows.groups, samples])
    of_row = np.unique(keys, axis=1, return_inverse=True)[1].ravel()

    def total(numbers: Iterable[float]) -> Floats:
        """[N], over the rows of each row's sample."""
        sums = np.bincount(of_row, weights=np.fromiter(numbers, np.float64, len(of_row)))
        return sums[of_row].astype(np.float64)

    told = np.array([t.reward for t in trajectories(groups)], np.float64)
    parts = total(sum(value for _, value, _ in t.rewards) for t in trajectories(groups))
    rewards: Floats = np.where(told.astype(np.float32) == parts.astype(np.float32), parts, told)
    if (rule := trainer.overlong) is not None:
        rewards += overlong(
            total(int(np.count_nonzero(t.loss_mask)) for t in trajectories(groups)),
            max_length=rule.max_length,
            buffer=rule.buffer,
            penalty=rule.penalty,
        )
    return rewards


def _placed(groups: Sequence[Group]) -> list[Floats] | None:
    """[T_i] a row, the part of the reward that each token earned; None where no row has parts."""
    if not any(t.rewards for t in trajectories(groups)):
        return None
    found = []
    for trajectory in trajectories(groups):
        placed = np.zeros(len(trajectory.tokens))
        for token, value, _ in trajectory.rewards:
            placed[token] += value
        found.append(placed)
    return found


def _turns(groups: Sequence[Group]) -> list[Ints]:
    """[T_i] a row: the turn of its sample that each token belongs to."""
    found: list[Ints] = []
    for group in groups:
        masks: defaultdict[int, list[NDArray[np.int8]]] = defaultdict(list)
        samples = [sample_of(t) for t in group.trajectories]
        for k, trajectory in zip(samples, group.trajectories, strict=True):
            masks[k].append(trajectory.loss_mask)
        of_sample = {k: iter(turns_of(of_rows)) for k, of_rows in masks.items()}
        found += [next(of_sample[k]) for k in samples]
    return found
