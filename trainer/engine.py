"""The training engine: rows and advantages enter a step, updated weights and metrics leave it.

DeepSpeed with one rank, ZeRO-1, on CPU (gloo, no compiler needed) or CUDA (nccl) by the same code.

    seed -> for each mini-batch:
                for each of its micro-batches: forward (log-probs) -> loss -> backward
                one optimizer step

With one mini-batch, the policy at the step's start, from which the loss measures by default, is the
current policy of every micro-batch, so its log-probs are the forward's own, detached: no second
forward runs. With several, one that is not finite is left out: metric `minibatches/skipped`.

A step is a function of (weights, optimizer state, rows, micro-batches, advantages, seed) for a
given `environment()`: equal inputs give equal bits.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainer.process_group import (  # first: it sets what torch and DeepSpeed read at import
    be_deterministic,
    quiet_deepspeed,
    start_process_group,
)

# isort: split
import deepspeed
import msgspec
import numpy as np
import torch
import torch.distributed as dist
import transformers
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from numpy.typing import NDArray

from connectors import config as configuration
from connectors import weights
from connectors.weights.layout import Digester
from operators.tracker import TrackerState
from trainer.batches import Rows, check_assignment, cut
from trainer.forward import Forwards
from trainer.logprobs import PolicyModel, load_policy
from trainer.state_copy import StateCopy
from trainer.step_metrics import Tally, row_metrics

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TAG: Final = "engine"
_TRACKER: Final = "tracker.pt"
_TOKENIZER_FILES: Final = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "generation_config.json",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """metrics  finite numbers by name (one that is not finite is left out)
    skipped  None, "no_tokens" or, of all mini-batches, "nan_gradient": then weights and optimizer
             state are as before
    seconds  "logprobs": forward passes, "update": backward passes and the optimizer
    master_changed  whether the optimizer's own float32 weights are others than before
    drift  if asked: KL(policy before the step || policy after it) a token, estimated (k3) on the
           trained tokens of the first micro-batch: its longest rows, which not the policy before
           the step but the behaviour policy sampled; 0 where nothing stepped"""

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
    ) -> None:
        """ConfigError for a setting this engine cannot run; FileNotFoundError for a missing model
        folder; ValueError for a model whose head it cannot reproduce."""
        _check_settings(trainer)
        self.tracker = TrackerState()
        self._path = Path(model_path)
        if not (self._path / "config.json").is_file():
            raise FileNotFoundError(
                f"model.path: {self._path} holds no model (config.json is missing)"
            )
        self._trainer = trainer
        self._dtype = _DTYPES[model.dtype]
        self._temperature = temperature
        self._initial: PolicyModel | None = None
        torch.set_num_threads(trainer.num_threads)
        be_deterministic()
        start_process_group()
        policy = load_policy(self._path, self._dtype, temperature)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        policy.to(self._device)
        policy.check_head()
        with quiet_deepspeed():
            self._engine, *_ = deepspeed.initialize(
                model=policy,
                model_parameters=list(policy.parameters()),
                config=_deepspeed_config(trainer, model.dtype),
            )
        self._engine.train()
        self._engine._copy_recovery_script = lambda folder: None  # only our own code reads it back
        self._plan = weights.plan(weights.shapes_of(self.named_parameters()), self._dtype)

    # ---------------------------------------------------------------------------------- training
    def step(
        self,
        rows: Rows,
        micro_batches: Sequence[Sequence[int]],
        advantages: Sequence[NDArray[np.floating[Any]]],
        seed: int,
        trainer: configuration.Trainer | None = None,
        *,
        measure_drift: bool = False,
    ) -> StepResult:
        """One step on `rows`, cut into `micro_batches` of row indices (`batches.assign`), with an
        optimizer step for each mini-batch that has a trained token; `advantages` holds one [T_i]
        array a row. `seed` is set before the first forward. `trainer`: the settings of this step,
        None for those the engine was made with. `measure_drift`: by one forward more, at the end.

        A loss is that of a whole mini-batch, however it is cut. ValueError when micro-batches do
        not cover the trained rows exactly once, mini-batch by mini-batch, or a value cannot be
        trained on."""
        settings = trainer or self._trainer
        check_assignment(rows, micro_batches, settings.num_minibatches)
        self._set_optimizer(settings)
        tally, reference = Tally(), self._reference(settings)
        torch.manual_seed(seed)
        if rows.num_trained == 0:
            drift = 0.0 if measure_drift else None
            return self._result(rows, advantages, 0, tally, "no_tokens", drift=drift)
        forwards = Forwards(
            current=self._engine,
            frozen=self._engine.module,
            reference=reference,
            rows=rows,
            advantages=advantages,
            settings=settings,
            device=self._device,
            tally=tally,
        )
        first, *rest = cut(rows, micro_batches, settings.num_minibatches)
        if settings.proximal == "recompute":
            forwards.recompute([indices for minibatch in rest for indices in minibatch])
        before = self._master_digest()
        for minibatch in (first, *rest):
            self._optimize(forwards, minibatch)
        drift = None
        if measure_drift:
            drift = forwards.drift(first[0]) if tally.num_applied else 0.0
            tally.metrics["kl/update"] = drift
        return self._result(
            rows,
            advantages,
            len(micro_batches),
            tally,
            None if tally.num_applied else "nan_gradient",
            master_changed=self._master_digest() != before,
            drift=drift,
        )

    def _optimize(self, forwards: Forwards, minibatch: Sequence[Sequence[int]]) -> None:
        """One optimizer step, unless its loss or gradient is not finite: then it changes nothing.
        DeepSpeed leaves weights and optimizer alone and clears the gradients when their norm is not
        finite; a loss that is not finite never reaches it."""
        tally, total = forwards.tally, 0.0
        at_start = not tally.num_applied
        for indices in minibatch:
            loss = forwards.loss(indices, at_start=at_start)
            total += float(loss.item())
            started = time.perf_counter()
            self._engine.backward(loss)
            tally.seconds["update"] += time.perf_counter() - started
        started = time.perf_counter()
        applied = math.isfinite(total)
        if applied:
            self._engine.step()
            applied = bool(self._engine.was_step_applied())
        else:
            self._engine.optimizer.zero_grad()
        grad_norm = float(self._engine.get_global_grad_norm()) if applied else None
        tally.minibatch(total, grad_norm)
        tally.seconds["update"] += time.perf_counter() - started

    def _result(
        self,
        rows: Rows,
        advantages: Sequence[NDArray[np.floating[Any]]],
        num_micro_batches: int,
        tally: Tally,
        skipped: str | None,
        *,
        master_changed: bool = False,
        drift: float | None,
    ) -> StepResult:
        metrics = row_metrics(rows, advantages, num_micro_batches)
        if num_micro_batches:
            rate = float(self._engine.get_lr()[0])
            metrics = tally.summary() | metrics | {"learning_rate": rate}
        return StepResult(
            metrics={k: v for k, v in metrics.items() if math.isfinite(v)},
            skipped=skipped,
            seconds=tally.seconds,
            master_changed=master_changed,
            drift=drift,
        )

    def _reference(self, settings: configuration.Trainer) -> PolicyModel | None:
        """The initial model, in memory from the first step on whose loss measures from it."""
        if not settings.kl_coefficient:
            return None
        if self._initial is None:
            self._initial = load_policy(self._path, self._dtype, self._temperature)
            self._initial.to(self._device).requires_grad_(False)
        return self._initial

    def _set_optimizer(self, settings: configuration.Trainer) -> None:
        """A loaded checkpoint brings the settings of its time along."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = settings.learning_rate
            group["weight_decay"] = settings.weight_decay
        self._engine.optimizer.clip_grad = settings.max_grad_norm

    # ----------------------------------------------------------------------------------- weights
    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The model's parameters under their Hugging Face names, tied ones once."""
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
        its buffers."""
        return weights.Snapshot.take(
            self.named_parameters(), self._plan, into=into, device=self._device
        )

    def digest(self) -> str:
        """16 hex digits of the weights as they are published."""
        return weights.digest(self.named_parameters(), self._plan)

    def _master_digest(self) -> str:
        """Of the weights the optimizer steps on, from which DeepSpeed copies the model's."""
        fold = Digester(torch.float32, self._device)
        for group in self._engine.optimizer.param_groups:
            for weights_of_group in group["params"]:
                fold.update(weights_of_group)
        return fold.hex()

    # -------------------------------------------------------------------------------- checkpoint
    def capture(self, into: StateCopy | None = None) -> StateCopy:
        """A copy of model, optimizer, random state and tracker, whose `write` gives what `load`
        reads; `into` gives its memory."""
        captured = into or StateCopy()
        captured.clear()
        stock, self._engine.checkpoint_engine = (
            self._engine.checkpoint_engine, _IntoMemory(captured),
        )  # fmt: skip
        try:
            with quiet_deepspeed():
                self._engine.save_checkpoint(".", tag=_TAG, save_latest=False)
        finally:
            self._engine.checkpoint_engine = stock
        state = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        captured.add(f"random_{dist.get_rank()}.pt", state)
        captured.add(_TRACKER, msgspec.json.encode(self.tracker).decode())
        captured.wait()
        return captured

    def save(self, folder: Path) -> None:
        """Model, optimizer, random state and tracker into `folder` (which exists), to be made
        atomic by the caller."""
        self.capture().write(folder)

    def load(self, folder: Path) -> None:
        """The opposite of `save`, bit for bit. ValueError when `folder` holds no checkpoint,
        RuntimeError (torch's) when it is of a model with other shapes."""
        if not (folder / _TAG).is_dir():
            raise ValueError(f"{folder} holds no checkpoint of this engine")
        with quiet_deepspeed():
            self._engine.load_checkpoint(str(folder), tag=_TAG)
        state = torch.load(folder / f"random_{dist.get_rank()}.pt", weights_only=True)
        torch.set_rng_state(state["cpu"])
        if torch.cuda.is_available() and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])
        tracker = torch.load(folder / _TRACKER, weights_only=True)
        self.tracker = msgspec.json.decode(tracker, type=TrackerState)

    def save_pretrained(self, folder: Path) -> None:
        """The model and its tokenizer as a Hugging Face folder."""
        self._engine.module.model.save_pretrained(folder)
        for pattern in _TOKENIZER_FILES:
            for file in self._path.glob(pattern):
                shutil.copy(file, folder)

    # ------------------------------------------------------------------------------- environment
    def environment(self) -> dict[str, str]:
        """What must be equal for equal bits; recorded in every manifest."""
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        return {
            "device": device,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "threads": str(torch.get_num_threads()),
            "ranks": str(dist.get_world_size()),
            "zero_stage": str(self._trainer.zero_stage),
            "dtype": str(self._dtype).removeprefix("torch."),
            "torch": str(torch.__version__),
            "deepspeed": deepspeed.__version__,
            "transformers": transformers.__version__,
        }

    def close(self) -> None:
        """Ends the engine and its process group; safe to call twice."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = self._initial = None
            if dist.is_initialized():
                deepspeed.comm.destroy_process_group()


class _IntoMemory(CheckpointEngine):  # type: ignore[misc]
    """Takes what DeepSpeed would write to files."""

    def __init__(self, captured: StateCopy) -> None:
        super().__init__()
        self._captured = captured

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        return None

    def create(self, info: object) -> None:
        return None

    def save(self, state_dict: object, path: str) -> None:
        self._captured.add(path, state_dict)

    def load(self, path: str, map_location: object = None) -> None:
        raise NotImplementedError

    def commit(self, info: object) -> bool:
        return True


def _check_settings(trainer: configuration.Trainer) -> None:
    for key in ("num_ranks", "zero_stage"):
        if (number := getattr(trainer, key)) != 1:
            raise configuration.ConfigError(f"trainer.{key}: only 1 is supported, got {number}")
    if trainer.num_gpus > 1:
        raise configuration.ConfigError(
            f"trainer.num_gpus: a rank trains on one GPU, got {trainer.num_gpus:g}"
        )


def _deepspeed_config(trainer: configuration.Trainer, dtype: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        # step() ends an accumulation of any number of backward() calls.
        "managed_gradient_accumulation": False,
        "gradient_clipping": trainer.max_grad_norm,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": trainer.learning_rate,
                "weight_decay": trainer.weight_decay,
                # torch's fused kernel: DeepSpeed's own would be compiled at the first start.
                "torch_adam": True,
                "fused": True,
            },
        },
        "zero_optimization": {"stage": trainer.zero_stage},
        "bf16": {"enabled": dtype == "bfloat16", "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": None,
    }
