"""Advantage estimators: the value of each unit of credit enters, its advantage leaves.

A unit is what one number is given to: a sample, a turn of a sample, or, for the estimators that are
`per_token` (connectors/algorithms.py), a trained token. `trainer.advantages` makes the units and
spreads the answer over the tokens. All is float64, a pure function of `Units`, and finite.

In a group whose values are all equal every advantage relative to the group is exactly 0: the mean
of three times 0.1 is not 0.1 in floating point, and over a small epsilon that would be a signal.
What a group of one gives is said at each estimator; where it says "refused", `advantage` refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WHITEN_EPSILON: Final = 1e-8


@dataclass(frozen=True, kw_only=True, slots=True)
class Units:
    """U units of credit.

    values      float64 [U], the reward or return of each
    groups      int64 [U], units of one prompt share a number
    num_tokens  int64 [U], trained tokens of each
    baselines   float64 [U], given from outside; 0 where none were
    """

    values: Floats
    groups: Ints
    num_tokens: Ints
    baselines: Floats


def grpo(units: Units, *, epsilon: float = 1e-6) -> Floats:
    """(R - mean) / (std + epsilon) within the group, std of a sample (n - 1): DeepSeekMath
    (arXiv:2402.03300) and its common implementations. A group of one is refused."""
    return _within(units, lambda values: _over_std(_centred(values), values, epsilon))


def dr_grpo(units: Units) -> Floats:
    """R - mean within the group: Dr. GRPO (arXiv:2503.20783). Its other half is the aggregation by
    a constant. A group of one is refused."""
    return _within(units, _centred)


def grpo_passk(units: Units, *, epsilon: float = 1e-6, normalise: bool = True) -> Floats:
    """The group's best gets its lead over the second best, (R_1 - R_2) / (std + epsilon), or
    R_1 - R_2 without `normalise`; all others 0: "Optimizing language models for inference time
    objectives" (arXiv:2503.19595). Two that share the top get 0. A group of one is refused."""

    def lead(values: Floats) -> Floats:
        result = np.zeros_like(values)
        second, best = np.argsort(values)[-2:]
        result[best] = values[best] - values[second]
        return _over_std(result, values, epsilon) if normalise else result

    return _within(units, lead)


def rloo(units: Units) -> Floats:
    """R - mean of the others, as n / (n - 1) * (R - mean): RLOO (arXiv:2402.14740). A group of one
    is refused: it has no others."""
    return _within(units, lambda values: _centred(values) * (len(values) / (len(values) - 1)))


def leave_one_out(units: Units, *, epsilon: float = 1e-6) -> Floats:
    """(R - mean of the others) / (std of the others + epsilon), std of a sample: RLOO's baseline
    with GRPO's scale, as NeMo-RL computes it. Where the others do not differ (so always in a group
    of two) the difference stays unscaled. A group of one is refused."""

    def against_others(values: Floats) -> Floats:
        num = len(values)
        others = np.tile(values, (num, 1))[~np.eye(num, dtype=bool)].reshape(num, num - 1)
        gains: Floats = values - others[:, 0]
        differ = others.min(1) < others.max(1)
        if differ.any():
            scaled = (values - others.mean(1)) / (others.std(1, ddof=1) + epsilon)
            gains = np.where(differ, scaled, gains)
        return gains

    return _within(units, against_others)


def maxrl(units: Units, *, epsilon: float = 1e-6) -> Floats:
    """(R - mean) / (mean + epsilon) within the group: MaxRL (arXiv:2602.02710), whose gradient
    tends to that of the likelihood of success. 0 where nothing succeeded. Defined for rewards of at
    least 0; less is refused, as is a group of one."""
    if (units.values < 0).any():
        raise ValueError(f"maxrl needs rewards of at least 0, got {units.values.min()}")
    return _within(units, lambda values: _centred(values) / (values.mean() + epsilon))


