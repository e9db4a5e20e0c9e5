"""Sampling, on logits made by hand, and what becomes of a sequence's tokens."""

from __future__ import annotations

import torch

from connectors.engines.sampling import draw, uniform
from connectors.engines.sequence import Sequence, run_lengths
from connectors.engines.types import Sampling
from connectors.records import Segment, Version

SIZE = 12


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, SIZE, generator=torch.Generator().manual_seed(3)) * 2


def test_tokens_come_as_often_as_their_probability_says() -> None:
    logits, count = rows(1), 20_000
    ids, _ = draw(
        logits.expand(count, -1),
        [0.7] * count,
        [1.0] * count,
        [uniform(k, 5) for k in range(count)],
    )
    found = torch.bincount(ids, minlength=SIZE) / count
    expected = (logits[0] / 0.7).softmax(-1)
    deviation = (expected * (1 - expected) / count).sqrt()
    assert bool(((found - expected).abs() <= 5 * deviation + 1e-6).all())


def test_top_p_keeps_the_most_likely_tokens_in_their_proportions() -> None:
    logits, count, top_p = rows(1), 20_000, 0.6
    ids, _ = draw(
        logits.expand(count, -1),
        [1.0] * count,
        [top_p] * count,
        [uniform(k, 9) for k in range(count)],
    )
    probs, order = logits[0].softmax(-1).sort(descending=True)
    kept = int((probs.cumsum(0) < top_p).sum()) + 1  # the smallest set that reaches it
    assert 1 < kept < SIZE
    found = torch.bincount(ids, minlength=SIZE)[order] / count
    assert float(found[kept:].sum()) == 0
    expected = probs[:kept] / probs[:kept].sum()
    assert torch.allclose(found[:kept], expected, atol=0.02)


def test_the_log_prob_is_before_top_p_at_the_temperature_and_at_1_when_greedy() -> None:
    logits = rows(6)
    temperatures, top_ps = [1.0, 0.6, 1.7, 0.0, 1.7, 0.0], [1.0, 0.9, 0.5, 1.0, 1e-6, 0.5]
    ids, logprobs = draw(logits, temperatures, top_ps, [uniform(1, k) for k in range(6)])
    for i, temperature in enumerate(temperatures):
        own = (logits[i] / (temperature or 1.0)).log_softmax(-1)
        assert abs(float(own[ids[i]] - logprobs[i])) < 1e-6
    most_likely = logits.argmax(-1)
    assert [i for i in (3, 4, 5) if ids[i] != most_likely[i]] == []


def test_a_token_does_not_depend_on_the_rows_beside_it() -> None:
    logits = rows(5)
    temperatures, top_ps = [1.0, 0.0, 1.3, 0.8, 1.0], [1.0, 1.0, 0.9, 0.5, 1.0]
    uniforms = [uniform(7, k) for k in range(5)]
    together, _ = draw(logits, temperatures, top_ps, uniforms)
    for i in range(5):
        alone, _ = draw(logits[i : i + 1], [temperatures[i]], [top_ps[i]], [uniforms[i]])
        assert alone[0] == together[i]


def test_logits_that_are_not_finite_give_a_log_prob_that_is_not() -> None:
    logits = rows(3)
    logits[1, 4] = torch.nan
    logits[2] = torch.inf
    _, logprobs = draw(logits, [1.0] * 3, [1.0, 1.0, 0.5], [0.5] * 3)
    assert logprobs.isfinite().tolist() == [True, False, False]


def test_numbers_differ_by_seed_and_by_position_and_fill_the_unit_interval() -> None:
    numbers = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert len(set(numbers)) == 10_000
    assert 0 < min(numbers) < 0.001
    assert 0.999 < max(numbers) < 1
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.01


def test_huge_and_negative_seeds_give_numbers_too() -> None:
    numbers = [uniform(seed, 3) for seed in (2**80 + 1, -5, 2**63)]
    assert all(0 < number < 1 for number in numbers)
    assert len(set(numbers)) == 3


def test_numbers_of_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    numbers = torch.tensor([[uniform(s, p) for p in range(200)] for s in range(200)])
    for axis in (0, 1):
        pair = torch.stack([numbers.roll(1, axis).flatten(), numbers.flatten()])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.02


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
