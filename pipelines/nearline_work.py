"""What is written of a session: its calls read again by their offsets, put together, labelled.

    Job ─▶ calls from `agent-traffic` ─▶ traces ─▶ log-probs ─▶ label ─▶ Group or Closed, and a Fact

Reading, tokenising and recomputing are one thread's; a user's function runs where all user code
does. Nothing of it holds the dataflow's worker up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from connectors.kafka.client import Cluster, OffsetGone, Reader
from connectors.kafka.dead_letters import dead_letter
from connectors.kafka.source import Item, ItemReader
from connectors.kafka.topics import num_partitions
from connectors.records import Closed, Group, Origin
from connectors.traffic import Call, decode_traffic
from operators.labels import Label, NoLabel, combined
from operators.live_groups import Episode, Room, ValueOf, group_of, value_id
from operators.session_state import Fact, Job, Limits, Seen
from operators.traces import Recompute, Tokenise, Traced, assemble, recomputed, same_question
from operators.user_code import UserCode
from pipelines.closures import note
from pipelines.facts import stated
from pipelines.routing import Routed

log = logging.getLogger(__name__)
R = TypeVar("R")

MAX_AT_ONCE: Final = 16
"""Jobs under way: user code runs in threads of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`values`: by task, what its values are of."""

    limits: Limits
    room: Room
    temperature: float
    tokenise: Tokenise
    recompute: Recompute
    values: dict[str, ValueOf]


@dataclass(frozen=True, slots=True)
class Written:
    """`fact` None: nothing that changes what is known was written."""

    routed: tuple[Routed, ...] = ()
    fact: Fact | None = None


class Writing:
    """Use it on one event loop."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster, self._settings = cluster, settings
        self._thread = ThreadPoolExecutor(1, "nearline")
        self._traffic = ItemReader(cluster, "agent-traffic")
        self._feedback = ItemReader(cluster, "feedback")
        self._rollouts: Reader | None = None
        self._code = UserCode("labels")
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)

    async def __call__(self, partition: int, job: Job) -> Written:
        async with self._slots:
            if job.correction is not None:
                return await self._correction(partition, job, job.correction)
            if job.late is not None:
                return await self._late(partition, job, job.late)
            return await self._session(partition, job)

    async def lapsed(self, partition: int, offset: int, why: str) -> Written:
        """The dead letter of feedback that counts for nothing."""
        item = await self._in_thread(self._feedback, partition, offset)
        value = item.record.value if item.record is not None else b""
        letter = dead_letter(self._cluster, item.origin, value, code="bad_feedback", message=why)
        return Written((Routed("dead-letters", letter),))

    async def end_of_rollouts(self, partition: int) -> int:
        """Of the partition, now."""
        return await self._in_thread(self._end_of_rollouts, partition)

    # ------------------------------------------------------------------------------ kinds of jobs
    async def _session(self, partition: int, job: Job) -> Written:
        origin = Origin(self._cluster.topic("agent-traffic"), partition, job.group)
        fact = Fact(group=job.group, until=job.until, judged=job.judged)
        if job.reason:
            message = "its user has had as many sessions trained as the cap takes"
            return self._closed(job, origin, job.reason, message, fact)
        try:
            label = await self._label(job)
        except NoLabel as error:
            return self._closed(job, origin, error.reason, str(error), fact)
        if label is None and job.task in self._settings.limits.rewarded:
            message = "nothing was said about it in time"
            return self._closed(job, origin, "no_label", message, fact)
        calls, rows = await self._in_thread(self._rows, partition, job.calls)
        made = self._made(job, origin, calls, rows, label)
        if isinstance(made, Group):
            return self._written(made, msgspec.structs.replace(fact, label=label))
        return self._written(made, msgspec.structs.replace(fact, reason=made.reason))

    async def _late(self, partition: int, job: Job, late: Seen) -> Written:
        origin = Origin(self._cluster.topic("agent-traffic"), partition, late.offset)
        fact = Fact(group=job.group, late=late.offset)
        if job.reason:
            message = f"it came after its session was closed as {job.reason}"
            return self._closed(job, origin, job.reason, message, fact)
        calls, rows = await self._in_thread(self._rows, partition, [late])
        known = await self._in_thread(self._calls, partition, (*job.calls, *job.alone))
        if retried := [c.id for c in known if calls and same_question(c, calls[0])]:
            message = f"another answer to its question was trained, {retried[0]}"
            return self._closed(job, origin, "nothing_to_train", message, fact)
        return self._written(self._made(job, origin, calls, rows, job.label), fact)

    async def _correction(self, partition: int, job: Job, offset: int) -> Written:
        origin = Origin(self._cluster.topic("feedback"), partition, offset)
        fact = Fact(group=job.group, correction=offset, label=job.label, judged=job.judged)
        try:
            label = await self._label(job)
        except NoLabel as error:
            return self._closed(job, origin, error.reason, str(error), fact)
        if label is None or job.label is None or label.value == job.label.value:
            return Written()
        calls, rows = await self._in_thread(self._rows, partition, job.calls)
        made = self._made(job, origin, calls, rows, label, corrects=True)
        if isinstance(made, Group):
            fact = msgspec.structs.replace(fact, label=label)
        return self._written(made, fact)

    # ------------------------------------------------------------------------------------- pieces
    async def _label(self, job: Job) -> Label | None:
        """None where the task is not labelled by feedback, or nothing gives one."""
        limits = self._settings.limits
        if job.task not in limits.rewarded:
            return None
        return await combined(limits.rules[job.task], job.signals, self._code) or job.fallback

    def _made(
        self,
        job: Job,
        origin: Origin,
        calls: Sequence[Call],
        rows: Sequence[Traced],
        label: Label | None,
        *,
        corrects: bool = False,
    ) -> Group | Closed:
        if not calls:
            message = "the log holds none of its calls any more"
            return Closed.now(str(origin), "no_record", message, job.task)
        group = Origin(self._cluster.topic("agent-traffic"), origin.partition, job.group)
        episode = Episode(
            group_id=str(origin),
            origin=origin,
            session=job.name,
            task=job.task,
            user=job.user,
            calls=calls,
            rows=rows,
            label=label,
            signals=job.signals,
            prompt_id=value_id(calls[0], self._settings.values[job.task]),
            corrects=str(group) if corrects else "",
            before=job.label if corrects else None,
        )
        return group_of(episode, self._settings.room)

    def _closed(self, job: Job, origin: Origin, reason: str, message: str, fact: Fact) -> Written:
        if fact.late is None and fact.correction is None:
            fact = msgspec.structs.replace(fact, reason=reason)
        return self._written(Closed.now(str(origin), reason, message, job.task), fact)

    def _written(self, terminal: Group | Closed, fact: Fact) -> Written:
        record = stated(self._cluster, note(terminal), fact)
        return Written((Routed("rollouts", record),), fact)

    # -------------------------------------------------------------------------------- in a thread
    async def _in_thread(self, call: Callable[..., R], *args: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    def _rows(self, partition: int, seen: Iterable[Seen]) -> tuple[list[Call], list[Traced]]:
        """The calls, by time, and their rows."""
        settings = self._settings
        calls = self._calls(partition, seen)
        rows, problems = assemble(
            calls, temperature=settings.temperature, tokenise=settings.tokenise
        )
        for problem in problems:
            log.warning("a call's text cannot be learnt from: %s", problem)
        return calls, [recomputed(traced, settings.recompute) for traced in rows]

    def _calls(self, partition: int, seen: Iterable[Seen]) -> list[Call]:
        """Those the log still holds, by time."""
        found = []
        for one in seen:
            try:
                item: Item = self._traffic(partition, one.offset)
            except OffsetGone:
                continue
            if item.record is not None:
                found.append(decode_traffic(item.record.value))
        return sorted((c for c in found if isinstance(c, Call)), key=lambda c: (c.time, c.id))

    def _end_of_rollouts(self, partition: int) -> int:
        if self._rollouts is None:
            partitions = num_partitions(self._cluster, "rollouts")
            offsets = dict.fromkeys(range(partitions), 0)
            self._rollouts = Reader(self._cluster, self._cluster.topic("rollouts"), offsets)
        return self._rollouts.ends()[partition]
