"""One file of consecutive record batches, named by the offset of its first record.

In memory: 24 bytes a batch (base offset, position, newest timestamp). Payloads are never kept;
readers get a range of the file. The file object is closed when the last range that refers to it is
gone, so a segment may be removed while it is being sent.
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

from connectors.broker.batch import (
    HEADER,
    PLACEMENT,
    BatchHeader,
    checksum_matches,
    parse_header,
)
from connectors.broker.errors import CorruptLog

SUFFIX = ".log"
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
        self._file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+")
        self._base_offsets = array("q")
        self._positions = array("q")
        self._max_timestamps_ms = array("q")

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
                    self._index(header, self.end_offset)
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
        """Writes one batch at the end, under the next offset. OSError if the disk refuses; the
        segment is then as it was before."""
        placement = PLACEMENT.pack(self.end_offset, header.length, 0)
        pieces = [memoryview(placement), memoryview(data)[PLACEMENT.size :]]
        try:
            self._write(pieces)
            if sync:
                os.fdatasync(self._file.fileno())
        except OSError:
            self.cut()
            raise
        self._index(header, self.end_offset)

    def _write(self, pieces: list[memoryview]) -> None:
        position = self.size
        while pieces:
            written = os.pwritev(self._file.fileno(), pieces, position)
            position += written
            while pieces and written >= len(pieces[0]):
                written -= len(pieces.pop(0))
            if pieces:
                pieces[0] = pieces[0][written:]

    def _index(self, header: BatchHeader, base_offset: int) -> None:
        self._base_offsets.append(base_offset)
        self._positions.append(self.size)
        self._max_timestamps_ms.append(header.max_timestamp_ms)
        self.size += header.size
        # Last: a reader in another thread looks only below the end offset.
        self.end_offset = base_offset + header.num_records

    def read(self, offset: int, max_bytes: int) -> FileRange:
        """The batch that holds `offset` and those after it in this file, in at most `max_bytes`,
        but always that first one. `offset` lies in this segment."""
        index = bisect_right(self._base_offsets, offset) - 1
        position = self._positions[index]
        following = self._positions[index + 1] if index + 1 < len(self._positions) else self.size
        end = self.size
        if end > position + max_bytes:
            end = self._positions[bisect_right(self._positions, position + max_bytes) - 1]
        return FileRange(self._file, position, max(end, following) - position)

    def batches_since(self, timestamp_ms: int) -> Iterator[FileRange]:
        """The batches, one by one, that hold a record of that time or later."""
        for index, newest_ms in enumerate(self._max_timestamps_ms):
            if newest_ms >= timestamp_ms:
                yield self.read(self._base_offsets[index], 0)


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
