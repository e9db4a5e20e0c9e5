"""The rollout operator: a prompt record in, its terminal out (`Group` or `Closed`).

    record ─▶ parse ─▶ n agents side by side, each with an `llm` of its own ─▶ rows ─▶ Group
                │         ▲ └─ order: requeue ─┘ └─ order: close ─▶ Closed
                └─ malformed, unknown task, too long: dead letter + Closed

One coroutine a record, exactly one terminal a call. What is the data's or the user's fault closes
the group with a reason; an engine outage waits inside the engine client; anything else is a
broken invariant and raises. An order cancels the group's requests: the group closes, or starts
again under a newer version."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import msgspec
import numpy as np

from connectors.branches import BRANCH, OWN_METADATA, TRANSCRIPT, Row, one_turn
from connectors.engines.types import Engine, EngineError, Sampling
from connectors.records import (
    REASONS,
    Cancel,
    Closed,
    Group,
    Origin,
    Prompt,
    Trajectory,
    Version,
    decode_as,
)
from operators.agents import BUILT_IN, Agent, ContextFull, Outcome, Tools, single_turn
from operators.llm import EngineLLM, Requests, Session, Text, derive_seed
from operators.together import together
from operators.user_code import TookTooLong, UserCode, clean, said

AGENT_RETRIES: Final = 2
RETRY_PAUSE_S: Final = 0.1  # doubled each time
CAP_TICK_S: Final = 1.0  # how often the time cap's clock asks whether it stands

Order = tuple[Cancel, Version | None]
"""What was announced of a group, and the version that was announced with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    agent: Agent
    group_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`sampling.stop_ids` empty means the tokenizer's. `time_cap_s` bounds a group's whole rollout,
    however often it is requeued, without the time in which an outage holds up one of its
    requests."""

    seed: int
    sampling: Sampling
    context_tokens: int
    time_cap_s: float | None = None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Why the record's bytes go to `dead-letters`: one of DEAD_LETTER_CODES, and the details."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Rolled:
    terminal: Group | Closed
    dead_letter: DeadLetter | None = None


class BadRecord(Exception):
    """The record can never be rolled out."""

    def __init__(self, code: str, reason: str, message: str, task: str = "") -> None:
        super().__init__(message)
        self.code, self.reason, self.task = code, reason, task


class _Close(Exception):
    """The group ends untrained."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class _Job:
    """One group under way. `left_s` is what the time cap leaves it. `requests` may be in flight."""

    group_id: str
    origin: Origin
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    task: AgentTask
    min_version: Version | None
    attach: bool
    left_s: float
    created_at: float
    requests: list[Requests] = field(default_factory=list)


