"""One file of consecutive record batches, named by the offset of its first record.

In memory: 24 bytes (base offset, position, newest timestamp) a stretch of at least
INDEX_EVERY_BYTES of the file, however small the batches are; within a stretch their headers are
read. Payloads are never kept; readers get a range of the file. The file object is closed when the
last range that refers to it is gone, so a segment may be removed while it is being sent.
"""

from __future__ import annotations

import io
import mmap
import os
import re
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from connectors.broker.batch import HEADER, BatchHeader, checksum_matches, parse_header
from connectors.broker.errors import CorruptLog

SUFFIX = ".log"
INDEX_EVERY_BYTES = 32 << 10
LEADER_EPOCH_AT = 12
_EPOCH_AND_MAGIC = re.compile(
    rb"(?=\0\0\0\0\x02)", re.DOTALL
)  # bytes 12 to 16 of each stored batch


class FileRange(NamedTuple):
    """Whole batches, lying in a file."""

    file: io.FileIO
    position: int
    num_bytes: int

    def read(self) -> bytes:
        return b"".join(self.chunks(self.num_bytes))

    def chunks(self, chunk_bytes: int) -> Iterator[bytes]:
        """The bytes in order; each chunk is read when it is asked for."""
        end = self.position + self.num_bytes
        for position in range(self.position, end, chunk_bytes):
            yield os.pread(self.file.fileno(), min(chunk_bytes, end - position), position)


