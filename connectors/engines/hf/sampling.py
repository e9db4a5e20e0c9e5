"""Sampling for the `hf` engine: logits of one decode step in; a token, its log-prob and its version
out, written straight into the sequence they belong to.

Shape legend: B sequences that get a token in this step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.logits_process import LogitsProcessorList

from connectors.engines.sampling import draw, uniform
from connectors.engines.sequence import Sequence
from connectors.records import Version


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
            [s.sampling.temperature for s in sequences],
            [s.sampling.top_p for s in sequences],
            [uniform(s.seed, s.length) for s in sequences],
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