class Rollout:
    """Use it on the engine's event loop."""

    def __init__(
        self,
        settings: Settings,
        tasks: Mapping[str, AgentTask],
        engine: Engine,
        text: Text,
        user_code: UserCode,
        tools: Tools | None = None,
    ) -> None:
        stops = settings.sampling.stop_ids or text.stop_ids
        self._sampling = msgspec.structs.replace(settings.sampling, stop_ids=tuple(stops))
        self._settings, self._tasks, self._engine, self._text = settings, tasks, engine, text
        self._user_code, self._tools = user_code, tools or Tools()

    async def __call__(
        self,
        value: bytes | None,
        origin: Origin,
        min_version: Version | None,
        resubmitted: bool = False,
        orders: Callable[[], Awaitable[Order]] | None = None,
    ) -> Rolled:
        """The terminal of the prompt at `origin`. `value` None: the broker holds no record there.
        `resubmitted` work asks the engine for what an earlier process had begun. `orders`: the next
        one that is given, waited for; one that comes after the terminal changes nothing."""
        group_id = str(origin)
        if value is None:
            message = "the log holds no record at this offset"
            return Rolled(Closed.now(group_id, "no_record", message))
        try:
            prompt, ids = self.parse(value)
        except BadRecord as bad:
            closed = Closed.now(group_id, bad.reason, str(bad), bad.task)
            return Rolled(closed, DeadLetter(bad.code, str(bad)))
        job = _Job(
            group_id, origin, prompt, ids, self._tasks[prompt.task], min_version, resubmitted,
            self._settings.time_cap_s or math.inf, time.time(),
        )  # fmt: skip
        while True:
            ended = await self._until_ordered(job, orders)
            if isinstance(ended, Group):
                return Rolled(ended)
            # Not when this coroutine is itself cancelled: the next process attaches to its
            # requests.
            await asyncio.gather(*(sent.cancel() for sent in job.requests))
            if isinstance(ended, Closed):
                return Rolled(ended)
            cancel, version = ended
            if cancel.then == "close":
                return Rolled(_cancelled(job, cancel))
            job = replace(
                job, min_version=version, attach=False, created_at=time.time(), requests=[]
            )

    async def _until_ordered(
        self, job: _Job, orders: Callable[[], Awaitable[Order]] | None
    ) -> Group | Closed | Order:
        """The terminal, or the order that came before it."""
        awaited: list[Awaitable[Group | Closed | Order]] = [self._terminal(job)]
        if orders is not None:
            awaited.append(orders())
        if job.left_s < math.inf:
            awaited.append(self._time_up(job))
        ends = [asyncio.ensure_future(end) for end in awaited]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return next(end for end in ends if end.done()).result()
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    async def _time_up(self, job: _Job) -> Closed:
        """The group's end at its time cap. The clock stands while an outage holds up a request of
        the group: an outage must not cost a prompt."""
        now = asyncio.get_running_loop().time
        while job.left_s > 0:
            began = now()
            try:
                await asyncio.sleep(min(job.left_s, CAP_TICK_S))
            finally:  # an order may come before the tick
                if not any(sent.held_up for sent in job.requests):
                    job.left_s -= now() - began
        message = f"the rollout took longer than {self._settings.time_cap_s:g} s"
        return Closed.now(job.group_id, "time_cap", message, job.prompt.task)

    async def _terminal(self, job: _Job) -> Group | Closed:
        try:
            rows = await self._trajectories(job)
        except _Close as end:
            return Closed.now(job.group_id, end.reason, str(end), job.prompt.task)
        return Group(group_id=job.group_id, prompt=job.prompt, trajectories=tuple(rows))

    def parse(self, value: bytes) -> tuple[Prompt, tuple[int, ...]]:
        """The prompt and its ids; BadRecord with the dead letter's code and the group's
        reason."""
        try:
            prompt: Prompt = decode_as(value, Prompt)
        except msgspec.ValidationError as error:
            raise BadRecord("bad_prompt", "malformed", str(error)) from error
        except msgspec.DecodeError as error:
            raise BadRecord("not_json", "malformed", str(error)) from error
        if prompt.task not in self._tasks:
            known = ", ".join(self._tasks)
            message = f"the configuration has no task {prompt.task!r}; it has {known}"
            raise BadRecord("unknown_task", "unknown_task", message, prompt.task)
        try:
            ids = self._text.encode_prompt(prompt)
        except ValueError as error:
            raise BadRecord("bad_prompt", "malformed", str(error), prompt.task) from error
        if len(ids) >= self._settings.context_tokens:
            message = (
                f"the prompt has {len(ids)} tokens and the context {self._settings.context_tokens}"
            )
            raise BadRecord("too_long", "too_long", message, prompt.task)
        return prompt, ids

    async def _trajectories(self, job: _Job) -> list[Trajectory]:
        """All rows of the group; the first failure ends the others."""
        if job.task.agent is single_turn:
            return await self._one_turn(job)
        each = [self._trajectory(job, k) for k in range(job.task.group_size)]
        return [row for rows in await together(each) for row in rows]

    async def _one_turn(self, job: _Job) -> list[Trajectory]:
        """What `single_turn` comes to for every trajectory: all of them ask the same, so they are
        samples of one request, which costs the engine and the way there once."""
        num, ids = job.task.group_size, job.prompt_ids
        room = min(self._sampling.max_tokens, self._settings.context_tokens - len(ids))
        sampling = msgspec.structs.replace(self._sampling, max_tokens=room)
        requests = Requests(self._engine, self._session(job, f"{num}x"))
        job.requests.append(requests)
        try:
            made = await requests.send(requests.make(ids, sampling, num))
        except EngineError as error:
            raise _Close("engine_failed", str(error)) from error
        return [_trajectory(job, f"{k}", one_turn(ids, one)) for k, one in enumerate(made)]

    async def _trajectory(self, job: _Job, k: int) -> list[Trajectory]:
        """The rows of trajectory k, the agent tried again when it raises; _Close otherwise."""
        for attempt in range(AGENT_RETRIES + 1):
            session = self._session(job, f"{k}.{attempt}" if attempt else f"{k}", k, attempt)
            llm = EngineLLM(self._engine, self._text, session, job.prompt_ids)
            job.requests.append(llm.requests)
            try:
                outcome = await self._run_agent(job, llm)
                return _branches(job, k, llm, outcome)
            except _Close:
                raise
            except EngineError as error:
                raise _Close("engine_failed", str(error)) from error
            except TookTooLong as error:
                raise _Close("agent_failed", str(error)) from error
            except Exception as error:  # an agent is foreign code: it raises anything
                failure = said(error)
            await llm.requests.cancel()
            await asyncio.sleep(RETRY_PAUSE_S * 2**attempt)
        raise _Close("agent_failed", f"{AGENT_RETRIES + 1} attempts, the last: {failure}")

    async def _run_agent(self, job: _Job, llm: EngineLLM) -> Outcome | None:
        agent = job.task.agent
        try:
            if agent in BUILT_IN.values():
                outcome = await agent(job.prompt, llm, self._tools)
            else:
                outcome = await self._user_code.run(partial(agent, job.prompt, llm, self._tools))
        except ContextFull as error:
            if not llm.rows():
                raise _Close("too_long", str(error)) from error
            return None
        if outcome is not None and not isinstance(outcome, Outcome):
            raise TypeError(f"an agent returns Outcome or None, not {type(outcome).__name__}")
        return outcome

    def _session(self, job: _Job, name: str, k: int = 0, attempt: int = 0) -> Session:
        # Work that may start from another version is other work.
        since = f"@{job.min_version}" if job.min_version is not None else ""
        return Session(
            name=f"{job.group_id}/{name}{since}",
            group_id=job.group_id,
            seed=derive_seed(self._settings.seed, job.group_id, k, attempt),
            sampling=self._sampling,
            context_tokens=self._settings.context_tokens,
            min_version=job.min_version,
            attach=job.attach,
        )


