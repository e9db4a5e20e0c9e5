"""The `hf` engine: transformers' continuous batching, for CPUs and small models."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from connectors.config import Config

if TYPE_CHECKING:
    from connectors.engines.parts import Decoder, Weights


def build(config: Config) -> tuple[Decoder, Weights]:
    """The parts of an engine that serves `config.model.path`, not yet started. EngineStartError
    when there is no such model, ConfigError for wrong `engine.options`."""
    from connectors.engines.hf import decoder as decoding
    from connectors.engines.hf.swap import WeightSwap
    from connectors.engines.options import parse_options
    from connectors.weights import WeightsReceiver

    options = parse_options(config, decoding.DecoderOptions)
    os.environ.setdefault("OMP_NUM_THREADS", str(options.num_threads))
    import torch

    torch.set_num_threads(options.num_threads)
    device = "cuda" if config.engine.num_gpus > 0 and torch.cuda.is_available() else "cpu"
    folder = config.resolve(config.model.path)
    model = decoding.load_model(folder, config.model.dtype, device)
    decoder = decoding.Decoder(
        model,
        max_running=config.engine.max_running,
        context_tokens=min(config.model.context_tokens, decoding.num_positions(model)),
        options=options,
    )
    return decoder, WeightSwap(decoder, WeightsReceiver(model.named_parameters(), folder))
