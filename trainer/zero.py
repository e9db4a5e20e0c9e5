"""What differs by ZeRO stage: DeepSpeed's settings, where the optimizer's weights lie, and how
whole parameters are had where each rank keeps a part.

    stage  a rank keeps             of the gradients  of the parameters
    0      all optimizer state      all               all
    1      its part of it           all               all
    2      its part of it           its part          all
    3      its part of it           its part          its part
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import deepspeed
import torch
from torch import Tensor
from transformers.integrations import HfDeepSpeedConfig

from connectors.config import Trainer
from connectors.weights.layout import Digester
from trainer.model_state import BUCKET, sizes


def deepspeed_config(trainer: Trainer, dtype: str) -> dict[str, Any]:
    """For `deepspeed.initialize`. `dtype`: that of the model, "float32" or "bfloat16"."""
    zero: dict[str, Any] = {"stage": trainer.zero_stage}
    host = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if trainer.offload != "none":
        zero["offload_optimizer"] = host
    if trainer.offload == "all":
        zero["offload_param"] = host
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
        "zero_optimization": zero,
        # torch's optimizer on offloaded state, too: DeepSpeed's resumes with other bits.
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == "bfloat16", "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": None,
    }


def wrapped(policy: torch.nn.Module, config: dict[str, Any]) -> Any:
    """DeepSpeed's engine of it, which trains the parameters that require a gradient."""
    trained = [p for p in policy.parameters() if p.requires_grad]
    # No bucket of gradients is larger than all of them: on CUDA it is there whole.
    config["zero_optimization"]["reduce_bucket_size"] = min(BUCKET, sizes(trained)[1])
    engine, *_ = deepspeed.initialize(model=policy, model_parameters=trained, config=config)
    engine.train()
    engine._copy_recovery_script = lambda folder: None  # only our own code reads it back
    return engine


@contextmanager
def loading(config: dict[str, Any], *, whole: bool) -> Iterator[None]:
    """Inside, a transformers model is loaded part by part where each rank keeps a part, unless it
    is to be there `whole` first."""
    in_parts = config["zero_optimization"]["stage"] == 3 and not whole
    # Ranks know parameters by numbers that count up in a process, which may have had an engine.
    deepspeed.zero.Init.param_id = 0
    known = HfDeepSpeedConfig(config) if in_parts else None
    yield
    del known  # transformers looks whether it lives


def gathered(parameters: Sequence[Tensor]) -> AbstractContextManager[object]:
    """Inside, they are whole on every rank; all ranks enter together."""
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        found: AbstractContextManager[object] = deepspeed.zero.GatheredParameters(list(parameters))
        return found
    return nullcontext()


def master_digest(engine: Any, device: torch.device) -> str:
    """Of this rank's part of the weights the optimizer steps on, from which DeepSpeed copies the
    model's; computed on `device`."""
    fold = Digester(torch.float32, device)
    for part in master_weights(engine):
        fold.update(part)
    return fold.hex()


def master_weights(engine: Any) -> list[Tensor]:
    optimizer = engine.optimizer
    for name in ("fp32_partitioned_groups_flat", "fp32_groups_flat_partition"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return [weights for group in optimizer.param_groups for weights in group["params"]]


def step_by(engine: Any, trainer: Trainer) -> None:
    """Sets what the optimizer steps by: a loaded checkpoint brings the settings of its time
    along."""
    for group in engine.optimizer.param_groups:
        group["lr"] = trainer.learning_rate
        group["weight_decay"] = trainer.weight_decay
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = trainer.max_grad_norm
    else:  # float32 in stage 0: torch's optimizer itself
        engine.clip_fp32_gradients = _clip(engine, trainer.max_grad_norm)


def _clip(engine: Any, max_norm: float) -> Callable[[], None]:
    """What the other stages do: a gradient that is not finite is no step, and its norm is known.
    DeepSpeed calls it once gradients are those of all ranks."""

    def clip() -> None:
        parameters = [p for p in engine.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        engine._global_grad_norm = float(norm)
        if math.isfinite(engine._global_grad_norm):
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        else:
            engine.zero_grad()  # AdamW passes over what has no gradient

    return clip
