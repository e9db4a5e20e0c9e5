"""What a log makes of idempotent producers: repeats, gaps, epochs."""

from __future__ import annotations

import pytest

from connectors.broker import producers
from connectors.broker.errors import ErrorCode, Refused
from connectors.broker.log import Log
from tests.connectors.broker_wire import batch


class TestRepeatsAndGaps:
    """Each case also with the log reopened in between: the states come back from the batches."""

    @pytest.fixture(params=["running", "reopened"])
    def again(self, request):
        return (lambda log: log) if request.param == "running" else (lambda log: Log(log.folder))

    def write(self, log: Log, sequence: int, num_records: int = 2, epoch: int = 0) -> int:
        values = [b"v"] * num_records
        return log.append(batch(values, producer_id=7, epoch=epoch, sequence=sequence))

    def test_a_repeat_is_acknowledged_where_it_is_stored(self, tmp_path, again):
        log = Log(tmp_path)
        log.append(batch([b"other"]))
        offsets = [self.write(log, sequence) for sequence in (0, 2, 4, 6, 8)]
        log = again(log)
        assert [self.write(log, sequence) for sequence in (0, 2, 4, 6, 8)] == offsets
        assert log.end_offset == 11

    def test_a_gap_is_refused(self, tmp_path, again):
        log = Log(tmp_path)
        self.write(log, 0)
        log = again(log)
        with pytest.raises(Refused) as refusal:
            self.write(log, 4)
        assert refusal.value.code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert self.write(log, 2) == 2

    def test_a_repeat_older_than_five_batches_is_refused_not_written(self, tmp_path, again):
        log = Log(tmp_path)
        for sequence in range(0, 12, 2):
            self.write(log, sequence)
        log = again(log)
        with pytest.raises(Refused):
            self.write(log, 0)
        assert log.end_offset == 12

    def test_an_older_epoch_is_fenced_and_a_newer_one_starts_at_0(self, tmp_path, again):
        log = Log(tmp_path)
        self.write(log, 0, epoch=3)
        log = again(log)
        with pytest.raises(Refused) as refusal:
            self.write(log, 2, epoch=2)
        assert refusal.value.code == ErrorCode.INVALID_PRODUCER_EPOCH
        with pytest.raises(Refused) as refusal:
            self.write(log, 2, epoch=4)
        assert refusal.value.code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert self.write(log, 0, epoch=4) == 2

    def test_sequence_numbers_wrap_behind_the_largest_int32(self, tmp_path, again):
        log = Log(tmp_path)
        # An unknown producer may start anywhere: its older records may have been trimmed.
        self.write(log, 2**31 - 1, num_records=1)
        log = again(log)
        assert self.write(log, 0) == 1
        assert self.write(log, 2) == 3


def test_of_very_many_producers_those_silent_longest_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(producers, "REMEMBERED_PRODUCERS", 3)
    log = Log(tmp_path)

    def write(producer_id: int) -> int:
        return log.append(batch([b"v"], producer_id=producer_id, epoch=0, sequence=0))

    assert [write(producer_id) for producer_id in (1, 2, 3, 4)] == [0, 1, 2, 3]
    assert [write(producer_id) for producer_id in (2, 3, 4)] == [1, 2, 3]
    assert write(1) == 4
