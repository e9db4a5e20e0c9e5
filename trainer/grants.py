"""From a policy's credits to offset limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from operators.staleness.types import Ledger, StalenessPolicy


def group_credits(policy: StalenessPolicy[Any], state: Any, ledger: Ledger) -> int:
    """Whole groups that may be granted now; where a step takes none, the policy is not even
    asked."""
    if ledger.batch_size == 0:
        return 0
    credits = policy.credits(state, ledger)
    if policy.unit == "trajectory":
        return credits // ledger.group_size
    return credits * ledger.batch_size if policy.unit == "batch" else credits


def spread(credits: int, limits: Sequence[int], ends: Sequence[int], turn: int) -> tuple[int, ...]:
    """New limits of the prompt partitions, whose end offsets are `ends`. Round robin from partition
    `turn` on over those that still hold ungranted prompts, so that an idle one neither hoards
    credit nor starves the others."""
    raised = list(limits)
    room = sum(max(0, end - limit) for end, limit in zip(ends, limits, strict=True))
    for _ in range(min(credits, room)):
        while raised[turn % len(raised)] >= ends[turn % len(raised)]:
            turn += 1
        raised[turn % len(raised)] += 1
        turn += 1
    return tuple(raised)
