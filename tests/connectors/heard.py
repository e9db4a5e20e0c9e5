"""A client of a stream, who keeps what it was told."""

from __future__ import annotations

from collections.abc import Sequence

from connectors.engines.told import Told
from connectors.engines.types import Completion, Part


class Heard(list[Part]):
    """The parts in the order they came; `heard.append` is told them."""

    @property
    def num_tokens(self) -> int:
        return sum(len(part.token_ids) for part in self)

    def completions(self, done: Sequence[Completion]) -> tuple[Completion, ...]:
        """Put together, with the reasons `done` gives."""
        samples = [Told() for _ in done]
        for part in self:
            samples[part.sample].add(part)
        return tuple(t.completion(d.finish_reason) for t, d in zip(samples, done, strict=True))
