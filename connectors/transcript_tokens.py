"""A transcript as ids and the mask of what its assistant wrote, exactly as a rollout has them.

A rollout encodes its prompt, samples, and encodes what comes next: no token lies across the border
of a turn. So the rendered conversation is cut there and each piece encoded by itself. The turns are
what the template marks ({% generation %}); in other templates, what the conversation up to a turn
has beyond the one before it with its generation prompt. Where a template writes earlier turns anew
once more follows (drops their thoughts, say), the conversation forks as a rollout's does: the later
turn gets a sequence of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from connectors.text import Text, TextError
from connectors.transcripts import BadTranscript, Transcript

Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]
Span = tuple[int, int]
Rendered = tuple[str, list[Span]]
"""Text of a conversation, and the spans in it that are learnt."""


def tokenise(text: Text, transcript: Transcript) -> list[tuple[Ids, Mask]]:
    """Sequences of ids [T] and what is learnt of them, bool [T]: the assistant's turns, each up to
    the id that ends it. Turns of `weight` 0, and one that nothing stands before, are not learnt.
    BadTranscript when nothing is."""
    try:
        rendered = _rendered(text, transcript)
    except TextError as error:
        raise BadTranscript("template_refuses", str(error)) from error
    _check_tools(transcript, rendered)
    found = [_encoded(text, whole, spans) for whole, spans in rendered]
    found = [(ids, mask) for ids, mask in found if mask.any()]
    if not found:
        raise BadTranscript("nothing_to_learn", "no turn of the assistant has tokens to learn")
    return found


def _rendered(text: Text, transcript: Transcript) -> list[Rendered]:
    messages, tools = transcript.messages, transcript.tools
    written = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    learnt = [k for k in written if messages[k].get("weight") != 0]
    marked = text.marked(messages, tools) if learnt == written else None
    if marked is not None:
        return [marked]
    found: list[Rendered] = []
    for k in learnt:
        if k == 0:
            continue
        before = text.render(messages[:k], tools, generation_prompt=True)
        after = text.render(messages[: k + 1], tools, generation_prompt=False)
        if not after.startswith(before):
            raise BadTranscript(
                "template_unclear",
                f"the chat template writes message {k} otherwise than its generation prompt begins",
            )
        span = (len(before), len(after))
        if found and before.startswith(found[-1][0]):
            found[-1] = (after, [*found[-1][1], span])
        else:
            found.append((after, [span]))
    return found


def _encoded(text: Text, whole: str, spans: Sequence[Span]) -> tuple[Ids, Mask]:
    """Up to the end of the last span."""
    ids: list[int] = []
    learnt: list[bool] = []
    at = 0
    for start, end in spans:
        context, turn = text.encode(whole[at:start]), text.encode(whole[start:end])
        stop = _until_stop(turn, text.stop_ids)
        ids += context + turn
        learnt += [False] * len(context) + [True] * stop + [False] * (len(turn) - stop)
        at = end
    if text.decode(ids, special=True) != text.decode(text.encode(whole[:at]), special=True):
        raise BadTranscript(
            "tokens_differ", "the tokenizer writes other text for the pieces of a conversation"
        )
    mask = np.array(learnt, np.bool_)
    mask[:1] = False  # nothing predicts it
    return np.array(ids, np.int32), mask


def _check_tools(transcript: Transcript, rendered: Sequence[Rendered]) -> None:
    """A template that knows no tools writes nothing of them and says nothing: the model would
    learn to answer with nothing."""
    whole = "".join(text for text, _ in rendered)
    written = "".join(text[start:end] for text, spans in rendered for start, end in spans)
    calls = [
        call["function"]["name"]
        for message in transcript.messages
        if message["role"] == "assistant" and message.get("weight") != 0
        for call in message.get("tool_calls", ())
    ]
    tools = [_name(tool) for tool in transcript.tools]
    lost = [n for n in calls if n not in written] + [n for n in tools if n not in whole]
    if lost:
        raise BadTranscript("template_drops_tools", f"the chat template leaves out tool {lost[0]}")


def _name(tool: Any) -> str:
    function = tool.get("function")
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def _until_stop(ids: Sequence[int], stop_ids: Sequence[int]) -> int:
    """How many of a turn's ids a model would sample: what stands after the one that ends the turn
    (a line break, in most templates) is the next prompt's."""
    stops = [n for n, i in enumerate(ids) if i in stop_ids]
    return stops[-1] + 1 if stops else len(ids)
