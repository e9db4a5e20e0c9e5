"""From groups to micro-batches of tensors, and back again from a manifest's indices.

    Groups --flatten--> Rows --assign--> micro_batches (index tuples, in the manifest) --collate-->
    tensors

Every step is a pure function of its input, so the same records and indices give the same tensors,
bit for bit: a replay calls `flatten` on the manifest's records and `collate` on its
`micro_batches`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from connectors.records import Group, Trajectory
from trainer.ages import UNKNOWN, Ages, row_ages
from trainer.overdue import Weights, row_weights

MOST_LOGPROB: Final = 1e6
"""Magnitude of a behaviour log-prob. No model comes near, and the sum over a row stays finite."""


class BadTrajectory(ValueError):
    """A trajectory cannot be trained; the message begins with its id."""

    def __init__(self, trajectory_id: str, message: str) -> None:
        super().__init__(f"{trajectory_id}: {message}")
        self.trajectory_id = trajectory_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """A step's trajectories as flat rows: groups in order, each group's trajectories in order.

    ids       trajectory id a row
    tokens    int32 [T_i] a row
    masks     bool [T_i] a row; True = this token is trained (never the first: nothing predicts it)
    logprobs  float32 [T_i] a row, of the policy that sampled it; NaN where not generated, and in
              all of a row of text
    rewards   float64 [N]
    groups    int64 [N], index of the row's group within the step
    samples   int64 [N], of the row within its group: rows with the same number are branches of one
              sample; None: each row is one
    ages      int32 [T_i] a row, steps behind the version that is trained (`ages.UNKNOWN`); None:
              all unknown
    """

    ids: tuple[str, ...]
    tokens: tuple[NDArray[np.int32], ...]
    masks: tuple[NDArray[np.bool_], ...]
    logprobs: tuple[NDArray[np.float32], ...]
    rewards: NDArray[np.float64]
    groups: NDArray[np.int64]
    samples: NDArray[np.int64] | None = None
    ages: tuple[NDArray[np.int32], ...] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        """All tokens of all rows, prompts included."""
        return sum(len(tokens) for tokens in self.tokens)

    @property
    def num_trained(self) -> int:
        """Tokens that carry a loss."""
        return sum(int(mask.sum()) for mask in self.masks)

    @property
    def untrained(self) -> tuple[int, ...]:
        """Rows without a trained token: their reward counts in the baseline, they enter no
        micro-batch."""
        return tuple(i for i, mask in enumerate(self.masks) if not mask.any())


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Rows of one forward pass, padded on the right to the longest. B rows, T positions. Column t
    speaks of token t. Padding: token 0, mask False, log-prob and advantage 0, age unknown."""

    indices: tuple[int, ...]
    tokens_BT: Tensor  # int64
    position_ids_BT: Tensor  # int64
    mask_BT: Tensor  # bool
    behaviour_logprobs_BT: Tensor  # float32, 0 where the mask is False
    advantages_BT: Tensor  # float32
    ages_BT: Tensor  # int32

    def to(self, device: torch.device | str) -> MicroBatch:
        return MicroBatch(
            indices=self.indices,
            tokens_BT=self.tokens_BT.to(device),
            position_ids_BT=self.position_ids_BT.to(device),
            mask_BT=self.mask_BT.to(device),
            behaviour_logprobs_BT=self.behaviour_logprobs_BT.to(device),
            advantages_BT=self.advantages_BT.to(device),
            ages_BT=self.ages_BT.to(device),
        )


def flatten(
    groups: Sequence[Group],
    weights: Weights | None = None,
    *,
    ages: Ages | None = None,
    needs_behaviour: str | None = None,
) -> Rows:
    """The rows of `groups`; tokens of versions that have weight 0 are not trained. `ages`: of the
    versions, where known. `needs_behaviour`: what reads the log-probs of the policy that sampled
    (`algorithms.needs_behaviour`), None when nothing does.

    BadTrajectory when a reward is not finite or, where something reads them, a trained token lacks
    a behaviour log-prob within +-MOST_LOGPROB or is of text, which no policy sampled."""
    found = [(index, t) for index, group in enumerate(groups) for t in group.trajectories]
    for _, trajectory in found:
        if not math.isfinite(trajectory.reward):
            raise BadTrajectory(trajectory.trajectory_id, f"its reward is {trajectory.reward}")
    return Rows(
        ids=tuple(t.trajectory_id for _, t in found),
        tokens=tuple(t.tokens for _, t in found),
        masks=tuple(_trained(t, weights or {}, needs_behaviour) for _, t in found),
        logprobs=tuple(_behaviour(t) for _, t in found),
        rewards=np.array([t.reward for _, t in found], np.float64),
        groups=np.array([index for index, _ in found], np.int64),
        ages=tuple(row_ages(t, ages or {}) for _, t in found),
    )


def _behaviour(trajectory: Trajectory) -> NDArray[np.float32]:
    if trajectory.behaviour == "text":  # whatever it carries, no policy drew it
        return np.full(len(trajectory.tokens), np.nan, np.float32)
    return trajectory.logprobs


