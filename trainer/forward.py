"""A step's forward passes: micro-batches enter, their losses and what they say of the step leave.

    recompute -> for each mini-batch: loss of each of its micro-batches -> optimizer -> ... -> drift

The policy at the step's start is the current one until the optimizer has stepped; after that its
log-probs are known only where `recompute` took them before. What is measured of it, the gap, is of
those tokens alone. A shadow has none: the policy that sampled its tokens is another one's, whatever
its number.

Legend: B sequences, T positions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from connectors.config import Trainer
from trainer import aggregation
from trainer.batches import MicroBatch, Rows, collate, minibatch_of
from trainer.corrections import k3, proximal
from trainer.losses import policy_loss
from trainer.step_metrics import Tally

Policy = Callable[..., tuple[Tensor, Tensor]]
"""`PolicyModel`, or what wraps it: (tokens, positions, mask, entropy gradient) -> (log-probs,
entropies)."""


@dataclass(kw_only=True, slots=True)
class Forwards:
    """Of one step.

    current    carries the gradient
    frozen     the same policy, for passes without one
    reference  what the KL of the loss is to; None: the loss has none
    tally      gets sums and seconds
    """

    current: Policy
    frozen: Policy
    reference: Policy | None
    rows: Rows
    advantages: Sequence[NDArray[np.floating[Any]]]
    settings: Trainer
    device: torch.device
    tally: Tally
    weights_N: NDArray[np.float64] = field(init=False)
    _start_BT: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights_N = row_weights(self.rows, self.settings)

    def recompute(self, micro_batches: Sequence[Sequence[int]]) -> None:
        """The log-probs of these by the policy as it is now."""
        with self._timed():
            for indices in micro_batches:
                self._start_BT[tuple(indices)] = _logprobs(self.frozen, self._batch(indices))

    def loss(self, indices: Sequence[int], *, at_start: bool) -> Tensor:
        """Of one micro-batch, within its mini-batch's. `at_start`: nothing has stepped yet."""
        with self._timed():
            batch = self._batch(indices)
            logprobs_BT, entropy_BT = self.current(
                *_inputs(batch), self.settings.entropy_coefficient > 0
            )
            if at_start:
                self._start_BT[tuple(indices)] = logprobs_BT.detach()
            start_BT = self._start_BT.get(tuple(indices))
            found, metrics = self._policy_loss(batch, logprobs_BT, start_BT, entropy_BT)
            gap_N = None
            if start_BT is not None and self.settings.source is None:
                gap_N = (start_BT - batch.behaviour_logprobs_BT)[batch.mask_BT]
            self.tally.add(metrics, gap_N, batch.ages_BT[batch.mask_BT])
        return found

    def drift(self, indices: Sequence[int]) -> float:
        """KL(policy at the step's start || policy now) a trained token of a micro-batch whose loss
        was taken at the start (k3)."""
        with self._timed():
            batch = self._batch(indices)
            moved_BT = _logprobs(self.frozen, batch) - self._start_BT[tuple(indices)]
            return float(k3(moved_BT)[batch.mask_BT].mean(dtype=torch.float64))

    def _policy_loss(
        self, batch: MicroBatch, logprobs_BT: Tensor, start_BT: Tensor | None, entropy_BT: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        settings = self.settings
        found: Tensor
        found, metrics = policy_loss(
            settings.loss,
            logprobs_BT,
            proximal(
                settings.proximal,
                logprobs_BT,
                batch.behaviour_logprobs_BT,
                recomputed=start_BT,
                ages=batch.ages_BT,
            ),
            batch.behaviour_logprobs_BT,
            batch.advantages_BT,
            batch.mask_BT,
            row_weights=self.weights_N[list(batch.indices)],
            correction=settings.correction,
            correction_level=settings.correction_level,
            correction_low=settings.correction_low,
            correction_cap=settings.correction_cap,
            rejection=settings.rejection,
            rejection_level=settings.rejection_level,
            rejection_low=settings.rejection_low,
            rejection_high=settings.rejection_high,
            reference_logprobs=self.reference and _logprobs(self.reference, batch),
            kl=settings.kl,
            kl_coefficient=settings.kl_coefficient,
            entropy=entropy_BT,
            entropy_coefficient=settings.entropy_coefficient,
            **settings.loss_parameters,
        )
        return found, metrics

    def _batch(self, indices: Sequence[int]) -> MicroBatch:
        return collate(self.rows, indices, self.advantages).to(self.device)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.tally.seconds["logprobs"] += time.perf_counter() - started


def row_weights(rows: Rows, settings: Trainer) -> NDArray[np.float64]:
    """[N], of each row in the loss of its own mini-batch; 0 for rows that no loss takes."""
    parts_N = minibatch_of(rows, settings.num_minibatches)
    found = np.zeros(len(rows))
    for part in np.unique(parts_N):
        at = np.flatnonzero(parts_N == part)
        masks = [rows.masks[i] for i in at]
        if any(mask.any() for mask in masks):
            found[at] = aggregation.row_weights(
                masks,
                settings.aggregation,
                groups=rows.groups[at],
                samples=None if rows.samples is None else rows.samples[at],
                constant=settings.aggregation_constant,
            )
    return found


def _inputs(batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.tokens_BT, batch.position_ids_BT, batch.mask_BT


@torch.no_grad()
def _logprobs(policy: Policy, batch: MicroBatch) -> Tensor:
    logprobs_BT, _ = policy(*_inputs(batch))
    return logprobs_BT
