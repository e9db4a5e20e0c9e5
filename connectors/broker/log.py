"""One partition's log: segments in offset order, the start offset, retention, the producers'
states.

Synchronous; one thread at a time writes, and reading from another is safe meanwhile. An append
returns when the batch is stored as durably as the log was opened for: in the file (survives
`kill -9`) or, with `sync`, on the disk.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from connectors.broker.batch import (
    HEADER,
    MAGIC,
    TRANSACTIONAL_OR_CONTROL,
    BatchHeader,
    checksum_matches,
    parse_header,
    record_times,
    with_append_time,
)
from connectors.broker.configs import LogConfig
from connectors.broker.errors import CorruptLog, ErrorCode, Refused
from connectors.broker.producers import ProducerTable
from connectors.broker.segment import SUFFIX, FileRange, Segment
from connectors.files import replace_file, sync_path

START_FILE = "start"
DEFAULT_CONFIG = LogConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """A torn tail that was cut off when the log was opened."""

    path: Path
    position: int
    num_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.path}: cut off a write that was interrupted:"
            f" {self.num_bytes} bytes from byte {self.position}"
        )


class Log:
    def __init__(
        self, folder: Path, config: LogConfig = DEFAULT_CONFIG, *, sync: bool = False
    ) -> None:
        """Opens the log in `folder`, verifying every batch. CorruptLog if any but a torn tail is
        damaged or a segment is missing; `repair` tells of a torn tail. `config` may be replaced
        while the log is in use."""
        self.folder = folder
        self.config = config
        self.sync = sync
        self.repair: Repair | None = None
        self._producers = ProducerTable()
        self._segments: list[Segment] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.start_offset = self._stored_start()
        self._open_segments(sorted(folder.glob(f"*{SUFFIX}")))
        self.trim(self.start_offset)  # what a crash left of an earlier trim

    def _stored_start(self) -> int:
        file = self.folder / START_FILE
        if not file.exists():
            return 0
        text = file.read_text()
        if not text.isdecimal():
            raise CorruptLog(f"{file}: holds no offset")
        return int(text)

    def _open_segments(self, paths: list[Path]) -> None:
        if not paths:
            self._roll(self.start_offset)
            return
        for path in paths:
            segment = Segment.at(path)
            if self._segments:
                expected = self.end_offset
            else:
                expected = min(segment.base_offset, self.start_offset)
            if segment.base_offset != expected:
                raise CorruptLog(
                    f"{path}: the records from offset {expected} are missing before it"
                )
            found_bytes = path.stat().st_size
            for header in segment.scan(newest=path == paths[-1]):
                self._producers.record(header, header.base_offset)
            if segment.size < found_bytes:
                self.repair = Repair(
                    path=path, position=segment.size, num_bytes=found_bytes - segment.size
                )
            self._segments.append(segment)
        if self.start_offset > self.end_offset:
            raise CorruptLog(
                f"{paths[-1]}: ends at offset {self.end_offset}, before the log's start"
                f" {self.start_offset}"
            )

    def _roll(self, base_offset: int) -> None:
        self._segments = [*self._segments, Segment.create(self.folder, base_offset)]
        if self.sync:
            sync_path(self.folder)

    @property
    def end_offset(self) -> int:
        """Offset of the next record to be written."""
        return self._segments[-1].end_offset

    def append(self, data: bytes, append_ms: int = -1) -> int:
        """Stores one record batch as its producer encoded it, its records dated `append_ms` unless
        that is -1; the offset of its first record (of the stored copy, if it is a repeat). Refused
        when it is damaged, too large or out of sequence; OSError when the disk refuses, then the
        log is as before."""
        header = self._checked(data)
        stored = self._producers.stored_at(header)
        if stored is not None:
            return stored
        if append_ms >= 0:
            header = with_append_time(header, data, append_ms)
        if self._is_full(self._segments[-1], header):
            self._roll(self.end_offset)
        base_offset = self.end_offset
        self._segments[-1].append(header, data, sync=self.sync)
        self._producers.record(header, base_offset)
        return base_offset

    def _is_full(self, segment: Segment, header: BatchHeader) -> bool:
        if segment.size >= self.config.segment_bytes:
            return True
        age_ms = header.max_timestamp_ms - segment.first_ms
        return segment.size > 0 and segment.first_ms >= 0 and age_ms > self.config.segment_ms

    def _checked(self, data: bytes) -> BatchHeader:
        if len(data) < HEADER.size:
            raise Refused(ErrorCode.CORRUPT_MESSAGE, f"{len(data)} bytes are no record batch")
        header = parse_header(data)
        if header.magic != MAGIC:
            raise Refused(
                ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
                f"message format {header.magic} is not supported, only {MAGIC}",
            )
        if len(data) > self.config.max_batch_bytes:
            raise Refused(
                ErrorCode.MESSAGE_TOO_LARGE,
                f"a batch of {len(data)} bytes exceeds max.message.bytes ="
                f" {self.config.max_batch_bytes}",
            )
        if header.size != len(data):
            raise Refused(ErrorCode.INVALID_RECORD, "one record batch a partition is expected")
        if not checksum_matches(header, data):
            raise Refused(ErrorCode.CORRUPT_MESSAGE, "the batch's checksum does not match")
        if not header.plausible:
            raise Refused(
                ErrorCode.INVALID_RECORD, "the batch's record count contradicts its offsets"
            )
        if header.attributes & TRANSACTIONAL_OR_CONTROL:
            raise Refused(ErrorCode.INVALID_TXN_STATE, "this broker has no transactions")
        return header

    def read(self, offset: int, max_bytes: int) -> FileRange | None:
        """Whole batches from the one that holds `offset`: at most `max_bytes`, but at least one
        batch. None at the end of the log; Refused outside of it."""
        # Before the check: a trim moves the start first and then replaces the list.
        segments = self._segments
        end_offset = segments[-1].end_offset
        if not self.start_offset <= offset <= end_offset:
            raise Refused(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"offset {offset} is not within {self.start_offset} to {end_offset}",
            )
        if offset == end_offset:
            return None
        index = bisect_right(segments, offset, key=lambda segment: segment.base_offset) - 1
        return segments[index].read(offset, max_bytes)

    def first_since(self, since_ms: int) -> tuple[int, int] | None:
        """Offset and time of the first record of that time or later; times need not be in order."""
        start_offset = self.start_offset
        for segment in self._segments:
            if segment.newest_ms < since_ms:
                continue
            for _, stored in segment.batches(start_offset, since_ms):
                for offset, at_ms in record_times(stored.read()):
                    if at_ms >= since_ms and offset >= start_offset:
                        return offset, at_ms
        return None

    def newest(self) -> tuple[int, int] | None:
        """Offset and time of the record with the latest time, the first of several."""
        start_offset = self.start_offset
        newest_ms = -1
        for segment in self._segments:
            if segment.base_offset >= start_offset:
                newest_ms = max(newest_ms, segment.newest_ms)
                continue
            for header, stored in segment.batches(start_offset, newest_ms):
                if header.base_offset >= start_offset:
                    newest_ms = max(newest_ms, header.max_timestamp_ms)
                else:  # its newest record may be trimmed
                    times = record_times(stored.read())
                    kept = (at_ms for offset, at_ms in times if offset >= start_offset)
                    newest_ms = max([newest_ms, *kept])
        return self.first_since(newest_ms)

    def trim(self, offset: int) -> int:
        """Makes `offset` (at most the end) the start and removes the segments wholly before it; the
        new start. Never moves back. Refused beyond the end; OSError when the disk refuses."""
        if not 0 <= offset <= self.end_offset:
            raise Refused(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"offset {offset} is not within 0 to {self.end_offset}",
            )
        if offset > self.start_offset:
            # First the promise, then the removal: a crash between them leaves too much, never too
            # little.
            replace_file(self.folder / START_FILE, str(offset).encode(), sync=True)
            self.start_offset = offset
        while len(self._segments) > 1 and self._segments[1].base_offset <= self.start_offset:
            removed, *self._segments = self._segments
            removed.path.unlink()
        return self.start_offset

    def outdated(self, now_ms: int) -> int:
        """The start offset that retention asks for: behind the leading segments whose newest record
        is older than `retention_ms`, or without which `retention_bytes` are still there. Records
        without a time are as old as their file."""
        config = self.config
        if config.retention_ms < 0 and config.retention_bytes < 0:
            return self.start_offset
        num_excess = sum(segment.size for segment in self._segments) - config.retention_bytes
        offset = self.start_offset
        for segment in self._segments:
            newest_ms = segment.newest_ms if segment.newest_ms >= 0 else segment.written_ms()
            too_old = config.retention_ms >= 0 and now_ms - newest_ms > config.retention_ms
            num_excess -= segment.size
            too_much = config.retention_bytes >= 0 and num_excess >= 0
            if segment.size == 0 or not (too_old or too_much):
                break
            offset = max(offset, segment.end_offset)
        return offset

    def retain(self, now_ms: int) -> None:
        """Removes what is `outdated`; the newest segment is closed first when it is. OSError when
        the disk refuses."""
        offset = self.outdated(now_ms)
        if offset == self.end_offset and self._segments[-1].size:
            self._roll(offset)
        self.trim(offset)