def _trained(
    trajectory: Trajectory, weights: Weights, needs_behaviour: str | None
) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = trajectory.loss_mask != 0
    mask[:1] = False
    if weights:
        mask &= row_weights(trajectory, weights) > 0
    if needs_behaviour is None:
        return mask
    if trajectory.behaviour == "text" and mask.any():
        raise BadTrajectory(
            trajectory.trajectory_id,
            f"it is text, which no policy sampled, and {needs_behaviour} needs the log-probs of "
            "one that did",
        )
    bad = np.flatnonzero(mask & ~(np.abs(trajectory.logprobs) <= MOST_LOGPROB))
    if len(bad):
        raise BadTrajectory(
            trajectory.trajectory_id,
            f"token {bad[0]} is trained but its log-prob is {trajectory.logprobs[bad[0]]}, which "
            f"{needs_behaviour} needs",
        )
    return mask


def minibatch_of(rows: Rows, num_minibatches: int) -> NDArray[np.int64]:
    """[N], the mini-batch of each row. The step's groups, in order, are cut into parts of equal
    size, or one group more or less; with fewer groups than parts some are empty."""
    num_groups = int(rows.groups.max(initial=0)) + 1
    return rows.groups * num_minibatches // num_groups


def assign(rows: Rows, max_tokens: int, num_minibatches: int = 1) -> tuple[tuple[int, ...], ...]:
    """Micro-batches as tuples of row indices, for the manifest's `micro_batches`.

    A micro-batch is of one mini-batch, and those of the first mini-batch come first. It holds at
    most `max_tokens` positions, padding included; a row longer than that gets one of its own.
    Longest first, so neighbours pad little and what needs most memory runs first; ties keep the
    rows' order. Rows without a trained token are left out.
    """
    left_out, part = set(rows.untrained), minibatch_of(rows, num_minibatches)
    order = sorted(
        (i for i in range(len(rows)) if i not in left_out),
        key=lambda i: (part[i], -len(rows.tokens[i]), i),
    )
    batches: list[list[int]] = []
    for i in order:
        last = batches[-1] if batches else [i]
        # The first row of a micro-batch is its longest: its length is the width.
        fits = (len(last) + 1) * len(rows.tokens[last[0]]) <= max_tokens
        if batches and fits and part[last[0]] == part[i]:
            last.append(i)
        else:
            batches.append([i])
    return tuple(tuple(batch) for batch in batches)


def cut(
    rows: Rows, micro_batches: Sequence[Sequence[int]], num_minibatches: int
) -> list[list[Sequence[int]]]:
    """The micro-batches of each mini-batch that has any, in order."""
    part = minibatch_of(rows, num_minibatches)
    return [list(found) for _, found in groupby(micro_batches, lambda batch: part[batch[0]])]


def check_assignment(
    rows: Rows, micro_batches: Sequence[Sequence[int]], num_minibatches: int = 1
) -> None:
    """ValueError unless every row with a trained token is in exactly one micro-batch, no other row
    in any, none is of two mini-batches and theirs follow each other: what keeps a manifest and the
    records it names from drifting apart."""
    assigned = sorted(i for batch in micro_batches for i in batch)
    left_out = set(rows.untrained)
    expected = [i for i in range(len(rows)) if i not in left_out]
    if assigned != expected:
        wrong = sorted(set(assigned) ^ set(expected)) or "a row twice"
        raise ValueError(
            f"micro_batches do not cover the {len(expected)} trained rows once: {wrong}"
        )
    part = minibatch_of(rows, num_minibatches)
    parts = [{int(part[i]) for i in batch} for batch in micro_batches]
    if any(len(found) != 1 for found in parts) or parts != sorted(parts, key=min):
        raise ValueError(
            f"micro_batches are not those of {num_minibatches} mini-batches in order: {parts}"
        )


def collate(
    rows: Rows, indices: Sequence[int], advantages: Sequence[NDArray[np.floating]]
) -> MicroBatch:
    """The tensors of one micro-batch. `advantages`: one [T_i] array a row of `rows`."""
    shape = (len(indices), max(len(rows.tokens[i]) for i in indices))
    tokens = np.zeros(shape, np.int64)
    mask = np.zeros(shape, np.bool_)
    logprobs, weights = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    ages = np.full(shape, UNKNOWN, np.int32)
    for b, i in enumerate(indices):
        length = len(rows.tokens[i])
        tokens[b, :length] = rows.tokens[i]
        mask[b, :length] = rows.masks[i]
        logprobs[b, :length] = np.where(rows.masks[i], rows.logprobs[i], 0)
        weights[b, :length] = advantages[i]
        if rows.ages is not None:
            ages[b, :length] = rows.ages[i]
    return MicroBatch(
        indices=tuple(indices),
        tokens_BT=torch.from_numpy(tokens),
        position_ids_BT=torch.arange(shape[1]).expand(shape),
        mask_BT=torch.from_numpy(mask),
        behaviour_logprobs_BT=torch.from_numpy(logprobs),
        advantages_BT=torch.from_numpy(weights),
        ages_BT=torch.from_numpy(ages),
    )
