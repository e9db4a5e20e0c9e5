"""The growing token ids of one trajectory's conversation: requests in, rows out.

A conversation is a tree of turns. Each turn is a stretch of new ids (prompt, tool result, user;
mask 0) followed by what the engine sampled (mask 1). A request that continues where an earlier turn
ended takes that turn's exact ids, never ids of its text encoded again. It grows the same branch if
nothing else continued there; otherwise, and where a template rewrites earlier turns, a new branch
begins. Ids a branch shares with an earlier one are trained only in the earlier one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from connectors.engines.types import Completion
from connectors.records import FinishReason, Segment

NAN: Final = float("nan")

OWN_METADATA: Final = "headwater."
"""Trajectory metadata under this prefix is ours; what an agent puts there is left out."""
TRANSCRIPT: Final = OWN_METADATA + "messages"
"""What was said after the prompt, as JSON, of a conversation of several turns."""
BRANCH: Final = OWN_METADATA + "branch"
"""Number of a row that is not the conversation's first branch."""

# Of live traffic.
SESSION: Final = OWN_METADATA + "session"
CALLS: Final = OWN_METADATA + "calls"
"""Ids, blank-separated: over a group's rows each of its calls once."""
USER: Final = OWN_METADATA + "user"
SERVED: Final = OWN_METADATA + "served"
"""The newest version that wrote any of it."""
LABEL: Final = OWN_METADATA + "label"
"""`final` or `provisional`: what the reward is."""
CORRECTS: Final = OWN_METADATA + "corrects"
"""Of a correction: the id of the group whose label it moves."""
BEFORE: Final = OWN_METADATA + "before"
"""Of a correction: the label that group had until then, as Python writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One branch as arrays of T tokens; the fields are those of `Trajectory`. `requests`: what was
    asked for each of its turns, as far as `Conversation.add` was told."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.int8]
    logprobs: NDArray[np.float32]
    segments: tuple[Segment, ...]
    turns: int
    finish_reason: FinishReason
    finished_at: float
    requests: tuple[Any, ...] = ()


@dataclass(slots=True, eq=False)
class End:
    """Where a turn ended: `branch.ids[:length]`, after the turn `after`. `written`: how the
    template writes what was asked; None where that is the text of the ids."""

    branch: Branch
    after: End | None
    start: int  # of the turn's generated ids
    length: int
    written: str | None
    order: int
    finish_reason: FinishReason
    finished_at: float
    request: Any = None
    continued: bool = False
    text: str | None = None  # of all of it, once anybody asked


@dataclass(slots=True, eq=False)
class Branch:
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)

    def context(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [NAN] * len(ids)

    def generated(self, completion: Completion) -> None:
        start = len(self.ids)
        self.ids += completion.token_ids
        self.mask += [1] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.segments += _moved(completion.segments, start)


def _undecoded(ids: Sequence[int]) -> str:
    raise RuntimeError("the conversation is of ids alone")


class Conversation:
    """All branches of one trajectory, in the order they began. `decode` gives the text of ids as
    they were sampled, special ones written out; without it nobody asks for texts."""

    def __init__(self, decode: Callable[[Sequence[int]], str] = _undecoded) -> None:
        self._decode = decode
        self._branches: list[Branch] = []
        self._ends: list[End] = []

    def continues(self, text: str) -> End | None:
        """The latest turn whose whole conversation `text` begins with; None if there is none."""
        fitting = [end for end in self._ends if text.startswith(self.text(end))]
        return max(fitting, key=lambda end: (len(self.text(end)), end.order), default=None)

    def text(self, end: End) -> str:
        """Of the whole conversation up to `end`, as the template writes it, the sampled parts as
        they were sampled. Most conversations end before anybody asks."""
        if end.text is None:
            ids = end.branch.ids[: end.length]
            if end.written is not None:
                end.text = end.written + self._decode(ids[end.start :])
            elif end.after is not None:
                end.text = self.text(end.after) + self._decode(ids[end.after.length :])
            else:
                end.text = self._decode(ids)
        return end.text

    @property
    def tip(self) -> End | None:
        """The turn that ended last."""
        return self._ends[-1] if self._ends else None

    def add(
        self,
        after: End | None,
        new_ids: Sequence[int],
        made: Completion,
        written: str | None = None,
        *,
        request: Any = None,
        finished_at: float | None = None,
    ) -> End:
        """Records that `made` was sampled after `after`'s ids and `new_ids`, which the template
        writes as `written`; None where their text is that of the ids. `request`: what the row of it
        is to name. Only finished requests get here, so one that failed leaves no trace."""
        if after is not None and after.length == len(after.branch.ids):
            branch = after.branch
        else:
            branch = Branch()
            self._branches.append(branch)
            if after is not None:
                branch.context(after.branch.ids[: after.length])
        branch.context(new_ids)
        start = len(branch.ids)
        branch.generated(made)
        if after is not None:
            after.continued = True
        end = End(branch, after, start, len(branch.ids), written, len(self._ends),
                  made.finish_reason, finished_at or time.time(), request)  # fmt: skip
        branch.ends.append(end)
        self._ends.append(end)
        return end

    def rows(self) -> list[Row]:
        """One row a branch. Of turns sampled from equal input those that were continued stay, or
        those of the newest request: the others are retries nobody built on."""
        orphans = self._orphans()
        rows = []
        for branch in self._branches:
            ends = [end for end in branch.ends if end not in orphans]
            if ends:
                rows.append(_row(branch, ends))
        return rows

    def _orphans(self) -> list[End]:
        twins: dict[tuple[int, ...], list[End]] = {}
        for end in self._ends:
            twins.setdefault(tuple(end.branch.ids[: end.start]), []).append(end)
        return [
            end
            for same in twins.values()
            for end in same
            if not end.continued
            and (any(e.continued for e in same) or not _of_one_request(end, same[-1]))
        ]


def one_turn(prompt_ids: Sequence[int], made: Completion) -> Row:
    """The row of a conversation that is one answer to the prompt."""
    num, length = len(prompt_ids), len(prompt_ids) + len(made.token_ids)
    tokens, mask = np.empty(length, np.int32), np.zeros(length, np.int8)
    logprobs = np.full(length, NAN, np.float32)
    tokens[:num], tokens[num:] = prompt_ids, made.token_ids
    mask[num:], logprobs[num:] = 1, made.logprobs
    return Row(
        tokens=tokens,
        loss_mask=mask,
        logprobs=logprobs,
        segments=_moved(made.segments, num),
        turns=1,
        finish_reason=made.finish_reason,
        finished_at=time.time(),
    )


def _of_one_request(a: End, b: End) -> bool:
    return a is b or (a.request is not None and a.request == b.request)


def _moved(segments: Sequence[Segment], by: int) -> tuple[Segment, ...]:
    return tuple(Segment(s.start + by, s.end + by, s.incarnation, s.number) for s in segments)


def _row(branch: Branch, ends: list[End]) -> Row:
    length = ends[-1].length
    return Row(
        tokens=np.array(branch.ids[:length], np.int32),
        loss_mask=np.array(branch.mask[:length], np.int8),
        logprobs=np.array(branch.logprobs[:length], np.float32),
        segments=tuple(s for s in branch.segments if s.end <= length),
        turns=len(ends),
        finish_reason=ends[-1].finish_reason,
        finished_at=ends[-1].finished_at,
        requests=tuple(end.request for end in ends if end.request is not None),
    )
