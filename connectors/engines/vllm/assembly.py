"""From a run's configuration to the parts of a vLLM engine: what can be known to be wrong before
vLLM's processes start is said here, in one line."""

from __future__ import annotations

import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import torch

from connectors.config import Config, ConfigError
from connectors.engines.parts import Decoder, Weights
from connectors.engines.types import EngineStartError, Sampling
from connectors.engines.vllm import environment
from connectors.engines.vllm.options import engine_arguments, own_options, passed_on
from connectors.engines.vllm.version import installed

LINE_CHARS: Final = 400
_DRAFTS: Final = ("ngram",)
"""Ways to draft whose tokens the first model runner checks as we mean it: those that come without
probabilities."""


def assemble(config: Config) -> tuple[Decoder, Weights]:
    """vLLM is installed, in the version we need. EngineStartError, ConfigError."""
    on_cpu = config.engine.num_gpus == 0
    own = own_options(config)
    folder = config.resolve(config.model.path)
    if not (folder / "config.json").is_file():
        raise EngineStartError(f"model folder {folder}: has no config.json")
    one_worker = config.engine.options.get("tensor_parallel_size", 1) == 1
    cause = environment.prepare(on_cpu=on_cpu, num_threads=own.num_threads, one_worker=one_worker)
    torch.set_num_threads(own.num_threads)
    model = _model_config(folder)
    vllm_config = _vllm_config(config, folder, model, on_cpu=on_cpu)
    _check(vllm_config, folder)

    from connectors.engines.vllm.decoder import VllmDecoder
    from connectors.engines.vllm.weights import VllmWeights, trained_shapes

    decoder = VllmDecoder(vllm_config, stall_s=own.stall_s, cause=cause)
    # Else every request of the run would be refused, one by one.
    if (reason := decoder.refuses(Sampling(temperature=config.sampling.temperature))) is not None:
        raise ConfigError(f"sampling.temperature: {reason}")
    return decoder, VllmWeights(decoder, trained_shapes(folder))


def _model_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a damaged or foreign folder makes the loaders raise
        raise EngineStartError(
            f"model folder {folder}: cannot be read: {_one_line(error)}"
        ) from error


def _vllm_config(config: Config, folder: Path, model: Any, *, on_cpu: bool) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    if current_platform.is_cpu() != on_cpu:
        raise EngineStartError(_wrong_build(config.engine.num_gpus))
    options = passed_on(config, [field.name for field in fields(AsyncEngineArgs)])
    ours = engine_arguments(config, folder, model, on_cpu=on_cpu)
    try:
        return AsyncEngineArgs(**(ours | options)).create_engine_config()
    except Exception as error:  # vLLM checks with whatever raises
        refused = _one_line(error)
    if options:  # are they to blame?
        try:
            AsyncEngineArgs(**ours).create_engine_config()
        except Exception as error:
            refused = _one_line(error)
        else:
            raise ConfigError(f"engine.options: vLLM refuses them: {refused}")
    raise EngineStartError(f"model folder {folder}: vLLM refuses it: {refused}")


def _check(vllm_config: Any, folder: Path) -> None:
    """What would end the engine's process much later, or break our log-probs silently."""
    from vllm.platforms import current_platform

    model, drafts = vllm_config.model_config, vllm_config.speculative_config
    if current_platform.is_cpu() and not model.use_mla:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        size, known = model.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
        if not CPUAttentionBackend.supports_head_size(size):
            raise EngineStartError(
                f"model folder {folder}: vLLM's CPU build serves attention heads of "
                f"{', '.join(map(str, known))} dimensions, this model's have {size}: "
                'use engine.kind = "hf"'
            )
    if drafts is not None and not vllm_config.use_v2_model_runner and drafts.method not in _DRAFTS:
        raise ConfigError(
            f"engine.options.speculative_config: method {drafts.method!r} would give log-probs "
            f"that are not the model's with this vLLM's first model runner; known here: "
            f"{', '.join(_DRAFTS)}"
        )


def _wrong_build(num_gpus: float) -> str:
    found = installed()
    build = found[0] if found is not None else "vllm"
    if num_gpus == 0:
        return (
            f"engine.num_gpus = 0, and {build} serves on GPUs only: set engine.num_gpus, "
            "or install the CPU build (`make vllm`)"
        )
    return (
        f"engine.num_gpus = {num_gpus:g}, and {build} sees no GPU here: set engine.num_gpus = 0, "
        "or install the CUDA build (pip install -e '.[vllm]') on a machine with a GPU"
    )


def _one_line(error: BaseException) -> str:
    """What vLLM means: pydantic wraps it in lines of its own, and some errors list all there is."""
    errors = getattr(error, "errors", None)
    if callable(errors) and (found := errors()):
        where = ".".join(str(part) for part in found[0].get("loc", ()))
        text = f"{where}: {found[0]['msg'].removeprefix('Value error, ')}".removeprefix(": ")
    else:
        lines = [line for line in str(error).splitlines() if line.strip()]
        text = lines[0] if lines else type(error).__name__
    return textwrap.shorten(text, LINE_CHARS, placeholder=" ...")
