"""The `vllm` engine: vLLM behind the same interface, for GPUs; its CPU build for tests and small
models.

    environment  what vLLM's processes inherit            options   engine.options
    plugin       what they load of ours                   sampling  tokens and log-probs
    assembly     a configuration checked and made parts   decoder   sequences in, tokens out
    weights, transfer, board  new versions
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from connectors.config import Config
from connectors.engines.types import EngineStartError

if TYPE_CHECKING:
    from connectors.engines.parts import Decoder, Weights


def build(config: Config) -> tuple[Decoder, Weights]:
    """The parts of an engine that serves `config.model.path`, not yet started. EngineStartError
    when vLLM is missing or of another version, or cannot serve the model; ConfigError for wrong
    `engine.options`."""
    from connectors.engines.vllm.version import problem

    reason = problem()
    if reason is not None:
        raise EngineStartError(reason)
    from connectors.engines.vllm.assembly import assemble

    return assemble(config)
