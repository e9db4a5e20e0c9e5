"""Trace assembly: the calls of one session in, rows out; a pure function of the set of calls.

    calls ─▶ turns (an answer each) ─▶ who continues whom ─▶ retries collapse ─▶ a row a branch

A call continues the turn whose whole ids its prompt begins with, the longest one; where none does
(ids encoded again, thoughts stripped, a compacted history, a sub-agent) a branch of its own begins,
with its prompt as context. Calls without usable ids are put together by their messages, which a
chat template then writes. The order in which calls came, or came again, changes nothing, nor does a
clock that ran backwards: what is continued is shorter than what continues it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from connectors.branches import NAN, Conversation, End, Row
from connectors.engines.types import Completion
from connectors.records import Behaviour, FinishReason, Segment, Version
from connectors.traffic import Call, Choice

Tokenise = Callable[
    [Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]],
    Sequence[tuple[NDArray[np.int32], NDArray[np.bool_]]],
]
"""(messages, tools) -> sequences of ids and which of them are learnt; an assistant's message of
`weight` 0 is not. ValueError for what cannot be learnt from."""
Recompute = Callable[[Version, NDArray[np.int32], NDArray[np.int8]], NDArray[np.float32] | None]
"""(version, tokens [T], mask [T]) -> that version's log-probs of the tokens where the mask is 1,
[T], NaN elsewhere; None when its weights are kept nowhere."""

_VERSION: Final = re.compile(r"(\d{1,9})\.(\d{1,9})")
_FINISHED: Final[Mapping[str, FinishReason]] = {
    "length": "length", "cancelled": "cancelled", "error": "error",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A row, how its log-probs are known and, unless exactly, `why` not; `calls`: ids of those
    whose answers it trains and no row before it. NaN log-probs of trained tokens that have a
    segment are to be computed (`recomputed`)."""

    row: Row
    behaviour: Behaviour
    calls: tuple[str, ...]
    why: str = ""

    @property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.row.loss_mask))


@dataclass(frozen=True, slots=True)
class _Turn:
    """One answer. `asked` and `whole`: the input, and the input with the answer, as something that
    can begin with another of its kind."""

    call: Call
    choice: Choice
    asked: Any
    whole: Any


def assemble(
    calls: Iterable[Call], *, temperature: float, tokenise: Tokenise
) -> tuple[list[Traced], list[str]]:
    """The rows, in the order in which they began, and what was said of calls that could not be put
    into any. `temperature`: the run's, at which log-probs are what it trains with."""
    found = unique(calls)
    by_ids = [call for call in found if standing(call, temperature)[0] != "text"]
    by_text = [call for call in found if standing(call, temperature)[0] == "text"]
    texts, problems = _rows_of_texts(by_text, found, temperature, tokenise)
    rows = _rows_of_ids(by_ids, temperature) + texts
    began = {call.id: (call.time, call.id) for call in found}
    rows.sort(key=lambda row: min((began[i] for i in row.calls), default=(np.inf, "")))
    return rows, problems


def unique(calls: Iterable[Call]) -> list[Call]:
    """Each call once, by time and id."""
    found: dict[str, Call] = {}
    for call in sorted(calls, key=lambda c: (c.time, c.id, c.finished_at)):
        found.setdefault(call.id, call)
    return list(found.values())


def standing(call: Call, temperature: float) -> tuple[Behaviour, str]:
    """What is known of a call's tokens, and why not more."""
    if not call.prompt_ids or any(choice.token_ids is None for choice in call.choices):
        return "text", "it has no token ids"
    if version_of(call) is None and not all(choice.segments for choice in call.choices):
        return "text", f"no version of this run wrote it, but {call.model or 'an unnamed model'}"
    if call.behaviour != "exact":
        return "recomputed", "its log-probs were not recorded"
    if call.temperature != temperature:
        said = "an unknown one" if call.temperature is None else f"{call.temperature:g}"
        return "recomputed", f"its log-probs are at {said}, not at temperature {temperature:g}"
    return "exact", ""


def version_of(call: Call) -> Version | None:
    """That `call.model` names."""
    named = _VERSION.fullmatch(call.model)
    return Version(int(named[1]), int(named[2])) if named else None