class Segment:
    def __init__(self, path: Path, base_offset: int) -> None:
        """Opens or creates the file; `scan` then indexes what it holds."""
        self.path = path
        self.base_offset = base_offset
        self.end_offset = base_offset
        self.size = 0
        self.first_ms = -1
        """Newest time in the first batch; -1 before there is one, or without times."""
        self.newest_ms = -1
        self._file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+")
        self._base_offsets = array("q")
        self._positions = array("q")
        self._newest_ms = array("q")

    @classmethod
    def create(cls, folder: Path, base_offset: int) -> Segment:
        return cls(folder / f"{base_offset:020d}{SUFFIX}", base_offset)

    @classmethod
    def at(cls, path: Path) -> Segment:
        """CorruptLog when the file's name is no offset."""
        if not path.stem.isdecimal():
            raise CorruptLog(f"{path}: is no segment; its name must be an offset")
        return cls(path, int(path.stem))

    def scan(self, *, newest: bool) -> Iterator[BatchHeader]:
        """Verifies each batch's checksum, indexes it and yields its header.

        An incomplete or damaged end of the newest segment, with no intact batch after it, is a
        write that a crash interrupted: it is cut off. Any other damage is CorruptLog with file and
        position.
        """
        found = os.fstat(self._file.fileno()).st_size
        if found:
            with mmap.mmap(self._file.fileno(), found, access=mmap.ACCESS_READ) as data:
                while (header := _intact_at(data, self.size, self.end_offset)) is not None:
                    self._index(header)
                    yield header
                if self.size < found and not (
                    newest and _is_torn(data, self.size, self.end_offset)
                ):
                    raise CorruptLog(
                        f"{self.path}: damaged at byte {self.size} (offset {self.end_offset}) with"
                        " intact records after it; restore the file or move its partition away"
                    )
        if self.size < found:
            self.cut()

    def cut(self) -> None:
        """Removes whatever lies behind the last indexed batch."""
        self._file.truncate(self.size)

    def append(self, header: BatchHeader, data: bytes, *, sync: bool) -> None:
        """Writes one batch at the end: `header` under the next offset, and what follows the header
        in `data`. OSError if the disk refuses; the segment is then as it was before."""
        header = header._replace(base_offset=self.end_offset, leader_epoch=0)
        try:
            self._write([memoryview(HEADER.pack(*header)), memoryview(data)[HEADER.size :]])
            if sync:
                os.fdatasync(self._file.fileno())
        except OSError:
            self.cut()
            raise
        self._index(header)

    def _write(self, pieces: list[memoryview]) -> None:
        position = self.size
        while pieces:
            written = os.pwritev(self._file.fileno(), pieces, position)
            position += written
            while pieces and written >= len(pieces[0]):
                written -= len(pieces.pop(0))
            if pieces:
                pieces[0] = pieces[0][written:]

    def _index(self, header: BatchHeader) -> None:
        newest_ms = header.max_timestamp_ms
        if not self._positions or self.size - self._positions[-1] >= INDEX_EVERY_BYTES:
            self._base_offsets.append(header.base_offset)
            self._positions.append(self.size)
            self._newest_ms.append(newest_ms)
        elif newest_ms > self._newest_ms[-1]:
            self._newest_ms[-1] = newest_ms
        if self.size == 0:
            self.first_ms = newest_ms
        self.newest_ms = max(self.newest_ms, newest_ms)
        self.size += header.size
        # Last: a reader in another thread looks only below the end offset.
        self.end_offset = header.base_offset + header.num_records

    def _stretch(self, index: int) -> Iterator[tuple[int, BatchHeader]]:
        """Position and header of each batch of a stretch, which all begin within
        INDEX_EVERY_BYTES of its start. CorruptLog when the file has changed."""
        size = self.size  # first: what is appended meanwhile may begin another stretch
        start = self._positions[index]
        end = self._positions[index + 1] if index + 1 < len(self._positions) else size
        wanted = min(end - start, INDEX_EVERY_BYTES + HEADER.size)
        data = os.pread(self._file.fileno(), wanted, start)
        position = start
        while position < end:
            at = position - start
            header = parse_header(data, at) if at + HEADER.size <= len(data) else None
            if header is None or header.size < HEADER.size:
                raise CorruptLog(f"{self.path}: was damaged at byte {position} while in use")
            yield position, header
            position += header.size

    def read(self, offset: int, max_bytes: int) -> FileRange:
        """The batch that holds `offset` and those after it in this file, in at most `max_bytes`,
        but always that first one. `offset` lies in this segment."""
        stretch = self._stretch(bisect_right(self._base_offsets, offset) - 1)
        start, header = next(
            (position, header)
            for position, header in stretch
            if header.base_offset + header.num_records > offset
        )
        end = self.size
        if end > start + max_bytes:
            last = bisect_right(self._positions, start + max_bytes) - 1
            end = max(p for p, _ in self._stretch(last) if p <= start + max_bytes)
        return FileRange(self._file, start, max(end - start, header.size))

    def batches(self, offset: int, since_ms: int) -> Iterator[tuple[BatchHeader, FileRange]]:
        """The batches, one by one, that hold a record of `offset` or later and one of `since_ms` or
        later."""
        first = max(0, bisect_right(self._base_offsets, offset) - 1)
        for index in range(first, len(self._positions)):
            if self._newest_ms[index] < since_ms:
                continue
            for position, header in self._stretch(index):
                if (
                    header.max_timestamp_ms >= since_ms
                    and header.base_offset + header.num_records > offset
                ):
                    yield header, FileRange(self._file, position, header.size)

    def written_ms(self) -> float:
        """When the file was last written."""
        return os.fstat(self._file.fileno()).st_mtime * 1000


def _intact_at(data: mmap.mmap, position: int, base_offset: int) -> BatchHeader | None:
    """The header of the whole, undamaged batch of that offset at `position`, if there is one."""
    try:
        header = parse_header(data, position)
    except struct.error:
        return None
    # Offset and leader epoch are ours, and no checksum covers them.
    if header.base_offset != base_offset or header.leader_epoch != 0 or not header.plausible:
        return None
    if position + header.size > len(data) or not checksum_matches(header, data, position):
        return None
    return header


def _is_torn(data: mmap.mmap, position: int, end_offset: int) -> bool:
    """Whether no intact batch of a later offset lies behind `position`."""
    for match in _EPOCH_AND_MAGIC.finditer(data, position + 1 + LEADER_EPOCH_AT):
        start = match.start() - LEADER_EPOCH_AT
        if start + HEADER.size > len(data):
            return True
        base_offset = parse_header(data, start).base_offset
        if base_offset > end_offset and _intact_at(data, start, base_offset) is not None:
            return False
    return True
