"""Near-line: live traffic and what was said about it in, groups out, into `rollouts`.

agent-traffic ┐                                                       ┌─▶ rollouts ─▶ reward half
              ├▶ [sessions, a partition each] ─▶ due ─▶ [write] ──────┤
feedback ─────┘      ▲ facts                                          └─▶ dead-letters
                     └──── of what was written: now, and by a dead process

One logic a partition holds the fold (operators/sessions.py); what it finds due is written beside
the worker (pipelines/nearline_work.py) and becomes a fact as it goes downstream. The snapshot is
the fold's state and an end of `rollouts` from which on there may be facts it does not know: a
process that starts again reads those back and folds them in before it emits anything.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import bytewax.operators as op
import msgspec
from bytewax.dataflow import Dataflow
from bytewax.operators import StatefulBatchLogic

from connectors.kafka.async_op import DRAIN_S, work_loop
from connectors.kafka.client import Cluster
from connectors.kafka.dead_letters import dead_letter
from connectors.kafka.merged import MergedSource
from connectors.kafka.source import STOP, Item, StopFlag
from connectors.records import decode_as
from connectors.traffic import Call, Feedback, decode_traffic
from operators.session_state import Job, State
from operators.sessions import Sessions
from pipelines.facts import STAGE, facts_since
from pipelines.nearline_work import Settings, Writing, Written
from pipelines.routing import Routed, write

log = logging.getLogger(__name__)

TICK_S: Final = 0.5
"""Between two looks at what time alone brings."""
ASK_S: Final = 10.0
"""Between two questions for the end of `rollouts`: what is read back after a kill."""
Clock = Callable[[], float]
Key = tuple[str, str | int]
"""Of work under way: a session by its name, feedback that lapsed by its offset."""


class Snapshot(msgspec.Struct):
    """`rollouts`: what stands before this offset is known to `state`."""

    partition: int
    rollouts: int
    state: State


def nearline_flow(
    cluster: Cluster, settings: Settings, stop: StopFlag = STOP, clock: Clock = time.time
) -> Dataflow:
    """The whole stage. Its step names are in the snapshots: never rename one."""
    flow = Dataflow("headwater")
    source = MergedSource(cluster, ("agent-traffic", "feedback"), stop=stop)
    log = op.input("traffic", flow, source)
    logic = Partitions(cluster, settings, stop, clock)
    written = op.stateful_batch("sessions", log, logic)
    write(STAGE, written, cluster, "rollouts")
    return flow


class Partitions:
    """The builder for `op.stateful_batch`, whose keys are partitions."""

    def __init__(self, cluster: Cluster, settings: Settings, stop: StopFlag, clock: Clock) -> None:
        self._cluster, self._settings, self._stop, self._clock = cluster, settings, stop, clock
        self._writing: Writing | None = None

    def __call__(self, resume_state: bytes | None) -> PartitionLogic:
        if self._writing is None:
            made = asyncio.run_coroutine_threadsafe(self._on_loop(), work_loop())
            self._writing = made.result()
        known = None
        if resume_state is not None:
            known = msgspec.msgpack.decode(resume_state, type=Snapshot)
        return PartitionLogic(
            self._cluster, self._settings, self._writing, known, self._stop, self._clock
        )

    async def _on_loop(self) -> Writing:
        return Writing(self._cluster, self._settings)


class PartitionLogic(StatefulBatchLogic):  # type: ignore[misc]
    """`known` None: a new one, which learns its partition from its first item."""

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        writing: Writing,
        known: Snapshot | None,
        stop: StopFlag,
        clock: Clock,
    ) -> None:
        self._cluster, self._writing, self._stop = cluster, writing, stop
        self._traffic = cluster.topic("agent-traffic")
        self._state = known.state if known is not None else State()
        self._sessions = Sessions(settings.limits, self._state, clock)
        self._partition: int | None = None
        self._rollouts = 0
        self._asked_at = time.monotonic()
        self._in_flight: dict[Key, Job | None] = {}
        self._done: deque[tuple[Key, Future[Any]]] = deque()  # filled by the loop's thread
        self._some_done = threading.Event()
        if known is not None:
            self._begin(known.partition, known.rollouts)

    # --------------------------------------------------------------------------- called by bytewax
    def on_batch(self, values: list[Item]) -> tuple[list[Routed], bool]:
        if self._partition is None:
            self._begin(values[0].origin.partition, 0)
        letters = [letter for item in values for letter in self._take_in(item)]
        return letters + self._step(), StatefulBatchLogic.RETAIN

    def on_notify(self) -> tuple[list[Routed], bool]:
        self._sessions.tick()
        return self._step(), StatefulBatchLogic.RETAIN

    def on_eof(self) -> tuple[list[Routed], bool]:
        """Stopping: what is due stays in the snapshot. Else the input ended: what is due is
        written."""
        routed = self._step()
        while self._in_flight and not self._stop.is_set():
            self._some_done.wait(DRAIN_S)
            routed += self._step()
        return routed, StatefulBatchLogic.RETAIN

    def notify_at(self) -> datetime | None:
        pause_s = DRAIN_S if self._in_flight else TICK_S
        return datetime.now(UTC) + timedelta(seconds=pause_s)

    def snapshot(self) -> bytes:
        if self._partition is None:
            raise RuntimeError("a logic is made for an item")
        return msgspec.msgpack.encode(Snapshot(self._partition, self._rollouts, self._state))

    # ----------------------------------------------------------------------------------- in and out
    def _begin(self, partition: int, since: int) -> None:
        """Adopts what was written of the partition from there on."""
        facts, self._rollouts = facts_since(self._cluster, partition, since)
        self._partition = partition
        self._sessions.adopt(facts)
        if facts:
            log.info("partition %d: %d facts read back", partition, len(facts))

    def _take_in(self, item: Item) -> list[Routed]:
        """The dead letter of a record that is none of ours."""
        if item.record is None:
            return []
        offset, value = item.origin.offset, item.record.value
        is_traffic = item.origin.topic == self._traffic
        code = "bad_call" if is_traffic else "bad_feedback"
        try:
            if not is_traffic:
                self._sessions.feedback(offset, decode_as(value, Feedback))
                return []
            found = decode_traffic(value)
            if isinstance(found, Call):
                self._sessions.call(offset, found)
            else:
                self._sessions.end(found)
            return []
        except msgspec.DecodeError as error:
            message = str(error)
        except ValueError as error:
            code, message = "unknown_task", str(error)
        letter = dead_letter(self._cluster, item.origin, value, code=code, message=message)
        return [Routed("dead-letters", letter)]

    def _step(self) -> list[Routed]:
        """What has been written since the last step; sends out what has become due."""
        routed = self._drain()
        for name in self._sessions.take_touched():
            self._send_next(name)
        for offset, why in self._state.lapsed.items():
            key = ("feedback", offset)
            if key not in self._in_flight:
                self._send(key, None, self._writing.lapsed(self._here, offset, why))
        self._ask()
        return routed

    def _send_next(self, name: str) -> None:
        key = ("session", name)
        if key not in self._in_flight and (job := self._sessions.job(name)) is not None:
            self._send(key, job, self._writing(self._here, job))

    def _send(self, key: Key, job: Job | None, work: Coroutine[Any, Any, Any]) -> None:
        self._in_flight[key] = job
        future = asyncio.run_coroutine_threadsafe(work, work_loop())
        future.add_done_callback(lambda finished: self._finished(key, finished))

    def _finished(self, key: Key, future: Future[Any]) -> None:
        self._done.append((key, future))
        self._some_done.set()

    def _drain(self) -> list[Routed]:
        self._some_done.clear()
        routed: list[Routed] = []
        while self._done:
            key, future = self._done.popleft()
            job = self._in_flight.pop(key)
            made = future.result()
            if isinstance(made, Written):
                routed += self._settled(key[1], job, made)
            else:
                self._rollouts = made
        return routed

    def _settled(self, of: str | int, job: Job | None, made: Written) -> Sequence[Routed]:
        if job is None:
            self._state.lapsed.pop(int(of))
        elif made.fact is not None:
            self._sessions.adopt([made.fact])
        elif job.correction is not None:
            self._sessions.unchanged(job.name, job.correction)
        return made.routed

    def _ask(self) -> None:
        """What stands before the end that is asked for now was emitted before: it is known."""
        key = ("rollouts", self._here)
        if key not in self._in_flight and time.monotonic() - self._asked_at >= ASK_S:
            self._asked_at = time.monotonic()
            self._send(key, None, self._writing.end_of_rollouts(self._here))

    @property
    def _here(self) -> int:
        if self._partition is None:
            raise RuntimeError("a logic is made for an item")
        return self._partition
