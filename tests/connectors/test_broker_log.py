"""One partition's log, in process: what is stored is read back, repaired or reported."""

from __future__ import annotations

import errno
import os
import resource
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connectors.broker import segment
from connectors.broker.batch import HEADER, parse_header, record_times, with_append_time
from connectors.broker.configs import LogConfig
from connectors.broker.errors import CorruptLog, ErrorCode, Refused
from connectors.broker.log import START_FILE, Log
from tests.connectors.broker_wire import batch, records

values = st.lists(st.binary(max_size=40), min_size=1, max_size=4)
quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def stored(log: Log, max_bytes: int = 1 << 30) -> list[tuple[int, bytes]]:
    """Everything in the log, read the way a consumer does."""
    found: list[tuple[int, bytes]] = []
    offset = log.start_offset
    while (data := log.read(offset, max_bytes)) is not None:
        found += [record for record in records(data.read()) if record[0] >= offset]
        offset = found[-1][0] + 1
    return found


def numbered(batches: list[list[bytes]]) -> list[tuple[int, bytes]]:
    return list(enumerate(value for each in batches for value in each))


def segment_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.log"))


@quick
@given(
    batches=st.lists(values, max_size=12),
    max_bytes=st.integers(0, 400),
    segment_bytes=st.integers(1, 600),
    index_every=st.integers(1, 400),
)
def test_what_was_appended_is_read_back_whatever_the_limits(
    batches, max_bytes, segment_bytes, index_every
):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment, "INDEX_EVERY_BYTES", index_every)
        log = Log(Path(folder), LogConfig(segment_bytes=segment_bytes))
        for each in batches:
            log.append(batch(each))
        assert stored(log, max_bytes) == numbered(batches)
        reopened = Log(Path(folder), LogConfig(segment_bytes=segment_bytes))
        assert stored(reopened) == numbered(batches)
        assert reopened.repair is None


def test_a_read_gives_as_many_whole_batches_as_fit_wherever_it_begins(tmp_path):
    size = len(batch([b"x" * 300]))
    log = Log(tmp_path)
    for _ in range(400):
        log.append(batch([b"x" * 300]))
    for offset in range(0, 400, 7):
        for num_batches in (1, 5, 150):
            data = log.read(offset, num_batches * size + size // 2)
            assert data is not None
            assert data.num_bytes == min(num_batches, 400 - offset) * size
            assert records(data.read())[0][0] == offset


def test_the_index_does_not_grow_with_the_number_of_small_batches(tmp_path):
    log = Log(tmp_path)
    for _ in range(2000):
        log.append(batch([b"x"]))
    (kept,) = log._segments
    assert len(kept._positions) <= kept.size // segment.INDEX_EVERY_BYTES + 1


times = st.integers(0, 20)
timed = st.lists(st.lists(times, min_size=1, max_size=4), max_size=10)


@quick
@given(batches=timed, since_ms=st.integers(0, 22), trimmed=st.floats(0, 1), reopened=st.booleans())
def test_a_time_gives_the_first_record_that_late_though_times_are_in_no_order(
    batches, since_ms, trimmed, reopened
):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment, "INDEX_EVERY_BYTES", 150)
        config = LogConfig(segment_bytes=300)
        log = Log(Path(folder), config)
        for number, each in enumerate(batches):
            log.append(batch([b"v"] * len(each), timestamps_ms=each, compression=number % 5))
        start = log.trim(int(trimmed * log.end_offset))
        if reopened:
            log = Log(Path(folder), config)
        kept = list(enumerate(at_ms for each in batches for at_ms in each))[start:]
        assert log.first_since(since_ms) == next((r for r in kept if r[1] >= since_ms), None)
        assert log.newest() == max(kept, key=lambda r: (r[1], -r[0]), default=None)


def test_a_batch_dated_by_the_broker_is_sound_and_dated(tmp_path):
    log = Log(tmp_path)
    for compression in range(5):
        log.append(batch([b"a", b"b"], compression=compression), 12_345)
    log.append(batch([b"as it came"], timestamps_ms=[7]))
    for each in (log, Log(tmp_path)):
        assert each.repair is None
        assert stored(each) == numbered([[b"a", b"b"]] * 5 + [[b"as it came"]])
        data = each.read(0, 1)
        assert data is not None
        assert list(record_times(data.read())) == [(0, 12_345), (1, 12_345)]
        assert each.newest() == (0, 12_345)
        assert each.first_since(12_346) is None


