"""How our sampling stands in vLLM's place; no vLLM is needed to check it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from connectors.engines.vllm.sampling import (
    accepted,
    logprobs_before_top_p,
    verified_logprobs_before_top_p,
)


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 12, generator=torch.Generator().manual_seed(3)) * 2


@pytest.mark.parametrize(
    ("drawn", "drafts", "count"),
    [([5], [], 1), ([5, 6, 7], [5, 6], 3), ([5, 6, 7], [5, 9], 2), ([4, 6, 7], [5, 6], 1)],
)
def test_drawn_tokens_count_while_the_draft_is_right(
    drawn: list[int], drafts: list[int], count: int
) -> None:
    assert accepted(drawn, drafts) == count


class SecondRunner:
    """Stands for the parts of vLLM's second model runner that we wrap: top-p masks in place."""

    def apply_sampling_params(
        self, logits: torch.Tensor, *_: Any, skip_top_k_top_p: bool = False
    ) -> torch.Tensor:
        scaled = logits / 2
        return scaled if skip_top_k_top_p else scaled.masked_fill_(scaled < 0, -torch.inf)

    def sample_random(self, processed: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        processed.masked_fill_(processed < 0, -torch.inf)
        return processed.argmax(-1), processed


def test_the_second_runner_gives_log_probs_of_the_logits_before_top_p() -> None:
    runner, logits = SecondRunner(), rows(4)
    wrapped = logprobs_before_top_p(SecondRunner.sample_random)
    sampled, kept = wrapped(runner, logits.clone(), None, None, None, None, object(), False)
    assert sampled.tolist() == logits.argmax(-1).tolist()
    assert torch.equal(kept, logits)


def test_drafts_checked_by_the_second_runner_have_log_probs_before_top_p_too() -> None:
    class Verifier:
        sampler = SecondRunner()

    def verify(self: Any, logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, str, str]:
        return self.sampler.apply_sampling_params(logits), "sampled", "counts"

    logits = rows(4)
    kept, sampled, counts = verified_logprobs_before_top_p(verify)(Verifier(), logits, *[None] * 10)
    assert (sampled, counts) == ("sampled", "counts")
    assert torch.equal(kept, logits / 2)
