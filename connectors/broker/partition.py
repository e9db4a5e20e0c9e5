"""A log among concurrent requests: appends one after another, readers woken when there is more.

Small appends run on the event loop, where they take microseconds; large or synced ones in a thread,
so that other connections are served meanwhile.
"""

from __future__ import annotations

import asyncio

from connectors.broker.log import Log
from connectors.broker.notices import notice

INLINE_APPEND_BYTES = 256 << 10


class Partition:
    def __init__(self, log: Log) -> None:
        self.log = log
        self._writing = asyncio.Lock()
        self._failing = False
        self._waiting: set[asyncio.Future[None]] = set()

    async def append(self, data: bytes) -> int:
        """`Log.append`, in turn."""
        async with self._writing:
            try:
                if self.log.sync or len(data) > INLINE_APPEND_BYTES:
                    base_offset = await asyncio.to_thread(self.log.append, data)
                else:
                    base_offset = self.log.append(data)
            except OSError as error:
                self._tell(error)
                raise
            self._tell(None)
        self.wake()
        return base_offset

    def _tell(self, failure: OSError | None) -> None:
        """Once when writing begins to fail, once when it is well again."""
        if failure is not None and not self._failing:
            notice(f"{self.log.folder}: cannot write: {failure.strerror}")
        elif failure is None and self._failing:
            notice(f"{self.log.folder}: writes again")
        self._failing = failure is not None

    async def trim(self, offset: int) -> int:
        """`Log.trim`, in turn; -1 means the log's end."""
        async with self._writing:
            end_offset = self.log.end_offset
            return await asyncio.to_thread(self.log.trim, end_offset if offset == -1 else offset)

    def watch(self, change: asyncio.Future[None]) -> None:
        """`change` is set when something is appended, or by `wake`."""
        self._waiting.add(change)

    def unwatch(self, change: asyncio.Future[None]) -> None:
        self._waiting.discard(change)

    def wake(self) -> None:
        for change in self._waiting:
            if not change.done():
                change.set_result(None)
        self._waiting.clear()
