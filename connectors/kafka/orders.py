"""What is announced of an item while it is worked on."""

from __future__ import annotations

import asyncio

from connectors.records import Cancel, Version


class Orders:
    """Given in the worker's thread, taken on the `loop` of the work, in the order they were
    given."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._given: asyncio.Queue[tuple[Cancel, Version | None]] = asyncio.Queue()

    def give(self, cancel: Cancel, version: Version | None) -> None:
        """`version`: of the announcement."""
        self._loop.call_soon_threadsafe(self._given.put_nowait, (cancel, version))

    async def take(self) -> tuple[Cancel, Version | None]:
        """The next one; waits for it."""
        return await self._given.get()
