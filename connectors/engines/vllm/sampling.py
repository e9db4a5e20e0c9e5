"""Sampling in vLLM's processes, as Headwater means it: the log-prob of a token is
log-softmax(logits/temperature) before top-p, and a token is a function of (logits, sampling
settings, seed, position in the sequence).

vLLM's own sampler gives log-probs after top-p, and draws from a generator per request whose state
depends on how a prompt was cut into parts (on CPU such a cut kills the engine: its generators
cannot be rewound). It has two model runners. For the first, which CPUs use, `install` replaces the
sampler and the check of drafted tokens by `draw`; the second draws by seed and position already, so
only its log-probs are taken earlier.

Shape legend: R rows (a sequence's next token, or a drafted position of it), V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from connectors.engines.sampling import draw, uniform

_REJECTED = -1  # vLLM's mark for a place without a token


class Stream:
    """One request's random numbers. It stands where vLLM keeps a torch.Generator, which follows the
    request through the batch."""

    def __init__(self, request: Any) -> None:
        self._request = request

    @property
    def sampling(self) -> Any:
        return self._request.sampling_params

    def uniform(self, ahead: int) -> float:
        """For the token `ahead` places after the next one."""
        return uniform(self.sampling.seed or 0, self._request.num_tokens + ahead)

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Rewinds after a token that is thrown away: nothing was consumed for it."""


def _draw(logits_RV: Tensor, rows: list[tuple[Stream, int]]) -> tuple[Tensor, Tensor]:
    return draw(
        logits_RV,
        [stream.sampling.temperature for stream, _ in rows],
        [stream.sampling.top_p for stream, _ in rows],
        [stream.uniform(ahead) for stream, ahead in rows],
    )


def accepted(ids: list[int], drafts: list[int]) -> int:
    """How many of the drawn tokens (one a drafted position, and one more) count: those drawn where
    the draft is right so far. Exactly what would be drawn one by one, and for a draft without
    probabilities as likely to accept it as rejection sampling is."""
    wrong = (i for i, draft in enumerate(drafts) if ids[i] != draft)
    return next(wrong, len(drafts)) + 1


# --------------------------------------------------------------------------------- into vLLM
def install() -> None:
    """Replaces vLLM's sampling in this process. RuntimeError when it is not the vLLM we know."""
    from vllm.triton_utils import HAS_TRITON

    _install_first()
    if HAS_TRITON:  # without it the second runner cannot even be chosen
        _install_second()


def _replace(owner: Any, name: str, known: tuple[str, ...], by: Callable[[Any], Any]) -> None:
    """owner.name = by(owner.name), once, if it takes the `known` parameters."""
    before = getattr(owner, name)
    if getattr(before, "of_headwater", False):
        return
    found = tuple(inspect.signature(before).parameters)[: len(known)]
    if found != known:
        raise RuntimeError(f"vLLM's {owner.__qualname__}.{name} takes {found}, not {known}")
    after = by(before)
    after.of_headwater = True
    setattr(owner, name, after)


