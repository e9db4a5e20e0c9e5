"""The granted source: limits, versions, skipped offsets, resume."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence

import pytest

from connectors.kafka import source as source_module
from connectors.kafka.ahead import ReadAhead
from connectors.kafka.client import Cluster, KafkaFailure, OffsetGone, Producer, Record
from connectors.kafka.source import (
    Item,
    ItemReader,
    LogSource,
    SourcePart,
    SourceState,
    StopFlag,
)
from connectors.kafka.topics import delete_records, ensure_topics
from connectors.records import Announcement, Begin, Cancel, PolicyRecord, Version, encode

TOPICS = {"prompts": 2, "policy": 1}


def write(cluster: Cluster, topic: str, partition: int, values: Sequence[bytes]) -> None:
    producer = Producer(cluster)
    for value in values:
        producer.send(cluster.topic(topic), partition, value)
    producer.flush()
    producer.close()


def grant(cluster: Cluster, *records: PolicyRecord) -> None:
    write(cluster, "policy", 0, [encode(record) for record in records])


def begin(epoch: int) -> Begin:
    return Begin(epoch=epoch, writer="test", resumed_step=0, started_at=0.0)


def limits(number: int, *offsets: int, epoch: int = 0) -> Announcement:
    return Announcement(epoch=epoch, version=Version(0, number), digest="0" * 16, limits=offsets)


def part(
    cluster: Cluster, partition: int, state: SourceState | None = None, granted: bool = True
) -> SourcePart:
    source = LogSource(cluster, "prompts", granted=granted, stop=StopFlag())
    assert source.list_parts() == ["0", "1"]
    state = pickle.loads(pickle.dumps(state))
    return source.build_part("step", str(partition), state)


def take(source: SourcePart, count: int) -> list[tuple[int, int | None]]:
    """(offset, version number) of the next `count` items, which must come within 20 s."""
    found: list[tuple[str, Item]] = []
    deadline = time.monotonic() + 20
    while len(found) < count:
        found += source.next_batch()
        assert time.monotonic() < deadline, f"only {len(found)} of {count} items came"
    return [
        (item.origin.offset, item.min_version.number if item.min_version else None)
        for _, item in found
    ]


def is_quiet(source: SourcePart) -> bool:
    """Emits nothing over many calls (each a chance to overrun its limit)."""
    return all(not source.next_batch() for _ in range(50))


def test_a_granted_source_stops_at_its_limit_and_goes_on_when_it_rises(cluster: Cluster) -> None:
    ensure_topics(cluster, TOPICS)
    write(cluster, "prompts", 1, [b"%d" % i for i in range(20)])
    source = part(cluster, 1)
    assert is_quiet(source)
    grant(cluster, begin(0), limits(0, 99, 3), limits(1, 99, 3), limits(2, 99, 5))
    assert take(source, 5) == [(0, 0), (1, 0), (2, 0), (3, 2), (4, 2)]
    assert is_quiet(source)
    grant(cluster, limits(4, 99, 20))
    assert take(source, 15) == [(offset, 4) for offset in range(5, 20)]
    source.close()


def test_a_limit_beyond_the_end_waits_for_what_is_written_later(cluster: Cluster) -> None:
    ensure_topics(cluster, TOPICS)
    grant(cluster, limits(1, 10, 0))
    write(cluster, "prompts", 0, [b"0", b"1"])
    source = part(cluster, 0)
    assert take(source, 2) == [(0, 1), (1, 1)]
    assert is_quiet(source)
    write(cluster, "prompts", 0, [b"2"])
    assert take(source, 1) == [(2, 1)]
    source.close()


def test_a_fenced_trainer_grants_nothing_and_a_grant_is_never_taken_back(cluster: Cluster) -> None:
    ensure_topics(cluster, TOPICS)
    write(cluster, "prompts", 0, [b"x"] * 10)
    grant(cluster, begin(1), limits(1, 4, 0, epoch=1), begin(2), limits(9, 10, 0, epoch=1))
    grant(cluster, limits(2, 3, 0, epoch=2))
    source = part(cluster, 0)
    assert take(source, 4) == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert is_quiet(source)
    source.close()


def test_a_resumed_source_continues_with_the_same_offsets_and_versions(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots are taken after every item: each must resume to the very same rest."""
    ensure_topics(cluster, TOPICS)
    write(cluster, "prompts", 0, [b"%d" % i for i in range(9)])
    grant(cluster, begin(7), limits(0, 2, 0, epoch=7), limits(1, 2, 0, epoch=7))
    grant(cluster, limits(2, 5, 0, epoch=7), begin(9), limits(3, 8, 0, epoch=7))
    grant(cluster, limits(4, 6, 0, epoch=9), limits(5, 9, 0, epoch=9))
    expected = [(0, 0), (1, 0), (2, 2), (3, 2), (4, 2), (5, 4), (6, 5), (7, 5), (8, 5)]
    whole = part(cluster, 0)
    assert take(whole, 9) == expected
    whole.close()
    state: SourceState | None = None
    for offset in range(9):
        monkeypatch.setattr(source_module, "MAX_BATCH", 1)
        one = part(cluster, 0, state)
        assert take(one, 1) == [expected[offset]]
        state = one.snapshot()
        one.close()
        monkeypatch.undo()
        rest = part(cluster, 0, state)
        if offset < 8:
            assert take(rest, 8 - offset) == expected[offset + 1 :]
        rest.close()


