"""The training engine: rows and advantages enter a step, updated weights and metrics leave it.

DeepSpeed on one rank or several, in any ZeRO stage, on CPU (gloo, no compiler needed) or CUDA
(nccl) by the same code. Every rank is a process with an engine of its own, and all of them call the
same methods in the same order; where rank 0 decides alone, it `tell`s the others.

    step (rank 0) -> shares, one a rank -> train (every rank):
        seed -> for each mini-batch:
                    for each of its micro-batches: forward (log-probs) -> loss -> backward
                    one optimizer step

With one mini-batch, the policy at the step's start, from which the loss measures by default, is the
current policy of every micro-batch, so its log-probs are the forward's own, detached: no second
forward runs. With several, one that is not finite is left out: metric `minibatches/skipped`.

A step is a function of (weights, optimizer state, rows, micro-batches and their ranks, advantages,
seed) for a given `environment()`: equal inputs give equal bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from trainer.process_group import (  # first: it sets what torch and DeepSpeed read at import
    ALONE,
    World,
    be_deterministic,
    quiet_deepspeed,
    running,
    sequence_group,
    start_process_group,
)

# isort: split
import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from connectors import config as configuration
from connectors import weights
from operators.tracker import TrackerState
from trainer import budget, engine_state, fused, memory, shares, zero
from trainer.batches import Rows
from trainer.forward import Forwards
from trainer.lora import add_adapters
from trainer.policy import PolicyModel, load_policy
from trainer.pretrained import save_whole
from trainer.shares import Call, Origin, Share
from trainer.state_copy import StateCopy
from trainer.step_metrics import Tally, row_metrics

if TYPE_CHECKING:
    from trainer.gang import Gang

ADAPTERS_SEED: Final = 0
"""What adapters are drawn from: the same in each run."""
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """metrics  finite numbers by name (one that is not finite is left out)
    skipped  None, "no_tokens" or, of all mini-batches, "nan_gradient": then weights and optimizer
             state are as before
    seconds  "logprobs": forward passes, "update": backward passes and the optimizer; of rank 0
    master_changed  whether the optimizer's own float32 weights are others than before
    drift  if asked: KL(policy before the step || policy after it) a token, estimated (k3) on the
           trained tokens of each rank's first micro-batch, which not the policy before the step but
           the behaviour policy sampled; 0 where nothing stepped"""

    metrics: Mapping[str, float]
    skipped: str | None
    seconds: Mapping[str, float]
    master_changed: bool
    drift: float | None = None


class TrainingEngine:
    """One model and its optimizer. Create one at a time in a process; `close` it before the next.

    tracker  values of prompts, which the caller keeps here: they are of a checkpoint, as the
             weights are"""

    def __init__(
        self,
        model_path: str | Path,
        trainer: configuration.Trainer,
        model: configuration.Model,
        temperature: float,
        *,
        world: World = ALONE,
        gang: Gang | None = None,
    ) -> None:
        """`gang`: of rank 0, the other ranks, which are to do what this one does; None for a rank
        alone, or where each has a caller. ConfigError for another number of ranks than the world
        has or a model whose head or attention cannot be reproduced, FileNotFoundError for a missing
        model folder, MemoryShort for what does not fit."""
        self.tracker = TrackerState()
        self._path, self._temperature = Path(model_path), temperature
        self._trainer, self._world, self._gang = trainer, world, gang
        self._dtype = _DTYPES[model.dtype]
        self._initial: PolicyModel | None = None
        self._check_start()
        torch.set_num_threads(trainer.num_threads)
        be_deterministic()
        start_process_group(world)
        self._device = world.device
        self._sequence_group = sequence_group(world, trainer.sequence_parallel)
        there = memory.available(self._device, ranks_here=world.num_ranks)
        world.each(None)  # all have looked before one of them loads
        config = zero.deepspeed_config(trainer, model.dtype)
        self._adapted = None
        with quiet_deepspeed():
            with zero.loading(config, whole=trainer.lora is not None):
                policy = self._load(gradient_checkpointing=trainer.gradient_checkpointing)
            if trainer.lora is not None:
                self._adapted = add_adapters(policy.model, trainer.lora, ADAPTERS_SEED)
            self._max_tokens = budget.settle(policy, trainer, model, there, world)
            self._engine = zero.wrapped(policy.to(self._device), config)
        policy.check_head()
        policy.check_packing()
        if self._adapted is None:
            self._plan = weights.plan(weights.shapes_of(self.named_parameters()), self._dtype)
        else:
            self._plan = self._adapted.plan(self._dtype)

    @classmethod
    def of(
        cls, config: configuration.Config, world: World = ALONE, gang: Gang | None = None
    ) -> Self:
        """What a configuration asks for, holding the initial model: the state before step 1."""
        path, temperature = config.resolve(config.model.path), config.sampling.temperature
        return cls(path, config.trainer, config.model, temperature, world=world, gang=gang)

    def _check_start(self) -> None:
        if not (self._path / "config.json").is_file():
            raise FileNotFoundError(
                f"model.path: {self._path} holds no model (config.json is missing)"
            )
        if (asked := self._trainer.num_ranks) != self._world.num_ranks:
            raise configuration.ConfigError(
                f"trainer.num_ranks: is {asked}, and this is one of {self._world.num_ranks}"
            )

    def _load(self, *, gradient_checkpointing: bool = False) -> PolicyModel:
        """The initial model, where it was loaded to."""
        return load_policy(
            self._path,
            self._dtype,
            self._temperature,
            gradient_checkpointing=gradient_checkpointing,
            sequence_group=self._sequence_group,
        )

    @property
    def max_tokens(self) -> int:
        """That a micro-batch may take to compute."""
        return self._max_tokens

    @property
    def num_shares(self) -> int:
        """Into how many shares a step's rows are cut: ranks, but for those of one sequence."""
        return self._world.num_ranks // self._trainer.sequence_parallel

    def check(self) -> None:
        """RankDied when another rank is gone."""
        if self._gang is not None:
            self._gang.check()

    def _tell(self, call: Call) -> None:
        if self._gang is not None:
            self._gang.tell(call)

    # ---------------------------------------------------------------------------------- training
    def step(
        self,
        rows: Rows,
        micro_batches: Sequence[Sequence[int]],
        advantages: Sequence[NDArray[np.floating[Any]]],
        seed: int,
        trainer: configuration.Trainer | None = None,
        *,
        ranks: Sequence[int] = (),
        origin: Origin | None = None,
        measure_drift: bool = False,
    ) -> StepResult:
        """One step on `rows`, cut into `micro_batches` of row indices, each run by one of `ranks`
        (`packing.assign`), with an optimizer step for each mini-batch that has a trained token;
        `advantages` holds one [T_i] array a row. `seed` is set before the first forward. `trainer`:
        the settings of this step, None for those the engine was made with. `origin`: where other
        ranks read their rows. `measure_drift`: by one forward more, at the end.

        A loss is that of a whole mini-batch, however it is cut. ValueError for ranks that are not
        there. Whoever took the micro-batches from elsewhere than `packing.assign` checks them."""
        settings = trainer or self._trainer
        if rows.num_trained == 0:
            return StepResult(
                metrics=row_metrics(rows, advantages, 0),
                skipped="no_tokens",
                seconds=Tally().seconds,
                master_changed=False,
                drift=0.0 if measure_drift else None,
            )
        cut = shares.split(rows, micro_batches, ranks, advantages, settings, self.num_shares)
        if self._gang is not None:
            if origin is None:
                raise ValueError("other ranks are to train, and nothing says where they read")
            each = shares.trains(
                cut, rows, origin, num_ranks=self._world.num_ranks, seed=seed,
                settings=settings, measure_drift=measure_drift,
            )  # fmt: skip
            self._gang.tell_each(each)
        done = self.train(cut[0], seed, settings, measure_drift=measure_drift)
        metrics = {**done.metrics, **row_metrics(rows, advantages, len(micro_batches))}
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return replace(done, metrics=finite)

    def train(
        self,
        share: Share,
        seed: int,
        settings: configuration.Trainer,
        *,
        measure_drift: bool = False,
    ) -> StepResult:
        """This rank's part of a step. The result is the same on all ranks but for `seconds`."""
        zero.step_by(self._engine, settings)
        tally = Tally()
        torch.manual_seed(seed)
        forwards = Forwards(
            current=self._engine,
            frozen=self._engine.module,
            reference=self._reference(settings),
            as_reference=nullcontext if self._adapted is None else self._adapted.disabled,
            share=share,
            settings=settings,
            device=self._device,
            tally=tally,
        )
        first, *rest = share.minibatches
        if settings.proximal == "recompute":
            forwards.recompute([indices for minibatch in rest for indices in minibatch])
        before = zero.master_digest(self._engine, self._device)
        for minibatch in (first, *rest):
            self._optimize(forwards, minibatch)
        drift = None
        if measure_drift:
            drift = self._drift(forwards, first[0]) if tally.num_applied else 0.0
            tally.metrics["kl/update"] = drift
        tally.merge(self._world.each(tally.part())[:: self._trainer.sequence_parallel])
        after = zero.master_digest(self._engine, self._device)
        return StepResult(
            metrics=tally.summary() | {"learning_rate": float(self._engine.get_lr()[0])},
            skipped=None if tally.num_applied else "nan_gradient",
            seconds=tally.seconds,
            master_changed=self._world.sum(float(after != before)) > 0,
            drift=drift,
        )

    def _optimize(self, forwards: Forwards, minibatch: Sequence[Sequence[int]]) -> None:
        """One optimizer step, unless its loss or gradient is not finite: then it changes nothing.
        DeepSpeed leaves weights and optimizer alone and lets go of the gradients, in each stage in
        its own way, when their norm is not finite; so that of a loss that is not is made so."""
        tally, total = forwards.tally, 0.0
        at_start = not tally.num_applied
        for indices in minibatch:
            loss = forwards.loss(indices, at_start=at_start)
            total += float(loss.item())
            started = time.perf_counter()
            # DeepSpeed averages over ranks what is a sum.
            self._engine.backward(loss * self._world.num_ranks)
            tally.seconds["update"] += time.perf_counter() - started
        started = time.perf_counter()
        total = self._world.sum(total) / self._trainer.sequence_parallel
        if not math.isfinite(total):
            self._engine.backward(math.nan * forwards.loss((), at_start=False))
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        applied = bool(self._engine.was_step_applied()) and math.isfinite(norm)
        tally.minibatch(total, norm if applied else None)
        tally.seconds["update"] += time.perf_counter() - started

    def _drift(self, forwards: Forwards, indices: Sequence[int]) -> float:
        total, num = forwards.drift(indices)
        return self._world.sum(total) / self._world.sum(num)

    def _reference(self, settings: configuration.Trainer) -> PolicyModel | None:
        """The initial model, in memory from the first step on whose loss measures from it; what
        adapters were added to is there already."""
        if not settings.kl_coefficient:
            return None
        if self._adapted is not None:
            found: PolicyModel = self._engine.module
            return found
        if self._initial is None:
            self._initial = self._load().to(self._device).requires_grad_(False)
        return self._initial

    # ----------------------------------------------------------------------------------- weights
    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """What is trained and published: the model's parameters under their Hugging Face names,
        tied ones once, or its adapters; in ZeRO stage 3 this rank's parts."""
        if self._adapted is not None:
            return self._adapted.named_parameters()
        return list(self._engine.module.model.named_parameters())

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below it."""
        return int(self._engine.module.model.get_input_embeddings().num_embeddings)

    @property
    def plan(self) -> weights.Plan:
        """How the weights are cut into buckets for publishing and digests."""
        return self._plan

    def snapshot(self, into: weights.Snapshot | None = None) -> weights.Snapshot:
        """A copy of the weights as published, with its digest, where the weights lie; `into` gives
        its buffers. Of rank 0."""
        self._tell(shares.Take())
        return weights.Snapshot.take(
            self.named_parameters(),
            self._plan,
            into=into,
            device=self._device,
            gather=zero.gathered,
        )

    def digest(self) -> str:
        """16 hex digits of the weights as they are published."""
        self._tell(shares.Digest())
        return weights.digest(self.named_parameters(), self._plan, gather=zero.gathered)

    def take_part(self) -> None:
        """What the other ranks do for a snapshot or digest of rank 0."""
        weights.take_part(self.named_parameters(), self._plan, zero.gathered)

    # -------------------------------------------------------------------------------- checkpoint
    def capture(self, into: StateCopy | None = None) -> StateCopy:
        """A copy of this rank's model, optimizer and random state, of rank 0 the tracker too, whose
        `write` gives what `load` reads; `into` gives its memory. Of rank 0, what is written is
        what all ranks captured."""
        self._tell(shares.Capture())
        if into is None and self._gang is not None:
            into = StateCopy(self._gang.write)
        return engine_state.capture(
            self._engine, self.tracker, into, only_trained=self._adapted is not None
        )

    def load(self, folder: Path) -> None:
        """Brings back what was captured, bit for bit. ValueError when `folder` holds no checkpoint,
        RuntimeError (torch's) when it is of a model with other shapes."""
        self._tell(shares.Load(str(folder)))
        self.tracker = engine_state.restore(
            self._engine, folder, only_trained=self._adapted is not None
        )

    def save_pretrained(self, folder: Path) -> None:
        """The model, adapters merged, and its tokenizer as a Hugging Face folder, by rank 0."""
        self._tell(shares.Pretrained(str(folder)))
        model = self._engine.module.model
        parameters: Iterable[tuple[str, Tensor]] = model.named_parameters()
        if self._adapted is not None:
            parameters = self._adapted.merged_parameters(zero.gathered)
        save_whole(model, parameters, self._path, folder, by_this_rank=self._world.rank == 0)

    # ------------------------------------------------------------------------------- environment
    def environment(self) -> dict[str, str]:
        """What must be equal for equal bits; recorded in every manifest."""
        return {
            **running(),
            "zero_stage": str(self._trainer.zero_stage),
            "offload": self._trainer.offload,
            "sequence_parallel": str(self._trainer.sequence_parallel),
            "lora": "none" if self._trainer.lora is None else str(self._trainer.lora),
            "dtype": str(self._dtype).removeprefix("torch."),
            "logprobs": fused.kernel_for(
                self._device, entropy_gradient=self._trainer.entropy_coefficient > 0
            ),
            **({} if self._adapted is None else self._adapted.environment()),
        }

    def close(self) -> None:
        """Ends the engine and its process group; safe to call twice."""
        if self._engine is not None:
            self._tell(shares.Close())
            self._engine.destroy()
            self._engine = self._initial = None
            if dist.is_initialized():
                deepspeed.comm.destroy_process_group()