def _install_first() -> None:
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    def output(ids: Tensor, logprobs: Tensor) -> Any:
        """Both [B, places]."""
        flat = ids.reshape(-1, 1)
        ranks = torch.zeros(len(flat), dtype=torch.int64, device=ids.device)  # nobody asks for them
        tensors = LogprobsTensors(flat.to(torch.int32), logprobs.reshape(-1, 1), ranks)
        return SamplerOutput(sampled_token_ids=ids.to(torch.int32), logprobs_tensors=tensors)

    def streams(metadata: Any, count: int) -> list[Stream]:
        """None for the rows of vLLM's warm-up, which belong to no request."""
        found = [metadata.generators.get(i) for i in range(count)]
        return [s for s in found if isinstance(s, Stream)]

    def begun(before: Any) -> Any:
        def __post_init__(self: Any) -> None:
            before(self)
            if self.sampling_params is not None:
                self.generator = Stream(self)

        return __post_init__

    def sampled(before: Any) -> Any:
        def forward(
            self: Any, logits: Tensor, sampling_metadata: Any, *more: Any, **kw: Any
        ) -> Any:
            found = streams(sampling_metadata, len(logits))
            if len(found) < len(logits):
                return before(self, logits, sampling_metadata, *more, **kw)
            ids_R, logprobs_R = _draw(logits, [(stream, 0) for stream in found])
            return output(ids_R[:, None], logprobs_R[:, None])

        return forward

    def verified(before: Any) -> Any:
        def forward(
            self: Any, metadata: Any, draft_probs: Any, logits: Tensor, sampling_metadata: Any
        ) -> Any:
            counts = metadata.num_draft_tokens
            found = streams(sampling_metadata, len(counts))
            if len(found) < len(counts):
                return before(self, metadata, draft_probs, logits, sampling_metadata)
            # A request's rows lie together: one for each drafted token, and one for what follows.
            rows = [(found[i], j) for i, count in enumerate(counts) for j in range(count + 1)]
            ids_R, logprobs_R = _draw(logits, rows)
            size = (len(counts), metadata.max_spec_len + 1)
            ids = torch.full(size, _REJECTED, dtype=torch.int64, device=logits.device)
            logprobs = torch.zeros(size, device=logits.device)
            drafts, row, draft = metadata.draft_token_ids.tolist(), 0, 0
            for i, count in enumerate(counts):
                own = ids_R[row : row + count + 1]
                kept = accepted(own.tolist(), drafts[draft : draft + count])
                ids[i, :kept], logprobs[i, :kept] = own[:kept], logprobs_R[row : row + kept]
                row, draft = row + count + 1, draft + count
            return output(ids, logprobs)

        return forward

    _replace(CachedRequestState, "__post_init__", ("self",), begun)
    _replace(Sampler, "forward", ("self", "logits", "sampling_metadata"), sampled)
    known = ("self", "metadata", "draft_probs", "logits", "sampling_metadata")
    _replace(RejectionSampler, "forward", known, verified)


def _install_second() -> None:
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    _replace(Sampler, "_sample_random", _SAMPLE_RANDOM, logprobs_before_top_p)
    _replace(RejectionSampler, "_verify", _VERIFY, verified_logprobs_before_top_p)


_SAMPLE_RANDOM = (
    "self", "processed_logits", "expanded_idx_mapping", "idx_mapping_np", "pos", "top_k", "top_p",
)  # fmt: skip
_VERIFY = (
    "self", "logits", "draft_logits", "draft_sampled", "pos", "cu_num_logits", "idx_mapping",
    "idx_mapping_np", "expanded_idx_mapping", "expanded_local_pos", "seq_lens_upper_bound_np",
)  # fmt: skip


def logprobs_before_top_p(before: Any) -> Any:
    """Around Sampler._sample_random: (sampled, logits that log-probs are taken of)."""

    def _sample_random(self: Any, processed_logits: Tensor, *arguments: Any) -> Any:
        top_k, top_p = arguments[3], arguments[4]
        kept = processed_logits
        if top_k is not None or top_p is not None:
            kept = processed_logits.clone()  # top-p masks in place
        sampled, _ = before(self, processed_logits, *arguments)
        return sampled, kept

    return _sample_random


def verified_logprobs_before_top_p(before: Any) -> Any:
    """Around RejectionSampler._verify: (logits that log-probs are taken of, sampled, counts)."""

    def _verify(
        self: Any,
        logits: Tensor,
        draft_logits: Any,
        draft_sampled: Tensor,
        pos: Tensor,
        cu_num_logits: Tensor,
        idx_mapping: Tensor,
        idx_mapping_np: Any,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        seq_lens_upper_bound_np: Any,
        *more: Any,
    ) -> Any:
        _, sampled, counts = before(
            self, logits, draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping,
            idx_mapping_np, expanded_idx_mapping, expanded_local_pos, seq_lens_upper_bound_np,
            *more,
        )  # fmt: skip
        # Pure but for top-p: it copies the logits before it changes them.
        kept = self.sampler.apply_sampling_params(
            logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, draft_sampled,
            expanded_local_pos, seq_lens_upper_bound_np, skip_top_k_top_p=True,
        )  # fmt: skip
        return kept, sampled, counts

    return _verify
