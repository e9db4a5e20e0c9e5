"""What the checks share: models of random weights, clocks that wait for the device, figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

Figures = dict[str, Any]

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1,
    },
    "135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152,
        "num_attention_heads": 9, "num_key_value_heads": 3, "initializer_range": 0.05,
    },
}  # fmt: skip
"""Llama models. A wider spread than usual: with it two models differ by more than 1 nat a token."""
REPEATS: Final = 5


class Skipped(RuntimeError):
    """The check cannot be done here; the message says why."""


def require(true: bool, otherwise: str) -> None:
    """The check fails, and why, unless `true`."""
    if not true:
        raise RuntimeError(otherwise)


def random_model(shape: str, seed: int, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        **SHAPES[shape], tie_word_embeddings=True, max_position_embeddings=2048,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def timed(device: str, work: Callable[[], object]) -> float:
    """Seconds until the device has done it."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of_a_copy(buckets: Sequence[Tensor], device: str) -> float:
    """Of a plain copy into memory that the device has already."""
    there = [torch.empty_like(bucket, device=device) for bucket in buckets]

    def copy() -> None:
        for source, target in zip(buckets, there, strict=True):
            target.copy_(source)

    return min(timed(device, copy) for _ in range(REPEATS))


def rate(num_bytes: int, seconds: float, copy_s: float) -> Figures:
    """`of_a_copy`: 1 is as fast as copying the same bytes."""
    gb = num_bytes / 1e9
    return {"gb": gb, "seconds": seconds, "gb_per_s": gb / seconds, "of_a_copy": copy_s / seconds}
