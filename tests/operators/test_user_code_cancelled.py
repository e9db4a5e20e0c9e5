"""User code that nobody waits for any more is ended, or never begins."""

from __future__ import annotations

import asyncio
import threading

from operators.user_code import UserCode


def lanes() -> int:
    return sum(thread.name == "cancelled-lane" for thread in threading.enumerate())


async def until_lanes(count: int) -> None:
    async with asyncio.timeout(20):
        while lanes() != count:
            await asyncio.sleep(0.01)


def test_a_call_cancelled_before_it_began_never_runs_and_the_lane_it_waited_for_can_end() -> None:
    release, held, ran = threading.Event(), threading.Event(), threading.Event()

    async def holds() -> None:
        held.set()
        release.wait(30)

    async def runs() -> None:
        ran.set()

    async def main() -> None:
        user_code = UserCode("cancelled-lane")
        first = asyncio.create_task(user_code.run(holds))
        await asyncio.to_thread(held.wait, 30)
        behind = asyncio.create_task(user_code.run(runs))
        await asyncio.sleep(0)  # now it waits behind `first`
        behind.cancel()
        await asyncio.gather(behind, return_exceptions=True)
        elsewhere = asyncio.create_task(user_code.run(asyncio.Event().wait))
        await until_lanes(2)  # the held one has been left
        release.set()
        await first
        await until_lanes(1)
        elsewhere.cancel()
        await asyncio.gather(elsewhere, return_exceptions=True)

    try:
        asyncio.run(main())
    finally:
        release.set()
    assert not ran.is_set()
