"""A transcript as ids and the mask of what its assistant wrote, exactly as a rollout has them.

The rendered conversation is cut where the assistant's spans begin and end and each piece is encoded
by itself: a rollout encodes its prompt, samples, and encodes what comes next, so no token lies
across such a border there, and none does here. Spans are those the template marks
({% generation %}); in other templates the rest that the conversation up to a turn has beyond the
conversation before it with its generation prompt. A template that writes earlier turns anew once
later ones follow has no such rest: its transcripts are refused.
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


def tokenise(text: Text, transcript: Transcript) -> tuple[Ids, Mask]:
    """Ids [T] and what is learnt of them, bool [T]: the assistant's turns, each up to the id that
    ends it. Turns of `weight` 0, and one that nothing stands before, are not learnt. BadTranscript
    otherwise."""
    try:
        whole, spans = _spans(text, transcript)
    except TextError as error:
        raise BadTranscript("template_refuses", str(error)) from error
    _check_tools(transcript, whole, spans)
    pieces: list[tuple[str, bool]] = []
    at = 0
    for start, end in spans:
        pieces += [(whole[at:start], False), (whole[start:end], True)]
        at = end
    pieces.append((whole[at:], False))
    ids: list[int] = []
    learnt: list[bool] = []
    for piece, is_written in pieces:
        found = text.encode(piece) if piece else []
        ids += found
        stop = _until_stop(found, text.stop_ids) if is_written else 0
        learnt += [True] * stop + [False] * (len(found) - stop)
    if text.decode(ids, special=True) != text.decode(text.encode(whole), special=True):
        raise BadTranscript(
            "tokens_differ", "the tokenizer writes other text for the pieces of a conversation"
        )
    mask = np.array(learnt, np.bool_)
    mask[:1] = False  # nothing predicts it
    if not mask.any():
        raise BadTranscript("nothing_to_learn", "no turn of the assistant has tokens to learn")
    return np.array(ids, np.int32), mask


def _spans(text: Text, transcript: Transcript) -> tuple[str, list[Span]]:
    """The rendered conversation, and the spans in it that are learnt."""
    messages, tools = transcript.messages, transcript.tools
    whole = text.render(messages, tools, generation_prompt=False)
    written = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    learnt = [k for k in written if messages[k].get("weight") != 0]
    marked = text.marked(messages, tools) if learnt == written else None
    if marked is not None:
        return marked
    return whole, [_rest(text, transcript, k, whole) for k in learnt if k > 0]


def _rest(text: Text, transcript: Transcript, k: int, whole: str) -> Span:
    messages, tools = transcript.messages, transcript.tools
    before = text.render(messages[:k], tools, generation_prompt=True)
    after = text.render(messages[: k + 1], tools, generation_prompt=False)
    if not (after.startswith(before) and whole.startswith(after)):
        raise BadTranscript(
            "template_rewrites",
            f"the chat template writes the conversation up to message {k} otherwise once more "
            "follows, or not as its generation prompt begins: what the model is to say there "
            "is not clear",
        )
    return len(before), len(after)


def _check_tools(transcript: Transcript, whole: str, spans: Sequence[Span]) -> None:
    """A template that knows no tools writes nothing of them and says nothing: the model would
    learn to answer with nothing."""
    written = "".join(whole[start:end] for start, end in spans)
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
