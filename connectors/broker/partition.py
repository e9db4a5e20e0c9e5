"""A log among concurrent requests: writes one after another, readers woken when something changed.

Small appends run on the event loop, where they take microseconds; large or synced ones in a thread,
so that other connections are served meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from connectors.broker.errors import ErrorCode, Refused
from connectors.broker.log import Log
from connectors.broker.notices import notice

INLINE_APPEND_BYTES = 256 << 10
T = TypeVar("T")


class Partition:
    def __init__(self, log: Log) -> None:
        self.log = log
        self._writing = asyncio.Lock()
        self._closed = False
        self._failing = False
        self._waiting: set[asyncio.Future[None]] = set()

    async def append(self, data: bytes, append_ms: int = -1) -> int:
        """`Log.append`, in turn."""
        in_thread = self.log.sync or len(data) > INLINE_APPEND_BYTES
        base_offset = await self._write(partial(self.log.append, data, append_ms), in_thread)
        self._tell(None)
        return base_offset

    async def trim(self, offset: int) -> int:
        """`Log.trim`, in turn; -1 means the log's end."""
        log = self.log
        return await self._write(lambda: log.trim(log.end_offset if offset == -1 else offset))

    async def retain(self, now_ms: int) -> None:
        """`Log.retain`, in turn, when there is something to remove."""
        if self.log.outdated(now_ms) > self.log.start_offset:
            await self._write(partial(self.log.retain, now_ms))

    async def close(self) -> None:
        """Returns when nothing is being written; from then on writes are refused."""
        async with self._writing:
            self._closed = True

    def reopen(self) -> None:
        self._closed = False

    async def _write(self, change: Callable[[], T], in_thread: bool = True) -> T:
        async with self._writing:
            if self._closed:
                # Its folder may be another topic's of the same name by now.
                raise Refused(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "the topic is being deleted")
            try:
                result = await asyncio.to_thread(change) if in_thread else change()
            except OSError as error:
                self._tell(error)
                raise
        self.wake()
        return result

    def _tell(self, failure: OSError | None) -> None:
        """Once when writing begins to fail, once when it is well again."""
        if failure is not None and not self._failing:
            notice(f"{self.log.folder}: cannot write: {failure.strerror}")
        elif failure is None and self._failing:
            notice(f"{self.log.folder}: writes again")
        self._failing = failure is not None

    def watch(self, change: asyncio.Future[None]) -> None:
        """`change` is set when something is written or removed, or by `wake`."""
        self._waiting.add(change)

    def unwatch(self, change: asyncio.Future[None]) -> None:
        self._waiting.discard(change)

    def wake(self) -> None:
        for change in self._waiting:
            if not change.done():
                change.set_result(None)
        self._waiting.clear()