def test_a_batch_without_records_in_it_has_no_times(tmp_path):
    log = Log(tmp_path)
    hollow = bytearray(batch([b"x" * 50], compression=4))
    hollow[61:] = b"?" * len(hollow[61:])
    header = parse_header(hollow)
    log.append(HEADER.pack(*with_append_time(header, hollow, 9)) + bytes(hollow[61:]))
    with pytest.raises(Refused) as refusal:
        log.first_since(5)
    assert refusal.value.code == ErrorCode.CORRUPT_MESSAGE


def test_damage_while_in_use_is_named(tmp_path):
    log = Log(tmp_path)
    for value in (b"a", b"b"):
        log.append(batch([value]))
    file = segment_files(tmp_path)[0]
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CorruptLog, match=rf"{file}: was damaged at byte 0"):
        log.read(1, 100)


@quick
@given(batches=st.lists(values, min_size=1, max_size=8), data=st.data())
def test_a_log_cut_anywhere_keeps_exactly_its_complete_batches(batches, data):
    with tempfile.TemporaryDirectory() as folder:
        log = Log(Path(folder))
        ends = [0]
        for each in batches:
            ends.append(ends[-1] + len(batch(each)))
            log.append(batch(each))
        cut = data.draw(st.integers(0, ends[-1]))
        os.truncate(segment_files(Path(folder))[0], cut)
        complete = sum(end <= cut for end in ends) - 1
        reopened = Log(Path(folder))
        assert stored(reopened) == numbered(batches[:complete])
        assert (reopened.repair is None) == (cut in ends)
        # It goes on where the complete batches end, and the tail is gone for good.
        reopened.append(batch([b"next"]))
        assert stored(Log(Path(folder))) == numbered([*batches[:complete], [b"next"]])


@quick
@given(batches=st.lists(values, min_size=2, max_size=8), data=st.data())
def test_a_flipped_bit_before_an_intact_batch_is_never_accepted_or_cut_off(batches, data):
    with tempfile.TemporaryDirectory() as folder:
        log = Log(Path(folder))
        for each in batches:
            log.append(batch(each))
        file = segment_files(Path(folder))[0]
        content = bytearray(file.read_bytes())
        before_last = len(content) - len(batch(batches[-1]))
        position = data.draw(st.integers(0, before_last - 1))
        content[position] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(content)
        with pytest.raises(CorruptLog, match=rf"{file}: damaged at byte \d+ \(offset \d+\)"):
            Log(Path(folder))
        assert file.read_bytes() == content


@quick
@given(junk=st.binary(min_size=1, max_size=300))
def test_junk_behind_the_last_batch_is_cut_off(junk):
    with tempfile.TemporaryDirectory() as folder:
        Log(Path(folder)).append(batch([b"kept"]))
        file = segment_files(Path(folder))[0]
        whole = file.read_bytes()
        file.write_bytes(whole + junk)
        log = Log(Path(folder))
        assert stored(log) == [(0, b"kept")]
        assert log.repair is not None
        assert (log.repair.position, log.repair.num_bytes) == (len(whole), len(junk))
        assert file.read_bytes() == whole


def test_a_tail_of_zeros_as_power_loss_leaves_it_is_cut_off(tmp_path):
    Log(tmp_path).append(batch([b"kept"]))
    with segment_files(tmp_path)[0].open("ab") as file:
        file.write(bytes(1 << 20))
    assert stored(Log(tmp_path)) == [(0, b"kept")]


def test_damage_in_an_older_segment_is_refused_by_name(tmp_path):
    log = Log(tmp_path, LogConfig(segment_bytes=1))
    for value in (b"a", b"b"):
        log.append(batch([value]))
    oldest = segment_files(tmp_path)[0]
    os.truncate(oldest, oldest.stat().st_size - 1)
    with pytest.raises(CorruptLog, match=oldest.name):
        Log(tmp_path)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_segment_is_refused_by_name(tmp_path, missing):
    log = Log(tmp_path, LogConfig(segment_bytes=1))
    for value in (b"a", b"b", b"c"):
        log.append(batch([value]))
    files = segment_files(tmp_path)
    files[missing].unlink()
    with pytest.raises(
        CorruptLog, match=rf"{files[missing + 1].name}.*offset {missing} are missing"
    ):
        Log(tmp_path)


def test_trimming_removes_whole_segments_and_is_remembered(tmp_path):
    log = Log(tmp_path, LogConfig(segment_bytes=1))
    for value in (b"a", b"b", b"c", b"d"):
        log.append(batch([value, value]))
    assert log.trim(5) == 5
    assert [int(file.stem) for file in segment_files(tmp_path)] == [4, 6]
    assert log.trim(3) == 5
    for each in (log, Log(tmp_path)):
        assert each.start_offset == 5
        assert stored(each) == [(5, b"c"), (6, b"d"), (7, b"d")]
        with pytest.raises(Refused) as refusal:
            each.read(4, 100)
        assert refusal.value.code == ErrorCode.OFFSET_OUT_OF_RANGE
    assert log.trim(8) == 8
    assert Log(tmp_path).end_offset == 8