def served(calls: Iterable[Call]) -> Version | None:
    """The newest version that is known to have written any of it."""
    named = [version for call in calls if (version := version_of(call)) is not None]
    written = [s.version for call in calls for choice in call.choices for s in choice.segments]
    return max([*named, *written], default=None)


def recomputed(traced: Traced, recompute: Recompute) -> Traced:
    """The row with all its log-probs. Tokens of a version that is kept nowhere are trained no
    more."""
    row = traced.row
    missing = np.isnan(row.logprobs) & (row.loss_mask == 1)
    if traced.behaviour == "text" or not missing.any():
        return traced
    logprobs, mask = row.logprobs.copy(), row.loss_mask.copy()
    for version in sorted({segment.version for segment in row.segments}):
        wanted = np.zeros(len(mask), np.int8)
        for segment in row.segments:
            if segment.version == version:
                wanted[segment.start : segment.end] = missing[segment.start : segment.end]
        if not wanted.any():
            continue
        found = recompute(version, row.tokens, wanted)
        at = wanted == 1
        if found is None:
            mask[at] = 0
        else:
            logprobs[at] = found[at]
    trained = tuple(s for s in row.segments if mask[s.start : s.end].any())
    row = replace(row, logprobs=logprobs, loss_mask=mask, segments=trained)
    return replace(traced, row=row)


def same_question(one: Call, other: Call) -> bool:
    """Whether two calls asked the same: one is a retry of the other."""
    if one.prompt_ids and other.prompt_ids:
        return one.prompt_ids == other.prompt_ids
    return _said(one.messages) == _said(other.messages)


# ------------------------------------------------------------------------------------------ turns
def _continued(asked: Any, turns: Sequence[_Turn]) -> int | None:
    """Which of the turns an input continues: the longest, of equal ones the latest."""
    fitting = [n for n, turn in enumerate(turns) if asked[: len(turn.whole)] == turn.whole]
    return max(fitting, key=lambda n: (len(turns[n].whole), n), default=None)


def _survivors(turns: Sequence[_Turn], inputs: Iterable[Any]) -> list[_Turn]:
    """Without retries nobody built on. Of different calls with equal input those that some input
    continues stay, or the newest if none is; the answers of one call are no retries of each
    other."""
    continued = {_continued(asked, turns) for asked in inputs}
    twins: dict[Any, list[int]] = {}
    for n, turn in enumerate(turns):
        twins.setdefault(turn.asked, []).append(n)
    kept: set[int] = set()
    for same in twins.values():
        newest = [n for n in same if turns[n].call is turns[same[-1]].call]
        kept.update([n for n in same if n in continued] or newest)
    return [turns[n] for n in sorted(kept)]


# -------------------------------------------------------------------------------------------- ids
def _rows_of_ids(calls: Sequence[Call], temperature: float) -> list[Traced]:
    turns = [
        _Turn(call, choice, _packed(prompt), _packed((*prompt, *choice.token_ids)))
        for call in calls
        for choice in call.choices
        # Where nothing was generated there is nothing to train or to continue.
        if (prompt := call.prompt_ids) and choice.token_ids
    ]
    turns = _survivors(turns, [_packed(call.prompt_ids) for call in calls if call.prompt_ids])
    turns.sort(key=lambda turn: len(turn.asked))  # stable: what is continued comes first
    conversation, ends = Conversation(), list[End]()
    for turn in turns:
        at = _continued(turn.asked, turns[: len(ends)])
        after = None if at is None else ends[at]
        new_ids = (turn.call.prompt_ids or ())[0 if after is None else after.length :]
        exact = standing(turn.call, temperature)[0] == "exact"
        end = conversation.add(
            after, new_ids, _completion(turn.call, turn.choice, exact),
            request=turn.call.id, finished_at=turn.call.finished_at,
        )  # fmt: skip
        ends.append(end)
    by_id = {call.id: call for call in calls}
    rows, seen = [], set[str]()
    for row in conversation.rows():
        of = [by_id[i] for i in row.requests]
        rows.append(_traced(row, of, seen, temperature))
    return rows


def _packed(ids: Sequence[int] | None) -> bytes:
    return np.asarray(ids, np.int32).tobytes()


