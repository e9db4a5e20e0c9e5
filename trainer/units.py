"""From rows to units of credit: what one advantage is given to, and which token belongs to which.

Three cuts: a unit is a sample (its branches together), a turn of a sample, or a trained token. A
sample's reward is earned at its end but for the parts that token rewards place elsewhere; a part at
a token that is in no unit counts as not placed. Nothing is counted twice or lost: undiscounted, the
first turn of a sample, or the first trained token of a row, is worth the sample's whole reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from trainer.estimators import Floats, Ints, Units

Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """N rows, as `trainer.advantages.advantage` takes them."""

    masks: Sequence[Bools]
    rewards: Floats
    groups: Ints
    samples: Ints
    values: Floats
    names: Sequence[str] | None = None

    def label(self, row: int) -> str:
        """`row 3 (ID, group 1)`, for messages."""
        name = "" if self.names is None else f"{self.names[row]}, "
        return f"row {row} ({name}group {self.groups[row]})"

    def check(self) -> None:
        """ValueError for lengths that disagree, numbers that are not finite, branches that
        differ."""
        lengths = [len(self.rewards), len(self.groups), len(self.samples), len(self.masks)]
        if len(set(lengths)) > 1:
            raise ValueError(
                "rewards, groups, samples and mask differ in length: "
                + ", ".join(map(str, lengths))
            )
        for what, given in (("values", self.values), ("row_names", self.names)):
            if given is not None and len(given) != len(self.masks):
                raise ValueError(f"{len(given)} {what} for {len(self.masks)} rows")
        for what, numbers in (("reward", self.rewards), ("value", self.values)):
            bad = np.flatnonzero(~np.isfinite(numbers))
            if len(bad):
                raise ValueError(
                    f"the {what} of {self.label(bad[0])} is {numbers[bad[0]]}; "
                    f"{what}s must be finite"
                )
        _samples(self)

    def parts(self, token_rewards: Sequence[Floats] | None) -> list[Floats]:
        """[T_i] a row, the reward placed at each token; ValueError for other lengths or numbers
        that are not finite."""
        if token_rewards is None:
            return [np.zeros(len(mask)) for mask in self.masks]
        _check_tokens(self, "token_rewards", token_rewards)
        for row, parts in enumerate(token_rewards):
            bad = np.flatnonzero(~np.isfinite(parts))
            if len(bad):
                raise ValueError(
                    f"the reward at token {bad[0]} of {self.label(row)} is {parts[bad[0]]}; "
                    "rewards must be finite"
                )
        return list(token_rewards)


def of_samples(rows: Rows) -> tuple[Units, list[Ints]]:
    """A unit a sample."""
    first, sample_of_row = _samples(rows)
    num_tokens = np.zeros(len(first), np.int64)
    np.add.at(num_tokens, sample_of_row, [int(mask.sum()) for mask in rows.masks])
    units = Units(
        values=rows.rewards[first],
        groups=rows.groups[first],
        num_tokens=num_tokens,
        baselines=rows.values[first],
    )
    return units, [np.where(m, u, -1) for m, u in zip(rows.masks, sample_of_row, strict=True)]


def of_turns(
    rows: Rows, turns: Sequence[Ints], parts: Sequence[Floats], discount: float
) -> tuple[Units, list[Ints]]:
    """A unit a turn of a sample; a turn may lie in several branches. `parts`: see `Rows.parts`."""
    first, sample_of_row = _samples(rows)
    _check_tokens(rows, "turns", turns)
    for row, (mask, of) in enumerate(zip(rows.masks, turns, strict=True)):
        lost = np.flatnonzero(mask & (of < 0))
        if len(lost):
            raise ValueError(f"token {lost[0]} of {rows.label(row)} is trained but has no turn")
    lengths = [len(mask) for mask in rows.masks]
    turn: Ints = np.concatenate([np.zeros(0, np.int64), *turns])
    trained: Bools = np.concatenate([np.zeros(0, np.bool_), *rows.masks])
    placed: Floats = np.concatenate([np.zeros(0), *parts])
    span = int(turn.max(initial=0)) + 1
    keys = np.repeat(sample_of_row, lengths) * span + turn
    unit = np.full(len(turn), -1, np.int64)
    known, unit[turn >= 0] = np.unique(keys[turn >= 0], return_inverse=True)
    sample_of_unit = known // span
    num = len(known)
    values = np.zeros(num)
    np.add.at(values, unit[turn >= 0], placed[turn >= 0])
    for of_sample in np.split(np.arange(num), np.flatnonzero(np.diff(sample_of_unit)) + 1):
        if len(of_sample):
            reward = float(rows.rewards[first[sample_of_unit[of_sample[0]]]])
            values[of_sample] = _returns(values[of_sample], reward, discount)
    units = Units(
        values=values,
        groups=rows.groups[first][sample_of_unit],
        num_tokens=np.bincount(unit[trained], minlength=num),
        baselines=rows.values[first][sample_of_unit],
    )
    unit[~trained] = -1
    return units, np.split(unit, np.cumsum(lengths))[:-1]


def of_tokens(rows: Rows, parts: Sequence[Floats], gamma: float) -> tuple[Units, list[Ints]]:
    """A unit a trained token, of value its return r_t + gamma * (return of the row's next trained
    token). Each row, a branch too, is a sequence of its own that ends in its sample's reward."""
    values: list[Floats] = []
    unit_of_token: list[Ints] = []
    start = 0
    for mask, placed, reward in zip(rows.masks, parts, rows.rewards.tolist(), strict=True):
        num = int(mask.sum())
        unit = np.full(len(mask), -1, np.int64)
        unit[mask] = np.arange(start, start + num)
        unit_of_token.append(unit)
        values.append(_returns(placed[mask], reward, gamma))
        start += num
    num_tokens = [len(v) for v in values]
    units = Units(
        values=np.concatenate([np.zeros(0), *values]),
        groups=np.repeat(rows.groups, num_tokens),
        num_tokens=np.ones(start, np.int64),
        baselines=np.repeat(rows.values, num_tokens),
    )
    return units, unit_of_token