def test_what_a_crash_left_of_a_trim_goes_when_the_log_is_opened(tmp_path):
    log = Log(tmp_path, LogConfig(segment_bytes=1))
    for value in (b"a", b"b", b"c"):
        log.append(batch([value]))
    (tmp_path / START_FILE).write_text("2")  # written first; the crash came before the removal
    log = Log(tmp_path)
    assert [int(file.stem) for file in segment_files(tmp_path)] == [2]
    assert stored(log) == [(2, b"c")]


def test_a_range_being_sent_outlives_the_removal_of_its_segment(tmp_path):
    log = Log(tmp_path, LogConfig(segment_bytes=1))
    for value in (b"a", b"b"):
        log.append(batch([value]))
    sending = log.read(0, 1 << 20)
    log.trim(1)
    assert sending is not None
    assert records(sending.read()) == [(0, b"a")]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        pytest.param(b"", ErrorCode.CORRUPT_MESSAGE, id="nothing"),
        pytest.param(batch([b"x"])[:-1], ErrorCode.INVALID_RECORD, id="cut short"),
        pytest.param(batch([b"x"]) + batch([b"y"]), ErrorCode.INVALID_RECORD, id="two batches"),
        pytest.param(batch([b"x"])[:-2] + b"??", ErrorCode.CORRUPT_MESSAGE, id="changed"),
        pytest.param(bytes(61), ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT, id="old format"),
        pytest.param(batch([b"x" * 1000]), ErrorCode.MESSAGE_TOO_LARGE, id="too large"),
        pytest.param(
            batch([b"x"], producer_id=1, epoch=0, sequence=0, transactional=True),
            ErrorCode.INVALID_TXN_STATE,
            id="transactional",
        ),
    ],
)
def test_what_is_no_sound_batch_is_refused_and_leaves_no_trace(tmp_path, data, code):
    log = Log(tmp_path, LogConfig(max_batch_bytes=1000))
    log.append(batch([b"before"]))
    with pytest.raises(Refused) as refusal:
        log.append(data)
    assert refusal.value.code == code
    assert stored(log) == stored(Log(tmp_path)) == [(0, b"before")]


class TestAFullDisk:
    @pytest.fixture
    def full_disk(self):
        """Files of this process may not grow beyond 4 KiB; a write beyond that stores the part
        that fits and then fails, as on a full disk."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

        def fill() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))

        yield fill
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def test_the_half_written_batch_is_gone_and_the_rest_stays(self, tmp_path, full_disk):
        log = Log(tmp_path)
        kept = batch([b"a" * 3000], producer_id=1, epoch=0, sequence=0)
        log.append(kept)
        full_disk()
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            log.append(batch([b"b" * 3000], producer_id=1, epoch=0, sequence=1))
        assert segment_files(tmp_path)[0].stat().st_size == len(kept)
        assert stored(log) == [(0, b"a" * 3000)]
        # What fits goes in; the failed batch's sequence number is still the next.
        assert log.append(batch([b"c"], producer_id=1, epoch=0, sequence=1)) == 1
        assert stored(Log(tmp_path)) == [(0, b"a" * 3000), (1, b"c")]

    def test_a_short_write_is_continued(self, tmp_path, monkeypatch):
        """A system may store less than it was given without an error."""
        whole_write = os.pwritev
        sizes = []

        def short_write(descriptor, pieces, position):
            data = b"".join(bytes(piece) for piece in pieces)[:10]
            sizes.append(len(data))
            return whole_write(descriptor, [data], position)

        monkeypatch.setattr(os, "pwritev", short_write)
        log = Log(tmp_path)
        log.append(batch([b"in pieces"]))
        assert len(sizes) > 5
        assert stored(log) == stored(Log(tmp_path)) == [(0, b"in pieces")]


def test_synced_appends_reach_the_disk_before_they_return(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        os, "fdatasync", lambda descriptor: synced.append(os.fstat(descriptor).st_size)
    )
    log = Log(tmp_path, sync=True)
    for value in (b"a", b"b"):
        log.append(batch([value]))
    size = len(batch([b"a"]))
    assert synced == [size, 2 * size]
    Log(tmp_path).append(batch([b"c"]))
    assert len(synced) == 2


def test_a_file_whose_name_is_no_offset_is_refused(tmp_path):
    (tmp_path / "copy.log").touch()
    with pytest.raises(CorruptLog, match=r"copy\.log"):
        segment.Segment.at(tmp_path / "copy.log")
