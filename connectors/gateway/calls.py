"""From a request to its answer and its record.

    asked ─▶ session, prompt ids ─▶ engine ─▶ answer complete ─▶ recorded ─▶ answer ended

The record is written before the last of the answer is sent, so nobody has a whole answer that the
log lacks. A call that fails, by an engine or a refusal, is not recorded: its client has no answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from connectors.branches import OWN_METADATA
from connectors.engines.pool import EnginePool
from connectors.engines.types import (
    Completion,
    EngineError,
    GenerateRequest,
    RequestRefused,
    VersionGone,
)
from connectors.gateway.answers import Answer
from connectors.gateway.asked import Asked, conversation
from connectors.gateway.errors import Refused, invalid, no_model, unavailable, unsupported
from connectors.gateway.log import TrafficLog
from connectors.gateway.metrics import Metrics
from connectors.gateway.sessions import Prompted, Sessions
from connectors.records import Version
from connectors.text import Text, TextError
from connectors.traffic import Call, Choice, End

log = logging.getLogger(__name__)

DELIVERED: Final = OWN_METADATA + "delivered"
"""Metadata of a call: `false` where no client was there any more when its answer was whole."""
OUTAGE_S: Final = 30.0
"""An answer that no engine can go on with for so long fails."""
LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, beside the body. `session` and `user` are names of the log, `shown` is the session
    as the client knows it; None: the messages tell."""

    owner: str
    session: str | None
    shown: str | None
    task: str
    user: str
    key: str
    is_recorded: bool
    ends_session: bool


