"""From rows to units of credit: what one advantage is given to, and which token belongs to which.

Three cuts: a unit is a sample (its branches together), a turn of a sample, or a trained token. A
sample's reward is earned at its end but for the parts that token rewards place elsewhere; a part at
a token that is in no unit counts as not placed. Nothing is counted twice or lost: undiscounted, the
first turn of a sample, or the first trained token of a row, is worth the sample's whole reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.estimators import Floats, Ints, Units

Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """N rows, as `trainer.advantages.advantage` takes them, their E tokens one after another.

    lengths  [N], tokens of each row
    mask     [E], which of them are trained
    """

    lengths: Ints
    mask: Bools
    rewards: Floats
    groups: Ints
    samples: Ints
    values: Floats
    names: Sequence[str] | None = None

    def label(self, row: int) -> str:
        """`row 3 (ID, group 1)`, for messages."""
        name = "" if self.names is None else f"{self.names[row]}, "
        return f"row {row} ({name}group {self.groups[row]})"

    def place(self, token: int) -> tuple[int, str]:
        """(Which token of its row the token of all is, the row's label)."""
        row = int(np.searchsorted(np.cumsum(self.lengths), token, side="right"))
        return token - int(self.lengths[:row].sum()), self.label(row)

    def check(self) -> None:
        """ValueError for lengths that disagree, numbers that are not finite, branches that
        differ."""
        lengths = [len(self.rewards), len(self.groups), len(self.samples), len(self.lengths)]
        if len(set(lengths)) > 1:
            raise ValueError(
                "rewards, groups, samples and mask differ in length: "
                + ", ".join(map(str, lengths))
            )
        for what, given in (("values", self.values), ("row_names", self.names)):
            if given is not None and len(given) != len(self.lengths):
                raise ValueError(f"{len(given)} {what} for {len(self.lengths)} rows")
        for what, numbers in (("reward", self.rewards), ("value", self.values)):
            bad = np.flatnonzero(~np.isfinite(numbers))
            if len(bad):
                raise ValueError(
                    f"the {what} of {self.label(bad[0])} is {numbers[bad[0]]}; "
                    f"{what}s must be finite"
                )
        _samples(self)

    def flat(self, what: str, arrays: Sequence[NDArray[np.generic]]) -> NDArray[np.generic]:
        """[E] of one array a row; ValueError for other lengths than the mask's."""
        if len(arrays) != len(self.lengths):
            raise ValueError(f"{what} of {len(arrays)} rows, mask of {len(self.lengths)}")
        for row, (array, length) in enumerate(zip(arrays, self.lengths.tolist(), strict=True)):
            if array.shape != (length,):
                raise ValueError(
                    f"{what} of {self.label(row)} has {len(array)} tokens, its mask {length}"
                )
        return np.concatenate(arrays) if arrays else np.zeros(0)

    def parts(self, token_rewards: Sequence[NDArray[np.generic]] | None) -> Floats:
        """[E], the reward placed at each token; ValueError for other lengths or numbers that are
        not finite."""
        if token_rewards is None:
            return np.zeros(len(self.mask))
        parts = self.flat("token_rewards", token_rewards).astype(np.float64)
        bad = np.flatnonzero(~np.isfinite(parts))
        if len(bad):
            token, label = self.place(int(bad[0]))
            raise ValueError(
                f"the reward at token {token} of {label} is {parts[bad[0]]}; rewards must be finite"
            )
        return parts


def of_samples(rows: Rows) -> tuple[Units, Ints]:
    """A unit a sample; beside it [E], the unit of each token, -1: none."""
    first, sample_of_row = _samples(rows)
    unit: Ints = np.where(rows.mask, np.repeat(sample_of_row, rows.lengths), -1)
    units = Units(
        values=rows.rewards[first],
        groups=rows.groups[first],
        num_tokens=np.bincount(unit[rows.mask], minlength=len(first)),
        baselines=rows.values[first],
    )
    return units, unit


def of_turns(
    rows: Rows, turns: Sequence[NDArray[np.generic]], parts: Floats, discount: float
) -> tuple[Units, Ints]:
    """A unit a turn of a sample; a turn may lie in several branches. `parts`: see `Rows.parts`."""
    first, sample_of_row = _samples(rows)
    turn = rows.flat("turns", turns).astype(np.int64)
    lost = np.flatnonzero(rows.mask & (turn < 0))
    if len(lost):
        token, label = rows.place(int(lost[0]))
        raise ValueError(f"token {token} of {label} is trained but has no turn")
    span = int(turn.max(initial=0)) + 1
    keys = np.repeat(sample_of_row, rows.lengths) * span + turn
    unit = np.full(len(turn), -1, np.int64)
    known, unit[turn >= 0] = np.unique(keys[turn >= 0], return_inverse=True)
    num, sample_of_unit = len(known), known // span
    earned = np.bincount(unit[turn >= 0], weights=parts[turn >= 0], minlength=num)
    num_turns = np.bincount(sample_of_unit, minlength=len(first))
    units = Units(
        values=_returns(earned.astype(np.float64), num_turns, rows.rewards[first], discount),
        groups=rows.groups[first][sample_of_unit],
        num_tokens=np.bincount(unit[rows.mask], minlength=num),
        baselines=rows.values[first][sample_of_unit],
    )
    unit[~rows.mask] = -1
    return units, unit


def of_tokens(rows: Rows, parts: Floats, gamma: float) -> tuple[Units, Ints]:
    """A unit a trained token, of value its return r_t + gamma * (return of the row's next trained
    token). Each row, a branch too, is a sequence of its own that ends in its sample's reward."""
    num = int(rows.mask.sum())
    unit = np.full(len(rows.mask), -1, np.int64)
    unit[rows.mask] = np.arange(num)
    row_of_token = np.repeat(np.arange(len(rows.lengths)), rows.lengths)[rows.mask]
    num_trained = np.bincount(row_of_token, minlength=len(rows.lengths))
    units = Units(
        values=_returns(parts[rows.mask], num_trained, rows.rewards, gamma),
        groups=rows.groups[row_of_token],
        num_tokens=np.ones(num, np.int64),
        baselines=rows.values[row_of_token],
    )
    return units, unit


def _returns(earned: Floats, lengths: Ints, rewards: Floats, discount: float) -> Floats:
    """G_k = r_k + discount * G_{k+1} within each sequence; sequences of `lengths` stand one after
    another. r is `earned` and, at a sequence's last, what is left of its reward."""
    longest = np.argsort(-lengths, kind="stable")
    # Those of length 0 have no end; the others' last places, of the longest sequence first.
    longest = longest[lengths[longest] > 0]
    last = np.cumsum(lengths)[longest] - 1
    returns = earned.copy()
    returns[last] = 0.0
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    given = np.bincount(sequence, weights=returns, minlength=len(lengths))
    returns[last] = (rewards - given)[longest]
    # One place from the end further at a time, in every sequence that is that long.
    for back in range(1, int(lengths.max(initial=0))):
        at = last[: np.searchsorted(-lengths[longest], -back)] - back
        returns[at] += discount * returns[at + 1]
    return returns


def _samples(rows: Rows) -> tuple[Ints, Ints]:
    """(first row of each sample, sample index of each row); samples in order of first
    appearance."""
    keys = np.stack([rows.groups, rows.samples])
    _, first, of_row = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    order = np.argsort(first)
    sample_of_row = np.argsort(order)[of_row.ravel()]
    first = first[order]
    for what, numbers in (("reward", rows.rewards), ("value", rows.values)):
        other_N = first[sample_of_row]
        for row in np.flatnonzero(numbers != numbers[other_N]):
            other = other_N[row]
            raise ValueError(
                f"rows {other} and {row} are branches of sample {rows.samples[row]} of group "
                f"{rows.groups[row]} but their {what}s differ: {numbers[other]}, {numbers[row]}"
            )
    return first, sample_of_row