def _returns(earned: Floats, reward: float, discount: float) -> Floats:
    """G_k = r_k + discount * G_{k+1}, where r is `earned` and, last, what is left of `reward`."""
    if not len(earned):
        return earned
    parts = earned.tolist()
    parts[-1] = reward - sum(parts[:-1])
    returns = accumulate(reversed(parts), lambda later, part: part + discount * later)
    return np.array(list(returns)[::-1])


def _check_tokens(rows: Rows, what: str, arrays: Sequence[NDArray[np.generic]]) -> None:
    if len(arrays) != len(rows.masks):
        raise ValueError(f"{what} of {len(arrays)} rows, mask of {len(rows.masks)}")
    for row, (array, mask) in enumerate(zip(arrays, rows.masks, strict=True)):
        if array.shape != mask.shape:
            raise ValueError(
                f"{what} of {rows.label(row)} has {len(array)} tokens, its mask {len(mask)}"
            )


def _samples(rows: Rows) -> tuple[Ints, Ints]:
    """(first row of each sample, sample index of each row); samples in order of first
    appearance."""
    keys: dict[tuple[int, int], int] = {}
    first: list[int] = []
    sample_of_row = np.empty(len(rows.rewards), np.int64)
    for row, key in enumerate(zip(rows.groups.tolist(), rows.samples.tolist(), strict=True)):
        if key not in keys:
            keys[key] = len(first)
            first.append(row)
        sample_of_row[row] = keys[key]
        other = first[keys[key]]
        for what, numbers in (("reward", rows.rewards), ("value", rows.values)):
            if numbers[row] != numbers[other]:
                raise ValueError(
                    f"rows {other} and {row} are branches of sample {key[1]} of group {key[0]} but "
                    f"their {what}s differ: {numbers[other]}, {numbers[row]}"
                )
    return np.array(first, np.int64), sample_of_row
