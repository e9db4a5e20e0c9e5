"""Sampling for the `hf` engine: logits of one decode step in; a token, its log-prob and its version
out, written straight into the sequence they belong to.

Every token is a function of (logits, sampling settings, seed, position in the sequence): the noise
of a Gumbel-max draw (argmax of log p + Gumbel noise is a sample of p; Gumbel 1954) comes from a
hash of seed, position and token id. So a sample neither depends on its neighbours in the batch nor
on being stopped and resubmitted in mid-sequence.

Shape legend: B sequences that get a token in this step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.logits_process import LogitsProcessorList

from connectors.engines.types import Completion, Sampling
from connectors.records import FinishReason, Segment, Version
from connectors.weights.layout import mix64


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample on its way. The decode thread appends, everyone else reads; `token_ids` grows
    last, so its length is how many tokens are complete. `closed` ends it: nothing is appended any
    more."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    closed: bool = False
    submission: str = ""

    @property
    def num_left(self) -> int:
        return self.max_tokens - len(self.token_ids)

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    def append(self, token_id: int, logprob: float, version: Version) -> bool:
        """False when it is closed."""
        if self.closed:
            return False
        self.versions.append(version)
        self.logprobs.append(logprob)
        self.token_ids.append(token_id)
        return True

    def complete(self, reason: FinishReason | None = None) -> Completion:
        """Closes the sequence. Without a reason it ended by itself: stop id or length."""
        self.closed = True
        count = len(self.token_ids)
        if reason is None:
            stopped = count > 0 and self.token_ids[-1] in self.sampling.stop_ids
            reason = "stop" if stopped else "length"
        return Completion(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs[:count]),
            segments=run_lengths(self.versions[:count]),
            finish_reason=reason,
        )


def run_lengths(versions: list[Version]) -> tuple[Segment, ...]:
    """One segment for each stretch of equal versions."""
    segments, start = [], 0
    for version, run in groupby(versions):
        end = start + sum(1 for _ in run)
        segments.append(Segment(start, end, version.incarnation, version.number))
        start = end
    return tuple(segments)


class Sampler(ContinuousBatchingLogitsProcessorList):  # type: ignore[misc]
    """Stands where continuous batching keeps its logits processors, which is the one place that
    sees both the requests of a step and their logits. It draws the tokens itself and hands back
    scores whose argmax is the drawn token, so the batch's own greedy choice takes it.

    `version` stamps the tokens; `on_failed` is called from the decode thread with a sequence whose
    logits are not finite (its token is not recorded)."""

    def __init__(self, on_failed: Callable[[Sequence], None]) -> None:
        super().__init__(LogitsProcessorList())
        self.do_processing = True
        self.version: Version | None = None
        self.num_tokens = 0
        self.sequences: dict[str, Sequence] = {}
        self._on_failed = on_failed
        self._step: list[Sequence | None] = []

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: Tensor) -> Tensor:
        self._step = [
            self.sequences.get(request.state.request_id)
            for request in requests_in_batch
            if request.has_new_token
        ]
        return arg_storage

    def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
        # Requests in the middle of their prefill get no token, but a row of filler at the end.
        rows = [i for i, sequence in enumerate(self._step) if sequence is not None]
        sequences = [sequence for sequence in self._step if sequence is not None]
        if not rows:
            return scores
        version = self.version
        if version is None:
            raise RuntimeError("a decode step ran while the engine held no whole version")
        logits_BV = scores[rows]
        token_ids_B, logprobs_B = draw(
            logits_BV,
            [s.sampling for s in sequences],
            [s.seed for s in sequences],
            [s.length for s in sequences],
        )
        for sequence, token_id, logprob in zip(
            sequences, token_ids_B.tolist(), logprobs_B.tolist(), strict=True
        ):
            if logprob - logprob != 0:  # NaN or infinite
                self._on_failed(sequence)
            else:
                self.num_tokens += sequence.append(token_id, logprob, version)
        chosen = torch.zeros_like(scores)
        chosen[rows, token_ids_B] = 1
        return chosen


def draw(
    logits_BV: Tensor, samplings: list[Sampling], seeds: list[int], positions: list[int]
) -> tuple[Tensor, Tensor]:
    """One token a row: (ids [B] int64, log-probs [B] float32). The log-prob is
    log-softmax(logits/temperature) before top-p, NaN where the logits are not finite; temperature 0
    takes the most likely token and its log-prob at temperature 1."""
    device = logits_BV.device
    greedy = [s.temperature == 0 for s in samplings]
    temperatures_B = torch.tensor(
        [s.temperature or 1.0 for s in samplings], dtype=torch.float32, device=device
    )
    logprobs_BV = torch.log_softmax(logits_BV.float() / temperatures_B[:, None], dim=-1)
    scores_BV = logprobs_BV
    if any(s.top_p < 1 for s in samplings):
        scores_BV = scores_BV.masked_fill(_outside_top_p(logprobs_BV, samplings), -torch.inf)
    if not all(greedy):
        noise_BV = gumbel(seeds, positions, logits_BV.shape[-1], device)
        noise_BV[torch.tensor(greedy, device=device)] = 0
        scores_BV = scores_BV + noise_BV
    token_ids_B = scores_BV.argmax(dim=-1)
    return token_ids_B, logprobs_BV.gather(1, token_ids_B[:, None])[:, 0]


def _outside_top_p(logprobs_BV: Tensor, samplings: list[Sampling]) -> Tensor:
    """True for tokens outside the smallest set of most likely tokens whose probability reaches
    top-p (Holtzman et al. 2020); the most likely one always stays inside."""
    device = logprobs_BV.device
    top_p_B = torch.tensor([s.top_p for s in samplings], dtype=torch.float32, device=device)
    sorted_BV, order_BV = logprobs_BV.exp().sort(dim=-1, descending=True)
    before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
    outside_BV = (before_BV >= top_p_B[:, None]) & (top_p_B[:, None] < 1)
    outside_BV[:, 0] = False
    return torch.zeros_like(outside_BV).scatter(1, order_BV, outside_BV)


_MASK_32 = (1 << 32) - 1


def gumbel(seeds: list[int], positions: list[int], size: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise [B, size], a pure function of (seed, position, column)."""
    keys = [
        _mix_int(_mix_int(seed) ^ position) for seed, position in zip(seeds, positions, strict=True)
    ]
    keys_B = torch.tensor(keys, dtype=torch.int64, device=device)
    columns_V = torch.arange(size, dtype=torch.int64, device=device)
    bits_BV = _mix(_mix(keys_B[:, None] + columns_V * 0x9E3779B1) ^ (keys_B[:, None] >> 7))
    # 31 bits keep float32's relative precision for small u, where the winners of the draw lie.
    uniform_BV = ((bits_BV >> 1).float() + 0.5) * 2.0**-31
    return -torch.log(-torch.log1p(-uniform_BV))


def _mix(x: Tensor) -> Tensor:
    """A 32-bit finalizer with full avalanche ("lowbias32", C. Wellons, hash-prospector), on
    int64."""
    x = x & _MASK_32
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK_32
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK_32
    return x ^ (x >> 15)


def _mix_int(x: int) -> int:
    """A 62-bit key from any integer (splitmix64, Steele et al. 2014)."""
    return mix64((x + 0x9E3779B97F4A7C15) & ((1 << 64) - 1)) >> 2