def opo(units: Units) -> Floats:
    """R - sum(L R) / sum(L) within the group, L trained tokens: the variance-optimal baseline under
    on-policy sampling, OPO (arXiv:2505.23585). A group of one has no baseline and keeps R."""
    result = units.values.copy()
    for rows in _groups(units):
        values, lengths = units.values[rows], units.num_tokens[rows]
        if values.min() == values.max() and len(rows) > 1:
            result[rows] = 0.0
        elif len(rows) > 1 and lengths.any():  # without a trained token nothing is learnt from it
            result[rows] = values - np.average(values, weights=lengths)
    return result


def gpg(units: Units, *, f_norm: float = 1.0) -> Floats:
    """alpha (R - mean of the group) / f_norm, alpha = units of the step / max(1, those of R != 0):
    GPG (arXiv:2504.02546), which trains on it with the loss `reinforce`. A group of one has no
    baseline and gives alpha R / f_norm."""
    alpha = len(units.values) / max(1, int(np.count_nonzero(units.values)))
    return alpha / f_norm * _within(units, _centred_unless_alone)


def reinforce_pp(units: Units) -> Floats:
    """Returns of the trained tokens, whitened over the step: REINFORCE++ (arXiv:2501.03262). The
    units are tokens, `gamma` has gone into their returns. Groups play no part."""
    return whiten(units.values, units.num_tokens)


def reinforce_pp_baseline(units: Units) -> Floats:
    """R - mean of the group, whitened over the step's trained tokens: REINFORCE++ with a baseline
    (arXiv:2501.03262). A group of one has no baseline and keeps R before whitening."""
    return whiten(_within(units, _centred_unless_alone), units.num_tokens)


def spo(units: Units) -> Floats:
    """R - baseline, normalised over the step's units: SPO (arXiv:2509.13232), whose baseline is a
    tracked value of the prompt (operators/tracker.py). Groups play no part."""
    if len(units.values) < 2:
        raise ValueError("spo normalises over the step's samples and needs at least two, got 1")
    gains = units.values - units.baselines
    return _over_std(_centred(gains), gains, WHITEN_EPSILON)


ESTIMATORS: Final[Mapping[str, Callable[..., Floats]]] = {
    "grpo": grpo,
    "dr-grpo": dr_grpo,
    "grpo-passk": grpo_passk,
    "rloo": rloo,
    "leave-one-out": leave_one_out,
    "maxrl": maxrl,
    "opo": opo,
    "gpg": gpg,
    "reinforce++": reinforce_pp,
    "reinforce++-baseline": reinforce_pp_baseline,
    "spo": spo,
}


def whiten(values: Floats, counts: Ints) -> Floats:
    """(x - mean) / sqrt(var + 1e-8) over all tokens, the value i being that of counts[i] of them;
    var of a sample (N - 1). Exactly 0 where all are equal; ValueError for fewer than two tokens."""
    num_tokens = int(counts.sum())
    if num_tokens < 2:
        raise ValueError(f"whitening needs at least two trained tokens, got {num_tokens}")
    counted = values[counts > 0]
    if counted.min() == counted.max():
        return np.zeros_like(values)
    centred = values - np.average(values, weights=counts)
    variance = (counts * centred**2).sum() / (num_tokens - 1)
    whitened: Floats = centred / np.sqrt(variance + WHITEN_EPSILON)
    return whitened


def _groups(units: Units) -> Iterator[Ints]:
    """The indices of each group's units."""
    order = np.argsort(units.groups, kind="stable")
    starts = np.flatnonzero(np.diff(units.groups[order])) + 1
    yield from (rows for rows in np.split(order, starts) if len(rows))


def _within(units: Units, advantage: Callable[[Floats], Floats]) -> Floats:
    result = np.zeros_like(units.values)
    for rows in _groups(units):
        result[rows] = advantage(units.values[rows])
    return result


def _centred(values: Floats) -> Floats:
    return values - values.mean() if values.min() < values.max() else np.zeros_like(values)


def _centred_unless_alone(values: Floats) -> Floats:
    return _centred(values) if len(values) > 1 else values


def _over_std(result: Floats, values: Floats, epsilon: float) -> Floats:
    """`result` over the standard deviation of `values`; it is 0 where they are all equal."""
    if values.min() == values.max():
        return np.zeros_like(result)
    scaled: Floats = result / (values.std(ddof=1) + epsilon)
    return scaled
