"""Long work beside a bytewax worker: one coroutine an item, on an asyncio loop in a thread.

    source ─(key = partition)─▶ on_batch: submit ──▶ loop thread: work(item) ──▶ completions
                                     │ cancel                   ▲
                                     └──▶ item.orders ──────────┘
                                on_notify: drain ◀───────── every poll_s while work is pending
                                snapshot: offsets in flight, never payloads

Nothing here limits what is in flight: the source's grants do. A restarted worker reads the items in
flight again by their offsets and submits them anew. A cancel reaches the work of its item as an
order; of one that has ended it changes nothing, nor the second time. What it demands is in the
snapshot until the item ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Generic, TypeVar

from bytewax.operators import StatefulBatchLogic

from connectors.kafka.orders import Orders
from connectors.kafka.source import STOP, Item, StopFlag
from connectors.records import Cancel, Origin, Version

DRAIN_S: Final = 0.05
"""Between two looks at what has ended: what ends in it is written, and read, together, and each
write and read costs more than a record."""

X = TypeVar("X")
InFlight = tuple[int, int, tuple[int, int] | None] | tuple[int, int, tuple[int, int] | None, str]
"""Partition, offset, min_version (incarnation, number), and of an item that is to be closed the
reason."""

_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


def work_loop() -> asyncio.AbstractEventLoop:
    """This process's loop for work, on a daemon thread, started at the first call."""
    global _loop
    with _loop_lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="work", daemon=True).start()
        return _loop


async def _cancel_work() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def end_work(close: Callable[[], Coroutine[Any, Any, None]], timeout_s: float = 5.0) -> None:
    """Cancels all work of this process, which the snapshot still holds, then awaits `close()` on
    the same loop: clients end without open connections. Gives up after `timeout_s`."""

    async def end() -> None:
        await _cancel_work()
        await close()

    with contextlib.suppress(TimeoutError):
        asyncio.run_coroutine_threadsafe(end(), work_loop()).result(timeout_s)


class AsyncWork(Generic[X]):
    """The builder for `op.stateful_batch(step, items, AsyncWork(...))`, whose keys are partitions.

    work     one coroutine an item; its outputs go downstream as `(key, output)`. Data it cannot
             handle it turns into outputs: an exception is a broken invariant, raised in the worker
    refetch  (partition, offset) -> Item, for what a dead worker had in flight (`ItemReader`)
    poll_s   how often completions are looked for while work is pending
    """

    def __init__(
        self,
        work: Callable[[Item], Awaitable[Sequence[X]]],
        refetch: Callable[[int, int], Item],
        poll_s: float = DRAIN_S,
        *,
        stop: StopFlag = STOP,
    ) -> None:
        self._work, self._refetch, self._poll_s, self._stop = work, refetch, poll_s, stop

    def __call__(self, resume_state: tuple[InFlight, ...] | None) -> AsyncLogic[X]:
        logic = AsyncLogic(self._work, self._poll_s, self._stop)
        for partition, offset, version, *close in resume_state or ():
            item = self._refetch(partition, offset)
            min_version = Version(*version) if version is not None else None
            logic.submit(replace(item, min_version=min_version, resubmitted=True))
            for reason in close:
                cancel = Cancel(str(item.origin), "close", reason)
                logic.obey(replace(item, record=None, cancel=cancel))
        return logic


class AsyncLogic(StatefulBatchLogic, Generic[X]):  # type: ignore[misc]
    def __init__(
        self, work: Callable[[Item], Awaitable[Sequence[X]]], poll_s: float, stop: StopFlag
    ) -> None:
        self._work, self._poll_s, self._stop = work, poll_s, stop
        self._in_flight: dict[Origin, Item] = {}
        self._done: deque[tuple[Item, Future[Sequence[X]]]] = deque()  # filled by the loop's thread
        self._some_done = threading.Event()

    def submit(self, item: Item) -> None:
        item = replace(item, orders=Orders(work_loop()))
        self._in_flight[item.origin] = item
        future = asyncio.run_coroutine_threadsafe(self._run(item), work_loop())
        future.add_done_callback(lambda finished: self._finished(item, finished))

    def obey(self, order: Item) -> None:
        """What `order.cancel` demands of an item in flight: to be closed, or to start again under
        the newer `order.min_version`. It changes nothing that has ended or was demanded before."""
        item, cancel = self._in_flight.get(order.origin), order.cancel
        if item is None or item.orders is None or cancel is None or item.cancel is not None:
            return
        if cancel.then == "close":
            self._in_flight[item.origin] = replace(item, cancel=cancel)
        elif _is_newer(order.min_version, item.min_version):
            self._in_flight[item.origin] = replace(item, min_version=order.min_version)
        else:
            return
        item.orders.give(cancel, order.min_version)

    def on_batch(self, values: list[Item]) -> tuple[list[X], bool]:
        for item in values:
            if item.cancel is None:
                self.submit(item)
            else:
                self.obey(item)
        return self._drain(), StatefulBatchLogic.RETAIN

    def on_notify(self) -> tuple[list[X], bool]:
        return self._drain(), StatefulBatchLogic.RETAIN

    def on_eof(self) -> tuple[list[X], bool]:
        """Stopping: what is in flight stays in the snapshot. Else the input ended: finish it."""
        outputs = self._drain()
        while self._in_flight and not self._stop.is_set():
            self._some_done.wait(self._poll_s)
            outputs += self._drain()
        return outputs, StatefulBatchLogic.RETAIN

    def notify_at(self) -> datetime | None:
        if not self._in_flight:
            return None
        return datetime.now(UTC) + timedelta(seconds=self._poll_s)

    def snapshot(self) -> tuple[InFlight, ...]:
        return tuple(map(_in_flight, self._in_flight.values()))

    async def _run(self, item: Item) -> Sequence[X]:
        return await self._work(item)

    def _finished(self, item: Item, future: Future[Sequence[X]]) -> None:
        self._done.append((item, future))
        self._some_done.set()

    def _drain(self) -> list[X]:
        self._some_done.clear()
        outputs: list[X] = []
        while self._done:
            item, future = self._done.popleft()
            outputs += future.result()
            del self._in_flight[item.origin]
        return outputs


def _in_flight(item: Item) -> InFlight:
    version = item.min_version
    pair = None if version is None else (version.incarnation, version.number)
    place = (item.origin.partition, item.origin.offset, pair)
    return place if item.cancel is None else (*place, item.cancel.reason)


def _is_newer(version: Version | None, than: Version | None) -> bool:
    return version is not None and (than is None or version > than)
