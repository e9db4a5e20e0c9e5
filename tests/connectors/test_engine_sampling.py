"""The draw of the `hf` engine, on logits made by hand."""

from __future__ import annotations

import math

import pytest
import torch

from connectors.engines.sampling import Sequence, draw, gumbel, run_lengths
from connectors.engines.types import Sampling
from connectors.records import Segment, Version

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])


def frequencies(sampling: Sampling, *, num_draws: int = 40_000) -> torch.Tensor:
    ids, _ = draw(
        LOGITS.repeat(num_draws, 1),
        [sampling] * num_draws,
        list(range(num_draws)),
        [7] * num_draws,
    )
    return torch.bincount(ids, minlength=len(LOGITS)) / num_draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_of_logits_over_temperature(temperature: float) -> None:
    expected = torch.softmax(LOGITS / temperature, dim=0)
    # Five standard deviations of a frequency of 40,000 draws.
    margin = 5 * (expected * (1 - expected) / 40_000).sqrt() + 1e-4
    assert ((frequencies(Sampling(temperature=temperature)) - expected).abs() < margin).all()


def test_top_p_draws_only_from_the_smallest_set_that_reaches_it() -> None:
    # softmax(LOGITS) = 0.641, 0.236, 0.087, 0.032, 0.004: two tokens reach 0.8.
    found = frequencies(Sampling(top_p=0.8))
    assert found[2:].sum() == 0
    assert found[0] == pytest.approx(0.641 / (0.641 + 0.236), abs=0.01)


def test_top_p_keeps_the_most_likely_token_however_small_it_is() -> None:
    assert frequencies(Sampling(top_p=1e-6), num_draws=100)[0] == 1


def test_log_probs_are_those_before_top_p_at_the_temperature() -> None:
    sampling = Sampling(temperature=0.7, top_p=0.5)
    ids, logprobs = draw(LOGITS[None], [sampling], [3], [0])
    assert logprobs[0] == pytest.approx(torch.log_softmax(LOGITS / 0.7, 0)[ids[0]].item())


def test_temperature_zero_takes_the_most_likely_token_at_temperature_one() -> None:
    ids, logprobs = draw(LOGITS[None], [Sampling(temperature=0)], [3], [0])
    assert ids.tolist() == [0]
    assert logprobs[0] == pytest.approx(torch.log_softmax(LOGITS, 0)[0].item())


def test_a_draw_depends_on_its_own_row_only() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 50, generator=generator)
    samplings = [Sampling(temperature=t, top_p=p) for t in (0, 0.5, 1, 2) for p in (0.6, 1.0)]
    seeds, positions = list(range(8)), list(range(10, 18))
    ids, logprobs = draw(logits, samplings, seeds, positions)
    for k in range(8):
        alone = draw(
            logits[k : k + 1], samplings[k : k + 1], seeds[k : k + 1], positions[k : k + 1]
        )
        assert alone[0].item() == ids[k]
        assert alone[1].item() == logprobs[k]


def test_a_row_that_is_not_finite_has_no_log_prob_and_leaves_the_others_alone() -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 2] = math.nan
    ids, logprobs = draw(logits, [Sampling()] * 3, [1, 2, 3], [0, 0, 0])
    assert math.isnan(logprobs[1])
    assert torch.isfinite(logprobs[[0, 2]]).all()
    assert ids[0] == draw(LOGITS[None], [Sampling()], [1], [0])[0]


def test_noise_is_gumbel_and_uncorrelated_over_seeds_positions_and_tokens() -> None:
    seeds, positions = zip(*((s, p) for s in range(100) for p in range(100)), strict=True)
    noise = gumbel(list(seeds), list(positions), 20, CPU).view(100, 100, 20).double()
    assert noise.isfinite().all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.02)  # Euler's constant
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.05)
    for axis in range(3):
        a, b = noise.roll(1, axis).flatten(), noise.flatten()
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.01


def test_huge_and_negative_seeds_give_noise_too() -> None:
    noise = gumbel([2**80, -5, 2**63], [0, 1, 2], 10, CPU)
    assert noise.isfinite().all()
    assert len({tuple(row) for row in noise.tolist()}) == 3


def test_versions_become_one_segment_for_each_stretch() -> None:
    a, b = Version(0, 1), Version(0, 2)
    assert run_lengths([a, a, b]) == (Segment(0, 2, 0, 1), Segment(2, 3, 0, 2))
    assert run_lengths([]) == ()


def test_a_closed_sequence_takes_no_more_tokens() -> None:
    sequence = Sequence(prompt_ids=(1,), sampling=Sampling(), seed=0, max_tokens=9)
    sequence.append(5, -0.5, Version(0, 1))
    partial = sequence.complete("cancelled")
    sequence.append(6, -0.5, Version(0, 1))
    assert partial.token_ids == (5,)
    assert sequence.token_ids == [5]
