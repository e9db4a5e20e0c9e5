"""A request's tokens on their way to whoever streams it: cut into parts, and put together again."""

from __future__ import annotations

from dataclasses import dataclass, field

from connectors.engines.types import Completion, Part
from connectors.records import FinishReason, Segment, Version


@dataclass(slots=True)
class Told:
    """One sample's tokens as far as they were told, whoever wrote them."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def version(self) -> Version | None:
        """That wrote the last token."""
        return self.segments[-1].version if self.segments else None

    def add(self, more: Part | Completion) -> None:
        """Its tokens come after those that were told."""
        start = len(self.token_ids)
        for segment in more.segments:
            begins, ends = start + segment.start, start + segment.end
            if self.version == segment.version:
                begins = self.segments.pop().start
            self.segments.append(Segment(begins, ends, segment.incarnation, segment.number))
        self.token_ids += more.token_ids
        self.logprobs += more.logprobs

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            segments=tuple(self.segments),
            finish_reason=reason,
        )


def part_from(start: int, sample: int, done: Completion) -> Part | None:
    """The tokens of `done` from index `start` on; None when there are none."""
    if start >= len(done.token_ids):
        return None
    return Part(
        sample=sample,
        token_ids=done.token_ids[start:],
        logprobs=done.logprobs[start:],
        segments=tuple(
            Segment(max(s.start, start) - start, s.end - start, s.incarnation, s.number)
            for s in done.segments
            if s.end > start
        ),
    )
