"""Retention and topic changes in process, on a clock of the test's own."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.broker.configs import LogConfig
from connectors.broker.errors import ErrorCode, Refused
from connectors.broker.log import Log
from connectors.broker.topics import Topics
from tests.connectors.broker_wire import batch

DEADLINE_S = 30.0
OF_TWO = LogConfig(segment_bytes=2 * len(batch([b"v"])), retention_ms=100)
"""Segments of two batches."""


def written(folder: Path, times_ms: Sequence[int], config: LogConfig) -> Log:
    """A batch of one record for each time."""
    log = Log(folder, config)
    for at_ms in times_ms:
        log.append(batch([b"v"], timestamps_ms=[at_ms]))
    return log


def bases(log: Log) -> list[int]:
    return [int(file.stem) for file in sorted(log.folder.glob("*.log"))]


class TestByTime:
    def test_whole_segments_go_once_their_newest_record_is_too_old(self, tmp_path):
        log = written(tmp_path, [10, 30, 20, 50, 60], OF_TWO)
        log.retain(130)
        assert (log.start_offset, bases(log)) == (0, [0, 2, 4])
        log.retain(131)
        assert (log.start_offset, bases(log)) == (2, [2, 4])
        reopened = Log(tmp_path, OF_TWO)
        assert (reopened.start_offset, reopened.end_offset) == (2, 5)

    def test_a_late_record_keeps_what_lies_behind_it_too(self, tmp_path):
        log = written(tmp_path, [10, 900, 20, 30, 40, 50], OF_TWO)
        log.retain(500)
        assert log.start_offset == 0
        log.retain(1001)
        assert (log.start_offset, log.end_offset) == (6, 6)

    def test_the_newest_segment_is_closed_before_it_goes(self, tmp_path):
        log = written(tmp_path, [10, 20, 30], OF_TWO)
        log.retain(1000)
        assert (log.start_offset, log.end_offset, bases(log)) == (3, 3, [3])
        assert log.append(batch([b"next"])) == 3
        assert Log(tmp_path).start_offset == 3

    def test_an_empty_log_stays_as_it_is(self, tmp_path):
        log = written(tmp_path, [], OF_TWO)
        log.retain(1 << 40)
        assert bases(log) == [0]

    def test_records_without_a_time_are_as_old_as_their_file(self, tmp_path):
        log = written(tmp_path, [-1, -1, -1], OF_TWO)
        os.utime(tmp_path / f"{0:020d}.log", (5, 5))
        os.utime(tmp_path / f"{2:020d}.log", (6, 6))
        log.retain(5101)
        assert log.start_offset == 2

    def test_a_segment_is_closed_by_the_age_of_its_first_record(self, tmp_path):
        log = written(tmp_path, [1000, 1050, 1101, 1000, 1201, 1202], LogConfig(segment_ms=100))
        assert bases(log) == [0, 2, 5]


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(1, 4), max_size=12),
    segment_bytes=st.integers(1, 300),
    retention_bytes=st.integers(0, 1500),
)
def test_by_bytes_as_much_goes_as_leaves_the_wanted_bytes(counts, segment_bytes, retention_bytes):
    with tempfile.TemporaryDirectory() as folder:
        config = LogConfig(segment_bytes=segment_bytes, retention_bytes=retention_bytes)
        log = Log(Path(folder), config)
        for count in counts:
            log.append(batch([b"v"] * count))
        end_offset, before = (
            log.end_offset,
            sum(f.stat().st_size for f in Path(folder).glob("*.log")),
        )
        log.retain(0)
        sizes = [file.stat().st_size for file in sorted(Path(folder).glob("*.log"))]
        assert log.end_offset == end_offset
        assert log.start_offset == bases(log)[0]
        assert sum(sizes) >= min(retention_bytes, before)
        assert sum(sizes) - sizes[0] < retention_bytes or sizes[0] == 0


def refuse(*arguments: object) -> None:
    raise OSError(28, "No space left on device")


class Clock:
    def __init__(self) -> None:
        self.at_ms = 0

    def __call__(self) -> int:
        return self.at_ms


def opened(folder: Path, clock: Clock | None = None) -> Topics:
    return Topics(folder, sync=False, now_ms=clock or Clock())


def test_each_topic_is_held_to_its_own_retention_and_waiting_readers_are_woken(tmp_path):
    async def scenario() -> None:
        clock = Clock()
        topics = opened(tmp_path, clock)
        await topics.create("brief", 2, {"retention.ms": "100"})
        await topics.create("lasting", 1, {})
        woken = {}
        for name, index in (("brief", 1), ("lasting", 0)):
            partition = topics.partition(name, index)
            await partition.append(batch([b"v"], timestamps_ms=[50]))
            woken[name] = asyncio.get_running_loop().create_future()
            partition.watch(woken[name])
        clock.at_ms = 150
        await topics.retain()
        assert topics.partition("brief", 1).log.start_offset == 0
        clock.at_ms = 151
        await topics.retain()
        assert topics.partition("brief", 1).log.start_offset == 1
        assert topics.partition("lasting", 0).log.start_offset == 0
        assert (woken["brief"].done(), woken["lasting"].done()) == (True, False)

    asyncio.run(scenario())


def test_a_disk_that_refuses_stops_neither_retention_nor_the_other_partitions(
    tmp_path, monkeypatch, capsys
):
    async def scenario() -> None:
        topics = opened(tmp_path, clock := Clock())
        await topics.create("brief", 2, {"retention.ms": "100"})
        partitions = [topics.partition("brief", index) for index in range(2)]
        for partition in partitions:
            await partition.append(batch([b"v"], timestamps_ms=[50]))

        monkeypatch.setattr(partitions[0].log, "retain", refuse)
        clock.at_ms = 1000
        for _ in range(3):
            await topics.retain()
        assert [partition.log.start_offset for partition in partitions] == [0, 1]

    asyncio.run(scenario())
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_a_topic_that_a_full_disk_prevented_can_be_created_later(tmp_path, monkeypatch):
    async def scenario() -> None:
        topics = opened(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(topics, "_open_log", refuse)
            with pytest.raises(OSError, match="No space left"):
                await topics.create("t", 2, {})
        assert topics.get("t") is opened(tmp_path).get("t") is None
        await topics.create("t", 2, {})
        assert await topics.partition("t", 1).append(batch([b"v"])) == 0

    asyncio.run(scenario())


def test_what_a_crash_left_of_more_partitions_is_no_partition_yet(tmp_path):
    async def scenario() -> None:
        topics = opened(tmp_path)
        await topics.create("t", 1, {})
        # The folders are made first, then the description tells of them.
        (tmp_path / "topics" / "t" / "1").mkdir()
        topics = opened(tmp_path)
        with pytest.raises(Refused):
            topics.partition("t", 1)
        await topics.add_partitions("t", 3, only_check=True)
        assert len(opened(tmp_path).get("t").partitions) == 1
        await topics.add_partitions("t", 3, only_check=False)
        assert len(opened(tmp_path).get("t").partitions) == 3

    asyncio.run(scenario())


class SlowLog(Log):
    """Its appends wait until they are let go."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, LogConfig(segment_bytes=1), sync=True)
        self.let_go = threading.Event()

    def append(self, data: bytes, append_ms: int = -1) -> int:
        assert self.let_go.wait(DEADLINE_S)
        return super().append(data, append_ms)


