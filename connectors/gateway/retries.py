"""Which requests are a client's second try: they get the answer that the first one began.

A retry is known by an equal body and, in this order:

* an equal idempotency key, within `keep_s`;
* a client that says so (`x-stainless-retry-count`, as OpenAI's libraries do), within `keep_s`;
* in the same named session, an answer that has not been delivered whole: it may be on its way;
* without a named session, an answer that nobody waits for any more and nobody got whole.

An answer that failed is nobody's. Two equal requests that both got their answers are two calls.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from connectors.gateway.answers import Answer
from connectors.gateway.errors import invalid

MAX_KEPT: Final = 4096
"""Answers; the oldest go first."""

Known = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """`owner`: of the key. `session`: as the client named it; None where it named none."""

    owner: str
    session: str | None
    digest: bytes
    idempotency_key: str | None = None
    number: int = 0

    @property
    def known_by(self) -> Known:
        if self.idempotency_key is not None:
            return (self.owner, "key", self.idempotency_key)
        named = () if self.session is None else (self.session,)
        return (self.owner, "body", self.digest.hex(), *named)


class Retries:
    """Keeps answers for `keep_s` after they ended."""

    def __init__(self, keep_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_s, self._clock = keep_s, clock
        self._kept: OrderedDict[Known, Answer] = OrderedDict()

    def find(self, asked: Try) -> Answer | None:
        """The answer to join; None when it is a call of its own. Refused (400) where an idempotency
        key comes again with another body."""
        self._trim()
        answer = self._kept.get(asked.known_by)
        if answer is None or answer.error is not None or self._is_old(answer):
            return None
        if asked.idempotency_key is not None:
            if answer.asked.digest != asked.digest:
                raise invalid(
                    "the idempotency key was used for another body",
                    "idempotency-key",
                    "idempotency_key_reused",
                )
            return answer
        if asked.number > 0 or (asked.session is not None and not answer.delivered):
            return answer
        return None if answer.delivered or answer.is_followed else answer

    def keep(self, asked: Try, answer: Answer) -> None:
        self._kept.pop(asked.known_by, None)
        self._kept[asked.known_by] = answer
        self._trim()

    def _is_old(self, answer: Answer) -> bool:
        return answer.ended_at is not None and self._clock() > answer.ended_at + self._keep_s

    def _trim(self) -> None:
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if len(self._kept) <= MAX_KEPT and not self._is_old(oldest):
                return
            self._kept.popitem(last=False)
