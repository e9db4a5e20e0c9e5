"""What became of the tokens."""

from __future__ import annotations

from collections import Counter

from deploy.simulate.outcome import Staleness
from deploy.simulate.rollouts import Rollout


class Tally:
    """Tokens by what became of them: `trained_at` those that a step trained, by their staleness;
    `num_groups` that were trained."""

    def __init__(self) -> None:
        self.trained_at: Counter[int] = Counter()
        self.num_groups = 0
        self.masked = 0
        self.dropped = 0
        self.cancelled = 0
        self.failed = 0

    @property
    def trained(self) -> int:
        return self.trained_at.total()

    def train(self, rollout: Rollout, version: int, mask_before: int) -> int:
        """The number of tokens it trains."""
        before = self.masked
        for number, num_tokens in rollout.tokens.items():
            if number < mask_before:
                self.masked += num_tokens
            else:
                self.trained_at[version - number] += num_tokens
        self.num_groups += 1
        return rollout.tokens.total() - (self.masked - before)

    def staleness(self) -> Staleness:
        """`p99` is the least staleness that 99 in 100 tokens do not exceed."""
        total, seen, p99 = self.trained, 0, 0
        for value in sorted(self.trained_at):
            if seen < 0.99 * total:
                p99 = value
            seen += self.trained_at[value]
        weighted = sum(value * num for value, num in self.trained_at.items())
        return Staleness(
            mean=weighted / total if total else 0.0, p99=p99, max=max(self.trained_at, default=0)
        )
