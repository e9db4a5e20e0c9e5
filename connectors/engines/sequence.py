"""One sample on its way through an engine: the prompt, the tokens so far, and what each was sampled
with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

from connectors.engines.types import Completion, Part, Sampling
from connectors.records import FinishReason, Segment, Version


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample on its way. The decode thread appends, everyone else reads; `token_ids` grows
    last, so its length is how many tokens are complete. `closed` ends it: nothing is appended any
    more. `listeners` are called after each token, by whoever appends it."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    closed: bool = False
    submission: str = ""
    listeners: tuple[Callable[[], None], ...] = ()
    num_final: int | None = None
    """Tokens it was completed with: one that is appended at that moment may come too late."""

    @property
    def num_left(self) -> int:
        return self.max_tokens - len(self.token_ids)

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    def append(self, token_id: int, logprob: float, version: Version) -> bool:
        """False when it is closed."""
        if self.closed:
            return False
        self.versions.append(version)
        self.logprobs.append(logprob)
        self.token_ids.append(token_id)
        for listener in self.listeners:
            listener()
        return True

    def complete(self, reason: FinishReason | None = None) -> Completion:
        """Closes the sequence. Without a reason it ended by itself: stop id or length."""
        self.closed = True
        count = self.num_final = len(self.token_ids)
        if reason is None:
            stopped = count > 0 and self.token_ids[-1] in self.sampling.stop_ids
            reason = "stop" if stopped else "length"
        return Completion(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs[:count]),
            segments=run_lengths(self.versions[:count]),
            finish_reason=reason,
        )

    def part(self, sample: int, start: int) -> Part | None:
        """The tokens from index `start` on, as those of sample number `sample`; None when there are
        none yet."""
        end = len(self.token_ids) if self.num_final is None else self.num_final
        if start >= end:
            return None
        return Part(
            sample=sample,
            token_ids=tuple(self.token_ids[start:end]),
            logprobs=tuple(self.logprobs[start:end]),
            segments=run_lengths(self.versions[start:end]),
        )


def run_lengths(versions: list[Version]) -> tuple[Segment, ...]:
    """One segment for each stretch of equal versions."""
    segments, start = [], 0
    for version, run in groupby(versions):
        end = start + len(list(run))
        segments.append(Segment(start, end, version.incarnation, version.number))
        start = end
    return tuple(segments)
