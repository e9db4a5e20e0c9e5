"""A partition among concurrent requests: appends in turn, nobody else held up."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from connectors.broker.log import Log
from connectors.broker.partition import Partition
from tests.connectors.broker_wire import batch

DEADLINE_S = 30.0


class BlockingLog(Log):
    """Its appends wait, as for a slow disk, until they are let go."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync=True)
        self.let_go = threading.Event()
        self.num_at_once = 0
        self.most_at_once = 0

    def append(self, data: bytes, append_ms: int = -1) -> int:
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        assert self.let_go.wait(DEADLINE_S)
        try:
            return super().append(data, append_ms)
        finally:
            self.num_at_once -= 1


def test_a_slow_disk_holds_up_its_partition_in_turn_and_no_other(tmp_path):
    slow_log = BlockingLog(tmp_path / "slow")

    async def scenario() -> list[int]:
        slow, quick = Partition(slow_log), Partition(Log(tmp_path / "quick"))
        waiting = [asyncio.create_task(slow.append(batch([b"%d" % n]))) for n in range(3)]
        for number in range(5):
            assert await quick.append(batch([b"x"])) == number
            await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        slow_log.let_go.set()
        return await asyncio.gather(*waiting)

    assert asyncio.run(scenario()) == [0, 1, 2]
    assert slow_log.most_at_once == 1


def test_a_change_wakes_every_watcher_once(tmp_path):
    async def scenario() -> None:
        partition = Partition(Log(tmp_path))
        loop = asyncio.get_running_loop()
        changes = [loop.create_future() for _ in range(3)]
        for change in changes:
            partition.watch(change)
        partition.unwatch(changes[2])
        await partition.append(batch([b"x"]))
        assert [change.done() for change in changes] == [True, True, False]
        await partition.append(batch([b"y"]))

    asyncio.run(scenario())
