"""Live traffic as records: `Call` and `End` on `agent-traffic`, `Feedback` on `feedback`.

Both topics are keyed by session and partitioned by it the same way, so that one partition has all
of a session: its calls, its end, what was said about it. Times are event time, Unix seconds; the
log's own order says nothing about them.
"""

from __future__ import annotations

import math
import zlib
from typing import Any, Final, Literal

import msgspec

from connectors.records import Behaviour, Segment, decode_as

TrafficSource = Literal["traffic", "import"]
TOPICS: Final = ("agent-traffic", "feedback")
"""Without namespace. A near-line group's id is the place of one of their records."""


def partition_of(session: str, num_partitions: int) -> int:
    """Of `agent-traffic` and `feedback`."""
    return zlib.crc32(session.encode()) % num_partitions


class Choice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer of a call.

    message        as the client got it: role, content, tool_calls
    text           what the model wrote where `message` is not that (a parser took tool calls out)
    token_ids      generated ids, the stop id included; None where the log has none
    logprobs       as long as token_ids; None where the log has none
    segments       run-length versions into token_ids; () where nothing tells
    finish_reason  stop, length, tool_calls, cancelled (the client's end), or what a log says
    """

    message: dict[str, Any]
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    segments: tuple[Segment, ...] = ()
    finish_reason: str = "stop"


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="call",
           tag_field="kind"):  # fmt: skip
    """One request to a model and its answers.

    id           unique; what the client got as the response's id
    time         when it was asked; `finished_at` when the last answer ended
    model        what served it: `incarnation.number` of ours, or a foreign name
    prompt_ids   what the engine was given; None where the log has none
    temperature  the ids were sampled at; None where nothing tells
    user         whose session it is, for caps and values; "" where nothing tells
    key          of the prompt's value (operators/tracker.py); "" = the task's
    """

    id: str
    session: str
    task: str
    time: float
    finished_at: float
    messages: list[dict[str, Any]]
    choices: tuple[Choice, ...]
    source: TrafficSource = "traffic"
    tools: list[dict[str, Any]] = []
    model: str = ""
    prompt_ids: tuple[int, ...] | None = None
    temperature: float | None = None
    user: str = ""
    key: str = ""
    metadata: dict[str, str] = {}

    @property
    def behaviour(self) -> Behaviour:
        """Of the least that is known of any answer."""
        if self.prompt_ids is None or any(c.token_ids is None for c in self.choices):
            return "text"
        exact = all(c.logprobs is not None and c.segments for c in self.choices)
        return "exact" if exact else "recomputed"

    def __post_init__(self) -> None:
        if not self.id or not self.session:
            raise ValueError("a call has an id and a session")
        if not math.isfinite(self.time) or not math.isfinite(self.finished_at):
            raise ValueError(f"{self.id}: a time is not finite")
        for choice in self.choices:
            ids, scores = choice.token_ids, choice.logprobs
            if scores is not None and (ids is None or len(ids) != len(scores)):
                raise ValueError(f"{self.id}: {len(scores)} log-probs of {len(ids or ())} ids")


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end", tag_field="kind"):
    """The application says that a session is over."""

    session: str
    time: float


class Feedback(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One value about one session, or one call of it. Records with equal `id` and `session` are
    the same fact: the first one counts.

    session  "" where only the call is known: its id then says the partition
    call     None: of the whole session
    """

    id: str
    name: str
    value: float
    time: float
    session: str = ""
    call: str | None = None
    source: str = ""
    comment: str = ""

    def __post_init__(self) -> None:
        if not self.id or not (self.session or self.call):
            raise ValueError("feedback has an id, and a session or a call")
        if not math.isfinite(self.value) or not math.isfinite(self.time):
            raise ValueError(f"{self.id}: value and time must be finite")


def decode_traffic(value: bytes) -> Call | End:
    """A record of `agent-traffic`; msgspec.DecodeError (ValidationError) when it is none."""
    found: Call | End = decode_as(value, Call | End)
    return found
