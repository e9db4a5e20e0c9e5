"""`engine.options` of the `vllm` engine: a few of our own, everything else goes to vLLM as it is.

What the run's configuration says elsewhere, and what the engine relies on, is set here and refused
as an option.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from pydantic import Field, ValidationError

from connectors.config import Config, ConfigError, Section

KV_BYTES: Final = 1 << 30
"""On CPU, at most, unless `kv_cache_memory_bytes` says more; one context always fits."""
BLOCK_TOKENS: Final = 32
"""On CPU: the smallest its attention takes. Samples share their prompt's whole blocks."""
GPU_SHARE: Final = 0.9
STEP_TOKENS: Final = 2048
"""In a step of vLLM's, by its default; it takes a token of each running sequence at least."""

SET_ELSEWHERE: Final = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "max_model_len": "model.context_tokens",
    "max_num_seqs": "engine.max_running",
    "data_parallel_size": "engine.count",
}
"""vLLM's name and ours."""
_OURS: Final[dict[str, Any]] = {
    "skip_tokenizer_init": True,  # ids in, ids out
    "generation_config": "vllm",  # a model folder's own sampling defaults must not be applied
    "logprobs_mode": "processed_logprobs",  # after the temperature
    "disable_log_stats": True,
    "stream_interval": 1,
    "runner": "generate",
    "weight_transfer_config": {"backend": "headwater"},
    "pipeline_parallel_size": 1,
    "nnodes": 1,
}
_ANOTHER_MODEL: Final = {
    *("model_weights", "load_format", "model_loader_extra_config", "ignore_patterns"),
    *("config_format", "hf_config_path", "hf_overrides", "model_class_overrides"),
    *("convert", "revision", "quantization", "quantization_config"),
    *("enable_lora", "default_mm_loras", "logits_processors", "override_generation_config"),
    *("watermark_config", "diffusion_config"),
    *("worker_cls", "worker_extension_cls", "scheduler_cls"),
}
"""With these vLLM's model or its sampling would not be the trainer's, or not take its weights."""
_AT_LEAST_ONE: Final = ("kv_cache_memory_bytes", "num_gpu_blocks_override")
"""What vLLM lets pass, and dies of later."""
_DEFAULTS: Final[dict[str, Any]] = {
    "enable_prefix_caching": True,  # samples of a prompt, and turns of a session, share it
    "use_tqdm_on_load": False,
}


class OwnOptions(Section):
    """The keys of `engine.options` that are not vLLM's."""

    num_threads: int = Field(1, ge=1)
    """CPU threads of each vLLM process; bits of the logits depend on it."""
    stall_s: float = Field(300.0, gt=0)
    """An engine that has work and decodes nothing for so long is given up, and started again."""


def own_options(config: Config) -> OwnOptions:
    """ConfigError names the wrong key, the rule and the value got."""
    options = config.engine.options
    try:
        return OwnOptions(**{k: v for k, v in options.items() if k in OwnOptions.model_fields})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"engine.options.{where}: {first['msg'].lower()}, got {first['input']!r}"
        ) from error


def passed_on(config: Config, known: Iterable[str]) -> dict[str, Any]:
    """The options that are vLLM's, whose arguments are `known`. ConfigError for one that is not,
    with the nearest one, and for one that is set elsewhere."""
    known = [*OwnOptions.model_fields, *known]
    given, max_running = config.engine.options, config.engine.max_running
    least_of = dict.fromkeys(_AT_LEAST_ONE, (1, "1"))
    least_of["max_num_batched_tokens"] = (max_running, f"engine.max_running = {max_running}")
    for key in given:
        if key in SET_ELSEWHERE:
            raise ConfigError(f"engine.options.{key}: is set by {SET_ELSEWHERE[key]}")
        if key in _OURS:
            raise ConfigError(f"engine.options.{key}: is set by the engine, to {_OURS[key]!r}")
        if key in _ANOTHER_MODEL:
            raise ConfigError(
                f"engine.options.{key}: could make the engine's model or sampling another than the "
                "trainer's"
            )
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f", did you mean {close[0]}?" if close else " (an argument of vLLM's engine)"
            raise ConfigError(f"engine.options: unknown key {key}{hint}")
        least = least_of.get(key)
        if least is not None and isinstance(given[key], int) and given[key] < least[0]:
            raise ConfigError(
                f"engine.options.{key}: must be at least {least[1]}, got {given[key]}"
            )
    return {k: v for k, v in given.items() if k not in OwnOptions.model_fields}


def engine_arguments(config: Config, folder: Path, model: Any, *, on_cpu: bool) -> dict[str, Any]:
    """vLLM's arguments, before the options are laid over them; `model` is the model folder's
    configuration as transformers reads it."""
    section = config.engine
    arguments = _DEFAULTS | _OURS
    arguments |= {
        "model": str(folder),
        "dtype": config.model.dtype,
        "max_model_len": min(config.model.context_tokens, num_positions(model)),
        "max_num_seqs": section.max_running,
        "tensor_parallel_size": max(1, int(section.num_gpus)),
    }
    if section.max_running > STEP_TOKENS:
        arguments["max_num_batched_tokens"] = section.max_running
    if on_cpu:
        arguments |= {
            "enforce_eager": True,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": _kv_bytes(
                model, config.model.dtype, arguments["max_model_len"], section.max_running
            ),
        }
    elif section.num_gpus < 1:  # engines that share a GPU
        arguments["gpu_memory_utilization"] = GPU_SHARE * section.num_gpus
    return arguments


def num_positions(model: Any) -> int:
    """The longest sequence the model was made for."""
    limit = getattr(model.get_text_config(), "max_position_embeddings", None)
    return 1 << 30 if limit is None else int(limit)


def _kv_bytes(model: Any, dtype: str, context_tokens: int, max_running: int) -> int:
    """For `max_running` whole contexts, KV_BYTES at most, one context at least."""
    text = model.get_text_config()
    heads = text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    element_bytes = 4 if dtype == "float32" else 2
    token_bytes = 2 * text.num_hidden_layers * kv_heads * head_size * element_bytes
    # vLLM keeps a block for itself, and every sequence's last one is not full.
    context_bytes = (context_tokens + 2 * BLOCK_TOKENS) * token_bytes
    return int(max(context_bytes, min(context_bytes * max_running, KV_BYTES)))
