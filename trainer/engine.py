"""The training engine: rows and advantages enter a step, updated weights and metrics leave it.

The only file that imports deepspeed. One rank, ZeRO-1, on CPU (gloo, no compiler needed) or CUDA
(nccl) by the same code.

    seed -> for each micro-batch: forward (log-probs) -> loss -> backward -> one optimizer step

With one optimizer step a step, the policy at the step's start, from which the loss measures by
default, is the current policy of every micro-batch, so its log-probs are the forward's own,
detached: no second forward runs.

A step is a function of (weights, optimizer state, rows, micro-batches, advantages, seed) for a
given `environment()`: equal inputs give equal bits.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # before CUDA starts: deterministic cuBLAS

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import msgspec
import numpy as np
import torch.distributed as dist
import transformers
from deepspeed.ops import __compatible_ops__
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from connectors import config as configuration
from connectors import weights
from connectors.weights.layout import Digester
from operators.tracker import TrackerState
from trainer.aggregation import row_weights
from trainer.batches import MicroBatch, Rows, check_assignment, collate
from trainer.corrections import k3, proximal
from trainer.logprobs import PolicyModel
from trainer.losses import policy_loss
from trainer.state_copy import StateCopy
from trainer.step_metrics import Tally, row_metrics

_log = logging.getLogger(__name__)

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
    skipped  None, "nan_gradient" or "no_tokens": then weights and optimizer state are as before
    seconds  "logprobs": forward passes, "update": backward passes and the optimizer
    master_changed  whether the optimizer's own float32 weights are others than before
    drift  if asked: KL(policy before the step || policy after it) a token, over the trained tokens
           of the first micro-batch (k3); 0 where nothing stepped"""

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
        torch.set_num_threads(trainer.num_threads)
        _be_deterministic()
        _start_process_group()
        policy = PolicyModel(_load_model(self._path, self._dtype), temperature)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        policy.to(self._device)
        policy.check_head()
        with _quiet_deepspeed():
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
        """One optimizer step on `rows`, cut into `micro_batches` of row indices
        (`batches.assign`); `advantages` holds one [T_i] array a row. `seed` is set before the first
        forward. `trainer`: the settings of this step, None for those the engine was made with.
        `measure_drift`: by one forward more, after the optimizer.

        The loss is that of the whole step, however it is cut. ValueError when micro-batches do not
        cover the trained rows exactly once, or a value cannot be trained on."""
        check_assignment(rows, micro_batches)
        settings = trainer or self._trainer
        self._set_optimizer(settings)
        torch.manual_seed(seed)
        if rows.num_trained == 0:
            return self._skipped(rows, "no_tokens", 0.0 if measure_drift else None)
        weights_N = row_weights(
            rows.masks,
            settings.aggregation,
            groups=rows.groups,
            samples=rows.samples,
            constant=settings.aggregation_constant,
        )
        tally, start_BT = Tally(), None
        for indices in micro_batches:
            batch = collate(rows, indices, advantages).to(self._device)
            loss, logprobs_BT = self._forward(batch, weights_N[list(indices)], tally, settings)
            start_BT = logprobs_BT if start_BT is None else start_BT
            started = time.perf_counter()
            self._engine.backward(loss)
            tally.seconds["update"] += time.perf_counter() - started
        started = time.perf_counter()
        before = self._master_digest()
        applied = self._apply(tally.loss)
        tally.seconds["update"] += time.perf_counter() - started
        if applied:
            tally.metrics["grad_norm"] = float(self._engine.get_global_grad_norm())
        drift = None
        if measure_drift and start_BT is not None:
            first = collate(rows, micro_batches[0], advantages).to(self._device)
            drift = self._drift(first, start_BT) if applied else 0.0
            tally.metrics["kl/update"] = drift
        metrics = tally.summary() | row_metrics(rows, len(micro_batches))
        metrics["learning_rate"] = float(self._engine.get_lr()[0])
        return StepResult(
            metrics={k: v for k, v in metrics.items() if math.isfinite(v)},
            skipped=None if applied else "nan_gradient",
            seconds=tally.seconds,
            master_changed=self._master_digest() != before,
            drift=drift,
        )

    @torch.no_grad()
    def _drift(self, batch: MicroBatch, before_BT: Tensor) -> float:
        after_BT, _ = self._engine.module(batch.tokens_BT, batch.position_ids_BT, batch.mask_BT)
        return float(k3(after_BT - before_BT)[batch.mask_BT].mean(dtype=torch.float64))

    def _forward(
        self,
        batch: MicroBatch,
        weights_B: NDArray[np.float64],
        tally: Tally,
        settings: configuration.Trainer,
    ) -> tuple[Tensor, Tensor]:
        started = time.perf_counter()
        logprobs_BT, entropy_BT = self._engine(
            batch.tokens_BT,
            batch.position_ids_BT,
            batch.mask_BT,
            settings.entropy_coefficient > 0,
        )
        loss: Tensor
        loss, metrics = policy_loss(
            settings.loss,
            logprobs_BT,
            proximal(settings.proximal, logprobs_BT, batch.behaviour_logprobs_BT),
            batch.behaviour_logprobs_BT,
            batch.advantages_BT,
            batch.mask_BT,
            row_weights=weights_B,
            correction=settings.correction,
            correction_level=settings.correction_level,
            correction_low=settings.correction_low,
            correction_cap=settings.correction_cap,
            rejection=settings.rejection,
            rejection_level=settings.rejection_level,
            rejection_low=settings.rejection_low,
            rejection_high=settings.rejection_high,
            entropy=entropy_BT,
            entropy_coefficient=settings.entropy_coefficient,
            **settings.loss_parameters,
        )
        gap_N = (logprobs_BT.detach() - batch.behaviour_logprobs_BT)[batch.mask_BT]
        tally.add(float(loss.item()), metrics, gap_N)
        tally.seconds["logprobs"] += time.perf_counter() - started
        return loss, logprobs_BT.detach()

    def _set_optimizer(self, settings: configuration.Trainer) -> None:
        """A loaded checkpoint brings the settings of its time along."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = settings.learning_rate
            group["weight_decay"] = settings.weight_decay
        self._engine.optimizer.clip_grad = settings.max_grad_norm

    def _apply(self, loss: float) -> bool:
        """Whether the optimizer stepped. DeepSpeed leaves weights and optimizer alone and clears
        the gradients when their norm is not finite; a loss that is not finite never reaches it."""
        if not math.isfinite(loss):
            self._engine.optimizer.zero_grad()
            return False
        self._engine.step()
        return bool(self._engine.was_step_applied())

    def _skipped(self, rows: Rows, reason: str, drift: float | None) -> StepResult:
        return StepResult(
            metrics=row_metrics(rows, 0),
            skipped=reason,
            seconds={"logprobs": 0.0, "update": 0.0},
            master_changed=False,
            drift=drift,
        )

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
            with _quiet_deepspeed():
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
        with _quiet_deepspeed():
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
            self._engine = None
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


def _load_model(path: Path, dtype: torch.dtype) -> Any:
    """The model without dropout: its log-probs must be those of the policy that samples."""
    transformers.utils.logging.disable_progress_bar()
    settings = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    for key, value in vars(settings).items():
        if key.endswith(("dropout", "pdrop")) and isinstance(value, float):
            setattr(settings, key, 0.0)
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, config=settings, dtype=dtype, attn_implementation="sdpa", local_files_only=True
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


def _be_deterministic() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _start_process_group() -> None:
    """A world of this process alone, over a store in memory: no port to find free, none left open.
    DeepSpeed finds the group and takes it; it still reads the launcher's variables."""
    os.environ.update(
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    )
    os.environ.setdefault("MASTER_PORT", "29500")  # never opened
    # DeepSpeed would compile its shared-memory collectives for the CPU (40 s, and a compiler is
    # needed).
    __compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    with _quiet_deepspeed():
        deepspeed.init_distributed()


@contextlib.contextmanager
def _quiet_deepspeed() -> Iterator[None]:
    """Its progress lines and its use of deprecated torch calls say nothing to our reader."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level)
