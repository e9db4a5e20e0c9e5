"""A job followed while it runs: its tokens, as the decoder appends them, to one client.

    decoder ── appends ──▶ sequences ──(bell)──▶ follow ── parts ──▶ told

A client that takes its time delays nobody and costs no memory: the parts it gets are larger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from connectors.engines.jobs import Job
from connectors.engines.types import Completion, Part


class Bell:
    """Rung on any thread, heard on the loop it was made on. Rings nobody heard yet are one."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._heard = asyncio.Event()
        self._ringing = False

    def ring(self) -> None:
        if not self._ringing and not self._loop.is_closed():
            self._ringing = True
            self._loop.call_soon_threadsafe(self._hear)

    def _hear(self) -> None:
        self._ringing = False  # first: what is appended from here on rings again
        self._heard.set()

    async def wait(self) -> None:
        """Until it was rung since the last time."""
        await self._heard.wait()
        self._heard.clear()


async def follow(job: Job, told: Callable[[Part], Awaitable[None]]) -> tuple[Completion, ...]:
    """The job's result, or the error it ends with, after `told` got the tokens of all its samples
    from the first on, each token once."""
    bell = Bell()
    num_told = [0] * len(job.samples)
    for sequence in job.samples:
        sequence.listeners = (*sequence.listeners, bell.ring)

    def ring(_: object) -> None:
        bell.ring()

    job.result.add_done_callback(ring)
    try:
        while True:
            ended = job.result.done()  # read first: what ended has all its tokens
            for sample, sequence in enumerate(job.samples):
                part = sequence.part(sample, num_told[sample])
                if part is not None:
                    num_told[sample] += len(part.token_ids)
                    await told(part)
            if ended:
                return job.result.result()
            await bell.wait()
    finally:
        job.result.remove_done_callback(ring)
        for sequence in job.samples:
            sequence.listeners = tuple(r for r in sequence.listeners if r != bell.ring)