class Calls:
    """For one asyncio loop. `context_tokens`: of prompt and answer together."""

    def __init__(
        self,
        text: Text,
        pool: EnginePool,
        sessions: Sessions,
        traffic: TrafficLog,
        metrics: Metrics,
        context_tokens: int,
    ) -> None:
        self._text, self._pool, self._sessions = text, pool, sessions
        self._traffic, self._metrics, self._context_tokens = traffic, metrics, context_tokens
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, caller: Caller, asked: Asked, pinned: Version | None) -> Answer:
        """The answer, on its way. Refused when the request cannot become ids."""
        asked_at = time.time()
        prompted = self._prompted(caller, asked)
        ids = prompted.ids
        if len(ids) >= self._context_tokens:
            raise invalid(
                f"This model's maximum context length is {self._context_tokens} tokens; your "
                f"messages have {len(ids)}, and an answer needs one more",
                "messages",
                "context_length_exceeded",
            )
        session = prompted.session.name
        answer = Answer(
            self._traffic.new_call_id(caller.owner, session),
            caller.shown or session.removeprefix(f"{caller.owner}:"),
            asked,
            len(ids),
            self._text.decode,
        )
        request = GenerateRequest(
            request_id=f"{answer.id}/{_digest(ids)}",
            token_ids=ids,
            num_samples=asked.num_samples,
            sampling=asked.sampling,
            min_version=pinned,
            max_version=pinned,
            session=session,
        )
        work = self._serve(answer, request, prompted, caller, asked_at)
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return answer

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def close(self, limit_s: float) -> None:
        """Waits for the answers on their way, then gives them up."""
        if self._running:
            await asyncio.wait(self._running, timeout=limit_s)
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _prompted(self, caller: Caller, asked: Asked) -> Prompted:
        tools = asked.conversation.tools
        try:
            prompted = self._sessions.prompt(caller.owner, caller.session, asked.conversation)
        except TextError as error:
            raise invalid(str(error), "messages") from error
        names = [str(tool["function"].get("name", "")) for tool in tools]
        if any(name not in prompted.written for name in names):
            raise unsupported("tools", "the model's chat template writes none")
        return prompted

    async def _serve(
        self,
        answer: Answer,
        request: GenerateRequest,
        prompted: Prompted,
        caller: Caller,
        asked_at: float,
    ) -> None:
        error = None
        try:
            answer.complete(await self._generated(answer, request))
            self._finish(answer, request, prompted, caller, asked_at)
        except Refused as refused:
            error = refused
        except asyncio.CancelledError:
            error = unavailable("the gateway is stopping")
            raise
        except Exception as fault:  # a fault of ours: whoever waits gets an answer
            log.exception("%s failed", answer.id)
            error = Refused(500, f"{type(fault).__name__}: {fault}", code="internal_error")
        finally:
            answer.end(error)

    async def _generated(self, answer: Answer, request: GenerateRequest) -> tuple[Completion, ...]:
        """Refused when no engine gives a whole answer."""
        ask = (
            self._pool.stream(request, answer.told)
            if answer.asked.stream
            else self._pool.generate(request)
        )
        try:
            made = await self._unless_held_up(request.request_id, ask)
        except VersionGone as error:
            held = [str(version) for version in await self._pool.versions()]
            raise no_model(answer.asked.model, held) from error
        except RequestRefused as error:
            raise invalid(str(error), code="refused_by_engine") from error
        except EngineError as error:
            raise Refused(502, f"the engines failed: {error}", code="engine_failed") from error
        if any(done.finish_reason not in ("stop", "length") for done in made):
            raise Refused(502, "an engine gave the answer up", code="engine_failed")
        return made

    async def _unless_held_up(
        self, request_id: str, ask: Coroutine[Any, Any, tuple[Completion, ...]]
    ) -> tuple[Completion, ...]:
        """What `ask` gives. Refused once an outage has kept it from going on for OUTAGE_S."""
        work = asyncio.ensure_future(ask)
        since: float | None = None
        try:
            while True:
                done, _ = await asyncio.wait([work], timeout=LOOK_S)
                if done:
                    return work.result()
                now = time.monotonic()
                since = (since or now) if self._pool.held_up(request_id) else None
                if since is not None and now - since >= OUTAGE_S:
                    raise unavailable("no engine can answer now")
        finally:
            work.cancel()

    def _finish(
        self,
        answer: Answer,
        request: GenerateRequest,
        prompted: Prompted,
        caller: Caller,
        asked_at: float,
    ) -> None:
        """Everything that an answer leaves behind: in the session, in the log, in the metrics."""
        spell = partial(self._text.decode, special=True)
        choices = tuple(_choice(answer, number, spell) for number in range(len(answer.made)))
        for choice, made in zip(choices, answer.made, strict=True):
            wrote = choice.message["content"] if choice.text is None else choice.text
            (got,) = conversation([choice.message]).messages
            self._sessions.answered(prompted, made, got, wrote)
        session, now = prompted.session.name, time.time()
        if caller.is_recorded:
            own = {} if answer.is_followed else {DELIVERED: "false"}
            given = {
                k: v for k, v in answer.asked.metadata.items() if not k.startswith(OWN_METADATA)
            }
            call = Call(
                id=answer.id,
                session=session,
                task=caller.task,
                time=asked_at,
                finished_at=now,
                messages=answer.asked.said,
                choices=choices,
                tools=list(answer.asked.conversation.tools),
                model=str(answer.version),
                prompt_ids=request.token_ids,
                temperature=request.sampling.temperature,
                user=caller.user,
                key=caller.key,
                metadata=given | own,
            )
            self._traffic.write_call(call, prompted.written)
        if caller.ends_session:
            self._sessions.forget(session)
            if caller.is_recorded:
                self._traffic.write_end(End(session=session, time=now))
        self._metrics.tokens.labels("prompt").inc(answer.num_prompt)
        self._metrics.tokens.labels("completion").inc(answer.num_generated)
        self._metrics.seconds.observe(now - asked_at)


def _choice(answer: Answer, number: int, spell: Any) -> Choice:
    made, message = answer.made[number], answer.message(number)
    ids = made.token_ids[:-1] if made.finish_reason == "stop" else made.token_ids
    wrote = spell(ids)
    return Choice(
        message=message,
        text=None if wrote == message["content"] and "tool_calls" not in message else wrote,
        token_ids=made.token_ids,
        logprobs=made.logprobs,
        segments=made.segments,
        finish_reason=answer.finish_reason(number),
    )


def _digest(ids: tuple[int, ...]) -> str:
    return hashlib.blake2b(np.array(ids, np.int32).tobytes(), digest_size=8).hexdigest()