def test_deleting_a_topic_waits_for_what_is_being_written_and_refuses_the_rest(tmp_path):
    """Else a late append would open its next segment in the folder of a new topic of that name."""

    async def scenario() -> None:
        topics = opened(tmp_path)
        await topics.create("t", 1, {})
        (partition,) = topics.get("t").partitions
        log = partition.log = SlowLog(partition.log.folder)
        writes = [asyncio.create_task(partition.append(batch([b"v"]))) for _ in range(2)]
        await asyncio.sleep(0)
        deletion = asyncio.create_task(topics.delete("t"))
        creation = asyncio.create_task(topics.create("t", 1, {}))
        await asyncio.sleep(0)
        log.let_go.set()
        await asyncio.gather(deletion, creation)
        assert await asyncio.gather(*writes) == [0, 1]
        for late in (partition.append(batch([b"late"])), partition.trim(1)):
            with pytest.raises(Refused) as refusal:
                await late
            assert refusal.value.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert topics.partition("t", 0).log.end_offset == 0
        assert opened(tmp_path).partition("t", 0).log.end_offset == 0

    asyncio.run(scenario())


def test_a_topic_that_cannot_be_deleted_is_written_on(tmp_path):
    async def scenario() -> None:
        topics = opened(tmp_path)
        await topics.create("t", 1, {})
        (tmp_path / "staging").rmdir()
        with pytest.raises(FileNotFoundError):
            await topics.delete("t")
        assert await topics.partition("t", 0).append(batch([b"v"])) == 0

    asyncio.run(scenario())


def test_changes_of_one_topic_come_in_turn(tmp_path):
    async def scenario() -> None:
        topics = opened(tmp_path)
        await topics.create("t", 1, {})
        await asyncio.gather(
            *(
                topics.configure(
                    "t", lambda configs, key=key: {**configs, key: "5000"}, only_check=False
                )
                for key in ("segment.bytes", "max.message.bytes", "retention.ms")
            ),
            topics.add_partitions("t", 4, only_check=False),
        )
        for each in (topics, opened(tmp_path)):
            topic = each.get("t")
            assert len(topic.partitions) == 4
            assert set(topic.configs) == {"segment.bytes", "max.message.bytes", "retention.ms"}
            configs = {partition.log.config for partition in topic.partitions}
            assert configs == {
                LogConfig(segment_bytes=5000, max_batch_bytes=5000, retention_ms=5000)
            }

    asyncio.run(scenario())
