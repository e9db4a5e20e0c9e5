"""One partition's log: segments in offset order, the start offset, the producers' states.

Synchronous; one thread at a time writes, and reading from another is safe meanwhile. An append
returns when the batch is stored as durably as the log was opened for: in the file (survives
`kill -9`) or, with `sync`, on the disk.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from connectors.broker.batch import (
    HEADER,
    MAGIC,
    TRANSACTIONAL_OR_CONTROL,
    BatchHeader,
    checksum_matches,
    parse_header,
)
from connectors.broker.errors import CorruptLog, ErrorCode, Refused
from connectors.broker.producers import ProducerTable
from connectors.broker.segment import SUFFIX, FileRange, Segment
from connectors.files import replace_file, sync_path

START_FILE = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """A torn tail that was cut off when the log was opened."""

    path: Path
    position: int
    num_bytes: int


class Log:
    def __init__(
        self,
        folder: Path,
        *,
        sync: bool = False,
        segment_bytes: int = 128 << 20,
        max_batch_bytes: int = 1 << 20,
    ) -> None:
        """Opens the log in `folder`, verifying every batch. CorruptLog if any but a torn tail is
        damaged or a segment is missing; `repair` tells of a torn tail."""
        self.folder = folder
        self.sync = sync
        self.segment_bytes = segment_bytes
        self.max_batch_bytes = max_batch_bytes
        self.repair: Repair | None = None
        self._producers = ProducerTable()
        self._segments: list[Segment] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.start_offset = self._stored_start()
        self._open_segments(sorted(folder.glob(f"*{SUFFIX}")))

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

    def append(self, data: bytes) -> int:
        """Stores one record batch as its producer encoded it; the offset of its first record (of
        the stored copy, if it is a repeat). Refused when it is damaged, too large or out of
        sequence; OSError when the disk refuses, the log then is as before."""
        header = self._checked(data)
        stored = self._producers.stored_at(header)
        if stored is not None:
            return stored
        if self._segments[-1].size >= self.segment_bytes:
            self._roll(self.end_offset)
        base_offset = self.end_offset
        self._segments[-1].append(header, data, sync=self.sync)
        self._producers.record(header, base_offset)
        return base_offset

    def _checked(self, data: bytes) -> BatchHeader:
        if len(data) < HEADER.size:
            raise Refused(ErrorCode.CORRUPT_MESSAGE, f"{len(data)} bytes are no record batch")
        header = parse_header(data)
        if header.magic != MAGIC:
            raise Refused(
                ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
                f"message format {header.magic} is not supported, only {MAGIC}",
            )
        if len(data) > self.max_batch_bytes:
            raise Refused(
                ErrorCode.MESSAGE_TOO_LARGE,
                f"a batch of {len(data)} bytes exceeds max.message.bytes = {self.max_batch_bytes}",
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

    def batches_since(self, timestamp_ms: int) -> Iterator[FileRange]:
        """The batches, one by one, that hold a record of that time or later."""
        for segment in self._segments:
            yield from segment.batches_since(timestamp_ms)

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
