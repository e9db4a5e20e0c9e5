"""A live session's rows as a Group: one sample, a row a branch.

traced rows ─▶ those that fit the context and the session's cap ─▶ Group, or why there is none
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from connectors.branches import (
    BEFORE,
    BRANCH,
    CALLS,
    CORRECTS,
    LABEL,
    OWN_METADATA,
    SERVED,
    SESSION,
    TRANSCRIPT,
    USER,
)
from connectors.records import Closed, Group, Origin, Prompt, Trajectory
from connectors.traffic import Call
from operators.labels import Label, Signal, values_of
from operators.traces import Traced, served
from operators.user_code import clean

ValueOf = Literal["task", "user", "prompt"]
WHY: Final = OWN_METADATA + "why"
"""Why a row is not `exact`."""
LEFT_OUT: Final = OWN_METADATA + "left_out"
"""Of a group's first row: how many rows are not in it, for their length or the session's cap."""
CUT: Final = OWN_METADATA + "cut"
"""Of a group's first row: what its label was before it was cut to the bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What a group is made of. `calls`: all that it accounts for, by time. `label` None: the reward
    stage scores it. `corrects`: the group whose label, `before`, this one moves."""

    group_id: str
    origin: Origin
    session: str
    task: str
    user: str
    calls: Sequence[Call]
    rows: Sequence[Traced]
    label: Label | None
    signals: Sequence[Signal] = ()
    prompt_id: str | None = None
    corrects: str = ""
    before: Label | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """`tokens_per_session`: trained ones."""

    context_tokens: int
    tokens_per_session: int | None = None


def value_id(call: Call, value_of: ValueOf) -> str | None:
    """What a call's value is tracked by; None: by what was asked."""
    if call.key:
        return call.key
    return {"task": "*", "user": call.user, "prompt": None}[value_of]


def value_key(call: Call, value_of: ValueOf) -> str:
    """The same, with a digest of what was asked."""
    known = value_id(call, value_of)
    if known is not None:
        return known
    return hashlib.sha256(msgspec.json.encode(call.messages, order="sorted")).hexdigest()[:32]


def group_of(episode: Episode, room: Room) -> Group | Closed:
    """The group, or why there is nothing to train of it."""
    trained = [traced for traced in episode.rows if traced.num_trained]
    if not trained:
        lost = any(traced.row.turns for traced in episode.rows)
        reason = "version_gone" if lost else "nothing_to_train"
        message = (
            "no checkpoint is kept of the versions that wrote it"
            if lost
            else "none of its calls has an answer to learn"
        )
        return Closed.now(episode.group_id, reason, message, episode.task)
    fitting = [traced for traced in trained if len(traced.row.tokens) <= room.context_tokens]
    if not fitting:
        longest = max(len(traced.row.tokens) for traced in trained)
        message = f"a row has {longest} tokens and the context {room.context_tokens}"
        return Closed.now(episode.group_id, "too_long", message, episode.task)
    kept = _within(fitting, room.tokens_per_session)
    if not kept:
        message = (
            f"{fitting[0].num_trained} trained tokens, over the {room.tokens_per_session} of a "
            "session"
        )
        return Closed.now(episode.group_id, "capped", message, episode.task)
    return Group(
        group_id=episode.group_id,
        prompt=_prompt(episode),
        trajectories=tuple(_trajectories(episode, kept)),
    )


def _within(rows: Sequence[Traced], most: int | None) -> list[Traced]:
    """The first ones, as many as the cap takes."""
    kept: list[Traced] = []
    num_tokens = 0
    for traced in rows:
        num_tokens += traced.num_trained
        if most is not None and num_tokens > most:
            break
        kept.append(traced)
    return kept


def _prompt(episode: Episode) -> Prompt:
    return Prompt(
        task=episode.task,
        id=episode.prompt_id,
        messages=episode.calls[0].messages,
        reward={"feedback": values_of(episode.signals)},
    )


def _trajectories(episode: Episode, rows: Sequence[Traced]) -> list[Trajectory]:
    shared = _shared(episode, sum(traced.row.turns for traced in rows))
    named = {i for traced in rows for i in traced.calls}
    others = [call.id for call in episode.calls if call.id not in named]
    return [
        _trajectory(episode, k, traced, shared, others if k == 0 else [], len(rows))
        for k, traced in enumerate(rows)
    ]


def _trajectory(
    episode: Episode,
    k: int,
    traced: Traced,
    shared: Mapping[str, str],
    others: Sequence[str],
    num_rows: int,
) -> Trajectory:
    row, first, label = traced.row, episode.calls[0], episode.label
    metadata = {**shared, CALLS: clean(" ".join([*traced.calls, *others]))}
    if traced.why:
        metadata[WHY] = clean(traced.why)
    if k:
        metadata[BRANCH] = str(k)
    elif num_rows < len(episode.rows):
        metadata[LEFT_OUT] = str(len(episode.rows) - num_rows)
    if k == 0 and label is not None and label.cut is not None:
        metadata[CUT] = repr(label.cut)
    return Trajectory(
        trajectory_id=f"{episode.group_id}/0/{k}" if k else f"{episode.group_id}/0",
        group_id=episode.group_id,
        task=episode.task,
        tokens=row.tokens,
        loss_mask=row.loss_mask,
        logprobs=row.logprobs,
        segments=row.segments,
        origin=episode.origin,
        source=first.source,
        behaviour=traced.behaviour,
        reward=float("nan") if label is None else label.value,
        turns=row.turns,
        finish_reason=row.finish_reason,
        created_at=first.time,
        finished_at=row.finished_at,
        metadata=metadata,
    )


def _shared(episode: Episode, num_turns: int) -> dict[str, str]:
    """Metadata of all rows."""
    found = {SESSION: clean(episode.session)}
    if episode.user:
        found[USER] = clean(episode.user)
    if (version := served(episode.calls)) is not None:
        found[SERVED] = str(version)
    if episode.label is not None:
        found[LABEL] = episode.label.kind
    if episode.corrects and episode.before is not None:
        found |= {CORRECTS: episode.corrects, BEFORE: repr(episode.before.value)}
    if num_turns > 1:
        found[TRANSCRIPT] = _transcript(episode.calls)
    return found


def _transcript(calls: Sequence[Call]) -> str:
    """What was said after the first call's messages, as the last call has it."""
    last = calls[-1]
    said: list[Mapping[str, Any]] = [*last.messages, *(c.message for c in last.choices[:1])]
    return msgspec.json.encode(said[len(calls[0].messages) :]).decode()
