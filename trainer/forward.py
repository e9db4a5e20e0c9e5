"""A step's forward passes: micro-batches enter, their losses and what they say of the step leave.

    recompute -> for each mini-batch: loss of each of its micro-batches -> optimizer -> ... -> drift

The policy at the step's start is the current one until the optimizer has stepped; after that its
log-probs are known only where `recompute` took them before. What is measured of it, the gap, is of
those tokens alone. A shadow has none: the policy that sampled its tokens is another one's, whatever
its number.

A micro-batch without rows is run all the same, on two tokens that no loss counts: every rank takes
part in what its engine does with all of them.

Legend: N trained tokens of a micro-batch, B its rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from connectors.config import Trainer
from trainer.corrections import k3, proximal
from trainer.losses import policy_loss
from trainer.packing import Pack, empty_pack, pack
from trainer.shares import Share
from trainer.step_metrics import Tally

Policy = Callable[..., tuple[Tensor, Tensor]]
"""`PolicyModel`, or what wraps it: (pack, entropy gradient) -> (log-probs [N], entropies [N])."""


@dataclass(kw_only=True, slots=True)
class Forwards:
    """Of one step.

    current    carries the gradient
    frozen     the same policy, for passes without one
    reference  what the KL of the loss is to, None: the loss has none; within `as_reference`
    tally      gets sums and seconds
    """

    current: Policy
    frozen: Policy
    reference: Policy | None
    share: Share
    settings: Trainer
    device: torch.device
    tally: Tally
    as_reference: Callable[[], AbstractContextManager[object]] = nullcontext
    _start_N: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def recompute(self, micro_batches: Sequence[Sequence[int]]) -> None:
        """The log-probs of these by the policy as it is now."""
        with self._timed():
            for indices in micro_batches:
                self._start_N[tuple(indices)] = _logprobs(self.frozen, self._pack(indices))

    def loss(self, indices: Sequence[int], *, at_start: bool) -> Tensor:
        """Of one micro-batch, within its mini-batch's. `at_start`: nothing has stepped yet."""
        with self._timed():
            packed = self._pack(indices)
            logprobs_N, entropy_N = self.current(packed, self.settings.entropy_coefficient > 0)
            if at_start:
                self._start_N[tuple(indices)] = logprobs_N.detach()
            start_N = self._start_N.get(tuple(indices))
            reference_N = self._reference(packed)
            if not indices:
                return 0.0 * (logprobs_N.sum() + entropy_N.sum())
            found, metrics = self._policy_loss(packed, logprobs_N, start_N, entropy_N, reference_N)
            metrics["num_computed"] = float(len(packed.tokens_P))
            gap_N = None
            if start_N is not None and self.settings.source is None:
                gap_N = start_N - packed.behaviour_logprobs_N
            self.tally.add(metrics, gap_N, packed.ages_N)
        return found

    def drift(self, indices: Sequence[int]) -> tuple[float, int]:
        """KL(policy at the step's start || policy now) over the trained tokens of a micro-batch
        whose loss was taken at the start, summed (k3), and how many they are."""
        with self._timed():
            packed = self._pack(indices)
            moved_N = _logprobs(self.frozen, packed) - self._start_N[tuple(indices)]
            if not indices:
                return 0.0, 0
            return float(k3(moved_N).sum(dtype=torch.float64)), len(moved_N)

    def _reference(self, packed: Pack) -> Tensor | None:
        if self.reference is None:
            return None
        with self.as_reference():
            return _logprobs(self.reference, packed)

    def _policy_loss(
        self,
        packed: Pack,
        logprobs_N: Tensor,
        start_N: Tensor | None,
        entropy_N: Tensor,
        reference_N: Tensor | None,
    ) -> tuple[Tensor, dict[str, float]]:
        settings = self.settings
        found: Tensor
        found, metrics = policy_loss(
            settings.loss,
            logprobs_N,
            proximal(
                settings.proximal,
                logprobs_N,
                packed.behaviour_logprobs_N,
                recomputed=start_N,
                ages=packed.ages_N,
            ),
            packed.behaviour_logprobs_N,
            packed.advantages_N,
            None,
            rows=packed.row_N,
            row_weights=self.share.weights_N[list(packed.indices)],
            correction=settings.correction,
            correction_level=settings.correction_level,
            correction_low=settings.correction_low,
            correction_cap=settings.correction_cap,
            rejection=settings.rejection,
            rejection_level=settings.rejection_level,
            rejection_low=settings.rejection_low,
            rejection_high=settings.rejection_high,
            reference_logprobs=reference_N,
            kl=settings.kl,
            kl_coefficient=settings.kl_coefficient,
            entropy=entropy_N,
            entropy_coefficient=settings.entropy_coefficient,
            **settings.loss_parameters,
        )
        return found, metrics

    def _pack(self, indices: Sequence[int]) -> Pack:
        if not indices:
            return empty_pack().to(self.device)
        return pack(self.share.rows, indices, self.share.advantages).to(self.device)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.tally.seconds["logprobs"] += time.perf_counter() - started


@torch.no_grad()
def _logprobs(policy: Policy, packed: Pack) -> Tensor:
    logprobs_N, _ = policy(packed)
    return logprobs_N