def _completion(call: Call, choice: Choice, exact: bool) -> Completion:
    """As the engine would have given it; NaN where log-probs are not those to train with."""
    ids = choice.token_ids or ()
    version, segments = version_of(call), choice.segments
    if not segments and version is not None:
        segments = (Segment(0, len(ids), version.incarnation, version.number),)
    return Completion(
        token_ids=ids,
        logprobs=choice.logprobs if exact and choice.logprobs else (NAN,) * len(ids),
        segments=segments,
        finish_reason=_FINISHED.get(choice.finish_reason, "stop"),
    )


def _traced(row: Row, calls: Sequence[Call], seen: set[str], temperature: float) -> Traced:
    """`seen`: the calls of rows before it; those of this one are added."""
    known = [standing(call, temperature) for call in calls]
    reasons = dict.fromkeys(why for _, why in known if why)
    behaviours = {behaviour for behaviour, _ in known}
    least: Behaviour = "text" if "text" in behaviours else "recomputed"
    new = tuple(dict.fromkeys(call.id for call in calls if call.id not in seen))
    seen.update(new)
    return Traced(
        row=row,
        behaviour="exact" if behaviours == {"exact"} else least,
        calls=new,
        why="; ".join(reasons),
    )


# ------------------------------------------------------------------------------------------- text
def _rows_of_texts(
    calls: Sequence[Call], everything: Sequence[Call], temperature: float, tokenise: Tokenise
) -> tuple[list[Traced], list[str]]:
    turns = [
        _Turn(call, choice, _said(call.messages), _said([*call.messages, choice.message]))
        for call in calls
        for choice in call.choices
    ]
    turns = _survivors(turns, [_said(call.messages) for call in everything])
    turns.sort(key=lambda turn: len(turn.asked))
    before = [_continued(turn.asked, turns[:n]) for n, turn in enumerate(turns)]
    rows, problems, learnt, seen = list[Traced](), list[str](), set[int](), set[str]()
    for leaf in sorted(set(range(len(turns))) - set(before), key=lambda n: _began(turns[n])):
        path = [leaf]
        while (at := before[path[0]]) is not None:
            path.insert(0, at)
        new = [n for n in path if n not in learnt]
        messages = _weighed(turns[leaf], {len(turns[n].asked) for n in new})
        try:
            sequences = tokenise(messages, turns[leaf].call.tools)
        except ValueError as error:
            problems.append(f"{turns[leaf].call.id}: {error}")
            continue
        learnt.update(new)
        for ids, mask in sequences:
            row = _text_row(ids, mask, turns[leaf], len(new))
            rows.append(_traced(row, [turns[n].call for n in new], seen, temperature))
    return rows, problems


def _began(turn: _Turn) -> tuple[float, str]:
    return turn.call.time, turn.call.id


def _weighed(leaf: _Turn, learnt: set[int]) -> list[dict[str, Any]]:
    """The leaf's conversation; of the assistant's messages only those at `learnt` count."""
    return [
        {**message, "weight": int(n in learnt)} if message.get("role") == "assistant" else message
        for n, message in enumerate([*leaf.call.messages, leaf.choice.message])
    ]


def _text_row(ids: NDArray[np.int32], mask: NDArray[np.bool_], leaf: _Turn, num_turns: int) -> Row:
    return Row(
        tokens=ids,
        loss_mask=mask.astype(np.int8),
        logprobs=np.full(len(ids), NAN, np.float32),
        segments=(),
        turns=num_turns,
        finish_reason=_FINISHED.get(leaf.choice.finish_reason, "stop"),
        finished_at=leaf.call.finished_at,
    )


def _said(messages: Sequence[Mapping[str, Any]]) -> tuple[bytes, ...]:
    """What tells messages apart. Clients send an answer back without keys it came with."""
    return tuple(msgspec.json.encode(_essence(m), order="sorted") for m in messages)


def _essence(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(p.get("text", p)) if isinstance(p, dict) else str(p) for p in content)
    calls = message.get("tool_calls") or []
    named = [c.get("function", c) if isinstance(c, dict) else c for c in calls]
    return [message.get("role"), content or "", [_tool_call(call) for call in named]]


def _tool_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        with suppress(msgspec.DecodeError):
            arguments = msgspec.json.decode(arguments)
    return [call.get("name"), arguments]
