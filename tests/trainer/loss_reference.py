"""The policy loss one token after the other, in Python floats: what the tests compare with.

Nothing is clamped here: it is meant for log-ratios of ordinary size.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def sample(seed: int, shape: tuple[int, int] = (5, 9)) -> dict[str, Any]:
    """Log-probs of three policies close enough that some tokens are clipped, capped or rejected and
    some are not; masks have holes, and each row has one trained token at least."""
    rng = np.random.default_rng(seed)
    prox = -rng.exponential(size=shape) - 0.8
    mask = rng.integers(0, 2, shape)
    mask[np.arange(shape[0]), rng.integers(0, shape[1], shape[0])] = 1
    return {
        "logprobs": np.minimum(prox + rng.normal(scale=0.3, size=shape), -1e-3),
        "prox_logprobs": prox,
        "behaviour_logprobs": prox + rng.normal(scale=0.4, size=shape),
        "advantages": rng.normal(size=shape),
        "mask": mask,
    }


def row_weight(row: int, mask: Any, aggregation: str, groups: Any, samples: Any, c: float) -> float:
    """By the definition of each aggregation, counted anew for each row."""
    tokens = [int(sum(1 for m in r if m)) for r in mask]
    of = [(int(g), int(s)) for g, s in zip(groups, samples, strict=True)]
    trained_samples = {of[i] for i in range(len(tokens)) if tokens[i]}
    trained_prompts = {of[i][0] for i in range(len(tokens)) if tokens[i]}
    in_sample = sum(n for n, key in zip(tokens, of, strict=True) if key == of[row])
    in_prompt = sum(n for n, key in zip(tokens, of, strict=True) if key[0] == of[row][0])
    if not in_sample:
        return 0.0
    return {
        "token-mean": lambda: 1 / sum(tokens),
        "seq-mean-token-mean": lambda: 1 / len(trained_samples) / in_sample,
        "seq-mean-token-sum": lambda: 1 / len(trained_samples),
        "constant-norm": lambda: 1 / len(trained_samples) / c,
        "prompt-mean": lambda: 1 / len(trained_prompts) / in_prompt,
    }[aggregation]()


def at_level(values: list[float], level: str) -> list[float]:
    """`values` of a row's trained tokens, each replaced by what the level makes of all of them."""
    if level == "token":
        return values
    total = sum(values)
    return [total if level == "sequence" else total / len(values)] * len(values)


def weights(correction: str, gaps: list[float], level: str, low: float, cap: float) -> list[float]:
    ratios = [math.exp(g) for g in at_level(gaps, level)]
    inside = [low <= r <= cap for r in ratios]
    return {
        "none": lambda: [1.0] * len(gaps),
        "tis": lambda: [min(r, cap) for r in ratios],
        "icepop": lambda: [r if ok else 0.0 for r, ok in zip(ratios, inside, strict=True)],
        "mis": lambda: [math.exp(g) if ok else 0.0 for g, ok in zip(gaps, inside, strict=True)],
    }[correction]()


def keeps(rejection: str, gaps: list[float], level: str, low: float, high: float) -> list[bool]:
    if rejection == "none":
        return [True] * len(gaps)
    if rejection == "k1":
        return [low <= math.exp(g) <= high for g in at_level(gaps, level)]
    divergences = [g * g / 2 if rejection == "k2" else math.exp(g) - 1 - g for g in gaps]
    return [d <= high for d in at_level(divergences, level)]


def surrogate(
    name: str, current: list[float], prox: list[float], advantages: list[float], **p: Any
) -> list[float]:
    ratios = [math.exp(c - q) for c, q in zip(current, prox, strict=True)]
    if name == "gspo":
        mean = sum(c - q for c, q in zip(current, prox, strict=True)) / len(current)
        ratios = [math.exp(mean)] * len(current)
    losses = []
    for ratio, c, q, a in zip(ratios, current, prox, advantages, strict=True):
        if name in ("reinforce", "imitation"):
            losses.append(-a * c)
        elif name in ("ppo", "gspo"):
            low, high = p.get("clip_low", 0.2), p.get("clip_high", 0.2)
            gain = min(a * ratio, a * min(max(ratio, 1 - low), 1 + high))
            if a < 0 and p.get("dual_clip") is not None:
                gain = max(gain, a * p["dual_clip"])
            losses.append(-gain)
        elif name == "cispo":
            low, high = p.get("clip_low", 1.0), p.get("clip_high", 4.0)
            losses.append(-a * min(max(ratio, 1 - low), 1 + high) * c)
        elif name == "dppo":
            now, was = math.exp(c), math.exp(q)
            distance = abs(now - was)
            if p.get("divergence") == "kl":
                distance = was * math.log(was / now)
                distance += (1 - was) * math.log((1 - was) / (1 - now))
            out = a > 0 and now > was and distance > p.get("limit_high", 0.2)
            out = out or (a < 0 and now < was and distance > p.get("limit_low", 0.2))
            losses.append(0.0 if out else -a * min(ratio, p.get("ratio_cap", 20.0)) * c)
        else:
            raise AssertionError(name)
    return losses


def kl_value(kl: str, d: float) -> float:
    if kl == "k1":
        return d
    if kl == "k2":
        return d * d / 2
    value = math.exp(-d) - 1 + d
    return min(value, 10.0) if kl == "low-variance" else value


def policy_loss(
    name: str,
    given: dict[str, Any],
    aggregation: str = "token-mean",
    *,
    groups: Any = None,
    samples: Any = None,
    constant: float = 1.0,
    correction: str = "tis",
    correction_level: str = "token",
    correction_low: float = 0.5,
    correction_cap: float = 2.0,
    rejection: str = "none",
    rejection_level: str = "sequence",
    rejection_low: float = 0.5,
    rejection_high: float = 2.0,
    reference_logprobs: Any = None,
    kl: str = "k3",
    kl_coefficient: float = 0.0,
    entropy: Any = None,
    entropy_coefficient: float = 0.0,
    **parameters: Any,
) -> float:
    mask, total = given["mask"], 0.0
    num_rows = len(mask)
    groups = [0] * num_rows if groups is None else groups
    samples = range(num_rows) if samples is None else samples
    for row in range(num_rows):
        at = [t for t in range(len(mask[row])) if mask[row][t]]
        if not at:
            continue
        current, prox, behaviour, advantages = (
            [float(given[key][row][t]) for t in at]
            for key in ("logprobs", "prox_logprobs", "behaviour_logprobs", "advantages")
        )
        gaps = [q - b for q, b in zip(prox, behaviour, strict=True)]
        w = weights(correction, gaps, correction_level, correction_low, correction_cap)
        keep = keeps(rejection, gaps, rejection_level, rejection_low, rejection_high)
        losses = surrogate(name, current, prox, advantages, **parameters)
        share = row_weight(row, mask, aggregation, groups, samples, constant)
        for i, t in enumerate(at):
            loss = w[i] * losses[i]
            if kl_coefficient:
                loss += kl_coefficient * kl_value(kl, current[i] - reference_logprobs[row][t])
            if entropy_coefficient:
                loss -= entropy_coefficient * entropy[row][t]
            total += share * loss * keep[i]
    return total