def _cancelled(job: _Job, cancel: Cancel) -> Closed:
    reason = cancel.reason if cancel.reason in REASONS else "cancelled"
    message = f"the trainer cancelled it: {cancel.reason}"
    return Closed.now(job.group_id, reason, message, job.prompt.task)


def check_agent(agent: Callable[..., object]) -> None:
    """TypeError unless `agent` is an async function: it has to await the llm."""
    if not inspect.iscoroutinefunction(inspect.unwrap(agent)):
        raise TypeError("an agent is an `async def rollout(prompt, llm, tools)`")


def _branches(job: _Job, k: int, llm: EngineLLM, outcome: Outcome | None) -> list[Trajectory]:
    """The rows of an agent that ended."""
    rows = llm.rows()
    if not rows:
        raise RuntimeError("the agent generated nothing")
    if llm.full:
        rows[-1] = replace(rows[-1], finish_reason="length")
    reward = outcome.reward if outcome is not None else None
    if reward is not None and not abs(reward) <= np.finfo(np.float32).max:  # NaN, too
        raise _Close("reward_nan", f"the agent gave itself reward {reward}")
    given = outcome.metadata if outcome is not None else {}
    metadata = {
        clean(str(a)): clean(str(b))
        for a, b in given.items()
        if not str(a).startswith(OWN_METADATA)
    }
    if sum(row.turns for row in rows) > 1:
        metadata[TRANSCRIPT] = _transcript(job.prompt, llm.messages)
    first = _trajectory(job, f"{k}", rows[0], reward, metadata)
    others = (
        _trajectory(job, f"{k}/{b}", row, reward, metadata | {BRANCH: str(b)})
        for b, row in enumerate(rows[1:], start=1)
    )
    return [first, *others]


def _trajectory(
    job: _Job,
    name: str,
    row: Row,
    reward: float | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Trajectory:
    return Trajectory(
        trajectory_id=f"{job.group_id}/{name}",
        group_id=job.group_id,
        task=job.prompt.task,
        tokens=row.tokens,
        loss_mask=row.loss_mask,
        logprobs=row.logprobs,
        segments=row.segments,
        origin=job.origin,
        reward=float("nan") if reward is None else float(reward),
        turns=row.turns,
        finish_reason=row.finish_reason,
        created_at=job.created_at,
        finished_at=row.finished_at,
        metadata=metadata or {},
    )


def _transcript(prompt: Prompt, messages: Sequence[Mapping[str, object]]) -> str:
    """What was said after the prompt's own messages, as JSON: for scorers and eyes, never
    trained."""
    said = len(prompt.messages) if prompt.messages is not None else 1
    return msgspec.json.encode(messages[said:]).decode()