def said_of(items: Sequence[tuple[str, Item]]) -> list[tuple[int, str, str, int]]:
    """(offset, what to do, why, version) of the cancels among `items`; prompts have no reason."""
    return [
        (i.origin.offset, i.cancel.then, i.cancel.reason, i.min_version.number)
        if i.cancel is not None
        else (i.origin.offset, "start", "", i.min_version.number)
        for _, i in items
        if i.min_version is not None
    ]


def test_a_cancel_comes_out_once_after_the_prompt_it_is_of_and_again_after_a_restart(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the other partition's cancels nothing comes out; what the trainer gave up is closed."""
    ensure_topics(cluster, TOPICS)
    write(cluster, "prompts", 0, [b"x"] * 4)
    prompts = cluster.topic("prompts")
    cancels = (
        Cancel(f"{prompts}/0/2", "requeue", "stale"),
        Cancel(f"{prompts}/0/0", "close", "overload"),
        Cancel(f"{prompts}/1/0", "close", "stale"),
        Cancel(f"{prompts}.other/0/1", "close", "stale"),
    )
    said = Announcement(
        epoch=0, version=Version(0, 1), digest="0" * 16, limits=(4, 4), cancels=cancels,
        closed=(f"{prompts}/0/3",),
    )  # fmt: skip
    grant(cluster, begin(0), limits(0, 3, 3), said)
    starts = [(0, "start", "", 0), (1, "start", "", 0), (2, "start", "", 0), (3, "start", "", 1)]
    orders = {2: (2, "requeue", "stale", 1), 0: (0, "close", "overload", 1)}
    given_up = (3, "close", "cancelled", 1)
    whole = part(cluster, 0)
    found: list[tuple[str, Item]] = []
    while len(found) < 7:
        found += whole.next_batch()
    assert sorted(said_of(found)) == sorted([*starts, *orders.values(), given_up])
    for offset, order in (*orders.items(), (3, given_up)):
        assert said_of(found).index(starts[offset]) < said_of(found).index(order)
    assert is_quiet(whole)
    whole.close()

    monkeypatch.setattr(source_module, "MAX_BATCH", 1)
    one = part(cluster, 0)
    while not (first := one.next_batch()):
        pass
    assert said_of(first) == [starts[0], orders[0]]
    rest = part(cluster, 0, one.snapshot())
    one.close()
    found = []
    while len(found) < 6:
        found += rest.next_batch()
    expected = [orders[0], *starts[1:], orders[2], given_up]
    assert sorted(said_of(found)) == sorted(expected), "the first one once more"
    ended = rest.snapshot()
    rest.close()
    again = part(cluster, 0, ended)
    assert is_quiet(again)
    again.close()


def test_an_ungranted_source_reads_everything_and_resumes(cluster: Cluster) -> None:
    ensure_topics(cluster, TOPICS)
    write(cluster, "prompts", 0, [b"%d" % i for i in range(3)])
    source = part(cluster, 0, granted=False)
    assert take(source, 3) == [(0, None), (1, None), (2, None)]
    state = source.snapshot()
    source.close()
    write(cluster, "prompts", 0, [b"3"])
    source = part(cluster, 0, state, granted=False)
    assert take(source, 1) == [(3, None)]
    source.close()


def test_a_resume_outside_the_log_says_what_to_do(cluster: Cluster) -> None:
    ensure_topics(cluster, TOPICS)
    write(cluster, "prompts", 0, [b"0"])
    with pytest.raises(OffsetGone, match=r"prompts/0: cannot go on at offset 5, .*holds 0 to 1"):
        part(cluster, 0, (5, 0, -1, 0), granted=False)


def test_what_was_trimmed_is_passed_over_and_the_rest_read(cluster: Cluster) -> None:
    ensure_topics(cluster, TOPICS)
    write(cluster, "prompts", 0, [b"%d" % i for i in range(5)])
    delete_records(cluster, {"prompts": {0: 3}})
    trimmed = LogSource(cluster, "prompts", granted=False, trimmed=True)
    source = trimmed.build_part("step", "0", (1, 0, -1, 0))
    assert take(source, 2) == [(3, None), (4, None)]
    source.close()
    refetch = ItemReader(cluster, "prompts", trimmed=True)
    assert [refetch(0, offset).record is None for offset in (1, 3)] == [True, False]
    with pytest.raises(OffsetGone):
        refetch(0, 5)  # not written yet


def test_a_source_over_a_missing_topic_is_an_error(cluster: Cluster) -> None:
    with pytest.raises(KafkaFailure, match="does not exist"):
        LogSource(cluster, "prompts", granted=True).list_parts()


def test_the_stop_flag_ends_the_source(cluster: Cluster) -> None:
    ensure_topics(cluster, TOPICS)
    stop = StopFlag()
    source = LogSource(cluster, "prompts", granted=False, stop=stop).build_part("s", "0", None)
    assert source.next_batch() == []
    stop.set()
    with pytest.raises(StopIteration):
        source.next_batch()
    source.close()


class GappyReader:
    """A reader of one partition whose log holds only some offsets (compacted, control records)."""

    def __init__(self, offsets: Sequence[int], end: int) -> None:
        self._offsets, self._end, self._position = offsets, end, 0

    def starts(self) -> dict[int, int]:
        return {0: 0}

    def ends(self) -> dict[int, int]:
        return {0: self._end}

    def seek(self, partition: int, offset: int) -> None:
        self._position = offset

    def positions(self) -> dict[int, int]:
        return {0: self._position}

    def close(self) -> None: ...

    def poll(self, timeout_s: float = 0.0, max_records: int = 500) -> list[Record]:
        time.sleep(0.001)
        found = [o for o in self._offsets if o >= self._position][:max_records]
        rest = [o for o in self._offsets if o >= self._position][max_records:]
        self._position = rest[0] if rest else self._end
        return [
            Record(
                topic="t", partition=0, offset=o, key=None, value=b"", headers={}, timestamp_ms=0
            )
            for o in found
        ]


class FixedGrants:
    """Everything below `limit` is granted at one version."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def limit(self) -> int:
        return self._limit

    def version_of(self, offset: int) -> Version:
        return Version(0, 0)

    def cancelled(self, position: int) -> list[Item]:
        return []

    def resume_from(self) -> tuple[int, int, int]:
        return (0, -1, 0)

    def close(self) -> None: ...


def emitted(source: SourcePart, calls: int) -> list[tuple[int, bool]]:
    """(offset, whether it holds a record) of everything in `calls` calls."""
    items = [item for _ in range(calls) for _, item in source.next_batch()]
    return [(item.origin.offset, item.record is not None) for item in items]


@pytest.mark.parametrize(
    ("offsets", "end", "limit"),
    [
        ([0, 3, 4], 5, 5),  # inside
        ([2], 3, 3),  # at the start
        ([0, 1], 6, 6),  # at the end: only the position shows it
        ([], 4, 4),  # nothing at all
        ([0, 8], 9, 4),  # a gap across the limit: only its granted part
        ([0, 300], 301, 301),  # longer than a batch
    ],
)
def test_each_offset_the_broker_skipped_comes_out_without_a_record(
    offsets: list[int], end: int, limit: int
) -> None:
    ahead, grants = ReadAhead(GappyReader(offsets, end), 0), FixedGrants(limit)  # type: ignore[arg-type]
    source = SourcePart(ahead, "t", 0, 0, grants, StopFlag())  # type: ignore[arg-type]
    wanted = [(o, o in offsets) for o in range(min(limit, end))]
    found: list[tuple[int, bool]] = []
    deadline = time.monotonic() + 10.0
    while len(found) < len(wanted) and time.monotonic() < deadline:
        found += emitted(source, 1)
    assert found + emitted(source, 3) == wanted
    source.close()


def test_an_item_is_fetched_again_by_its_offset(cluster: Cluster) -> None:
    ensure_topics(cluster, TOPICS)
    write(cluster, "prompts", 1, [b"%d" % i for i in range(5)])
    refetch = ItemReader(cluster, "prompts")
    for offset in (3, 0):
        item = refetch(1, offset)
        assert item.record is not None
        assert (item.origin.partition, item.origin.offset) == (1, offset)
        assert item.record.value == b"%d" % offset
    with pytest.raises(OffsetGone):
        refetch(1, 5)
