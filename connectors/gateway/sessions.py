"""Which session a call is of, and what the model itself wrote in it.

    messages ─▶ session (named, or the one whose answers the messages hold, or a new one)
             ─▶ its answers as the model wrote them ─▶ template ─▶ ids of an earlier end + new text

A client keeps what it was shown: text without marks, tool calls taken out of it, written again in
its own way. So an answer is known again by what the client got, and the text that the model wrote
stands in its place before the template writes the conversation. Where that begins with all of an
earlier turn its exact ids are taken, and only what is new is encoded.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from connectors.branches import Conversation, End
from connectors.engines.types import Completion
from connectors.text import Text
from connectors.transcripts import Transcript

MAX_TURNS: Final = 1024
"""A session of more answers forgets their ids and starts anew: each turn is looked at by each
call."""


@dataclass(slots=True, eq=False)
class Session:
    """`name` is that in the log. `written`: what the model wrote, by digests of what the client
    got: after the messages before it, and alone."""

    name: str
    conversation: Conversation
    written: dict[bytes, str] = field(default_factory=dict)
    num_answers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompted:
    """What a model is given: the ids of the turn `after` and `new_ids`, which together the template
    writes as `written`."""

    session: Session
    after: End | None
    new_ids: list[int]
    written: str
    digest: bytes  # of all messages

    @property
    def ids(self) -> tuple[int, ...]:
        known = self.after.branch.ids[: self.after.length] if self.after is not None else ()
        return (*known, *self.new_ids)


class Sessions:
    """The `most` latest used. Everything here is of one owner (of a key) at a time: owners neither
    see nor extend each other's sessions."""

    def __init__(self, text: Text, most: int) -> None:
        self._text, self._most = text, most
        self._all: OrderedDict[str, Session] = OrderedDict()
        self._by_answer: dict[bytes, str] = {}

    def __len__(self) -> int:
        return len(self._all)

    def prompt(self, owner: str, name: str | None, asked: Transcript) -> Prompted:
        """Of the session `name`, or else of the one that served the latest answer that the messages
        hold, after the same messages. TextError when the template refuses them."""
        digests = _digests(owner, asked.messages)
        session = self._take(name or self._of_answers(digests) or new_name(owner))
        messages = [
            _as_written(session, message, digest)
            for message, digest in zip(asked.messages, digests, strict=True)
        ]
        written = self._text.render(messages, asked.tools)
        after = session.conversation.continues(written)
        known = 0 if after is None else len(session.conversation.text(after))
        return Prompted(
            session=session,
            after=after,
            new_ids=self._text.encode(written[known:]),
            written=written,
            digest=digests[-1],
        )

    def answered(
        self, prompted: Prompted, made: Completion, message: dict[str, Any], wrote: str
    ) -> None:
        """The client got `message` (as a template takes it), and the model wrote `wrote`."""
        session = prompted.session
        if self._all.get(session.name) is not session:
            return  # it is forgotten
        ids_alone = replace(made, logprobs=(), segments=())  # nobody asks it for rows
        session.conversation.add(prompted.after, prompted.new_ids, ids_alone, prompted.written)
        session.num_answers += 1
        digest = _after(prompted.digest, message)
        session.written[digest] = session.written[_digest(message)] = wrote
        self._by_answer[digest] = session.name

    def forget(self, name: str) -> None:
        if (session := self._all.pop(name, None)) is not None:
            for digest in session.written:
                if self._by_answer.get(digest) == name:
                    del self._by_answer[digest]

    def _take(self, name: str) -> Session:
        session = self._all.get(name)
        if session is not None and session.num_answers >= MAX_TURNS:
            self.forget(name)
            session = None
        if session is None:
            decode = partial(self._text.decode, special=True)
            session = self._all[name] = Session(name, Conversation(decode))
            if len(self._all) > self._most:
                self.forget(next(iter(self._all)))
        self._all.move_to_end(name)
        return session

    def _of_answers(self, digests: Sequence[bytes]) -> str | None:
        found = (self._by_answer.get(digest) for digest in reversed(digests))
        return next((name for name in found if name is not None), None)


def scoped(owner: str, name: str) -> str:
    """A client's name of a session or user as it stands in the log: two keys may use the same."""
    return f"{owner}:{name}" if owner else name


def new_name(owner: str) -> str:
    return scoped(owner, f"auto-{secrets.token_hex(12)}")


def _as_written(session: Session, message: dict[str, Any], digest: bytes) -> dict[str, Any]:
    if message["role"] != "assistant":
        return message
    wrote = session.written.get(digest) or session.written.get(_digest(message))
    return message if wrote is None else {"role": "assistant", "content": wrote}


def _digests(owner: str, messages: Sequence[dict[str, Any]]) -> list[bytes]:
    """Of the conversation up to each message."""
    start = hashlib.blake2b(owner.encode(), digest_size=16, person=b"owner").digest()
    return list(accumulate(messages, _after, initial=start))[1:]


def _after(digest: bytes, message: dict[str, Any]) -> bytes:
    return hashlib.blake2b(digest + _canonical(message), digest_size=16).digest()


def _digest(message: dict[str, Any]) -> bytes:
    return hashlib.blake2b(_canonical(message), digest_size=16, person=b"alone").digest()


def _canonical(message: dict[str, Any]) -> bytes:
    """What a client keeps of a message, however it writes it."""
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    said = (message["role"], message["content"], message.get("name"), calls)
    return msgspec.json.encode(said, order="sorted")
