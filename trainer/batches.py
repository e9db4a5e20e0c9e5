"""From groups to the flat rows of a step, and which of its mini-batches each is of.

All of it is a pure function of its input, so the same records give the same rows, bit for bit: a
replay calls `flatten` on the manifest's records. What becomes of them: trainer/packing.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from connectors.records import Group, Trajectory
from trainer.ages import Ages, row_ages
from trainer.overdue import Weights, row_weights

MOST_LOGPROB: Final = 1e6
"""Magnitude of a behaviour log-prob. No model comes near, and the sum over a row stays finite."""


@dataclass(frozen=True, kw_only=True)
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

    @cached_property
    def num_trained_N(self) -> NDArray[np.int64]:
        """Tokens of each row that carry a loss."""
        return np.array([np.count_nonzero(mask) for mask in self.masks], np.int64)

    @property
    def num_trained(self) -> int:
        """Of all rows."""
        return int(self.num_trained_N.sum())

    @property
    def untrained(self) -> tuple[int, ...]:
        """Rows without a trained token: their reward counts in the baseline, they enter no
        micro-batch."""
        return tuple(np.flatnonzero(self.num_trained_N == 0).tolist())

    def chosen(self, indices: Sequence[int]) -> Rows:
        """Some of them, in that order."""
        at = np.asarray(indices, np.int64)
        return Rows(
            ids=tuple(self.ids[i] for i in indices),
            tokens=tuple(self.tokens[i] for i in indices),
            masks=tuple(self.masks[i] for i in indices),
            logprobs=tuple(self.logprobs[i] for i in indices),
            rewards=self.rewards[at],
            groups=self.groups[at],
            samples=None if self.samples is None else self.samples[at],
            ages=None if self.ages is None else tuple(self.ages[i] for i in indices),
        )


def flatten(
    groups: Sequence[Group], weights: Weights | None = None, *, ages: Ages | None = None
) -> Rows:
    """The rows of `groups`; tokens of versions that have weight 0 are not trained. `ages`: of the
    versions, where known."""
    found = [(index, t) for index, group in enumerate(groups) for t in group.trajectories]
    return Rows(
        ids=tuple(t.trajectory_id for _, t in found),
        tokens=tuple(t.tokens for _, t in found),
        masks=tuple(_trained(t, weights or {}) for _, t in found),
        logprobs=tuple(_behaviour(t) for _, t in found),
        rewards=np.array([t.reward for _, t in found], np.float64),
        groups=np.array([index for index, _ in found], np.int64),
        ages=tuple(row_ages(t, ages or {}) for _, t in found),
    )


def lacks_behaviour(trajectory: Trajectory, needed_by: str) -> str | None:
    """Why it gives `needed_by` (`algorithms.needs_behaviour`) no log-probs of a policy that sampled
    it, or None: a trained token has none within +-MOST_LOGPROB, or is of text."""
    trained = _trained(trajectory, {})
    if trajectory.behaviour == "text" and trained.any():
        return (
            f"it is text, which no policy sampled, and {needed_by} needs the log-probs of one that "
            "did"
        )
    bad = np.flatnonzero(trained & ~(np.abs(trajectory.logprobs) <= MOST_LOGPROB))
    if not len(bad):
        return None
    return (
        f"token {bad[0]} is trained but its log-prob is {trajectory.logprobs[bad[0]]}, which "
        f"{needed_by} needs"
    )


def _behaviour(trajectory: Trajectory) -> NDArray[np.float32]:
    if trajectory.behaviour == "text":  # whatever it carries, no policy drew it
        return np.full(len(trajectory.tokens), np.nan, np.float32)
    return trajectory.logprobs


def _trained(trajectory: Trajectory, weights: Weights) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = trajectory.loss_mask != 0
    mask[:1] = False
    if weights:
        mask &= row_weights(trajectory, weights) > 0
    return mask


def minibatch_of(rows: Rows, num_minibatches: int) -> NDArray[np.int64]:
    """[N], the mini-batch of each row. The step's groups, in order, are cut into parts of equal
    size, or one group more or less; with fewer groups than parts some are empty."""
    num_groups = int(rows.groups.max(initial=0)) + 1
    return rows.groups * num_minibatches // num_groups
