"""Records on disk until the log has them: appended by any thread, taken from the front by one.

A folder of segments, `N.journal`, each a sequence of frames: the body's length and CRC-32 (little
endian, 4 bytes each), the body. A segment is begun at each start and whenever the last one is full,
and removed once all of it was taken. What is appended survives the process, however it ends; the
last moments before a loss of power it does not: nothing is synced. A segment ends for its readers
where its frames end to be whole.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

log = logging.getLogger(__name__)

FRAME: Final = struct.Struct("<II")
SEGMENT_BYTES: Final = 8 << 20
"""A larger record has a segment of its own. About what a restarted writer reads back."""
TAKEN_RECORDS: Final = 1000
TAKEN_BYTES: Final = 1 << 20
"""At once; a larger record comes alone."""


@dataclass(slots=True)
class Segment:
    path: Path
    num_bytes: int  # of whole frames
    num_records: int


class Journal:
    """`append` from any thread; `front` and `drop` from one. Its folder is its own: whoever opens
    it holds a lock."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Finds what an earlier one left. OSError when the folder cannot be read."""
        self._folder, self._segment_bytes = folder, segment_bytes
        self._guard = threading.Lock()
        paths = sorted(folder.glob("*.journal"), key=lambda path: int(path.stem))
        self._segments = [found for path in paths if (found := _whole(path)) is not None]
        self._num_records = sum(segment.num_records for segment in self._segments)
        self._number = int(paths[-1].stem) if paths else 0
        self._at = self._num_dropped = 0  # of the first segment: bytes and records dropped
        self._tail = -1  # descriptor of the last segment, while it takes more
        self._reading: BinaryIO | None = None  # the first segment

    def __len__(self) -> int:
        return self._num_records

    def append(self, body: bytes) -> None:
        """OSError when the disk takes it not; then nothing of it stays."""
        frame = FRAME.pack(len(body), zlib.crc32(body)) + body
        with self._guard:
            if self._tail < 0 or self._segments[-1].num_bytes >= self._segment_bytes:
                self._begin()
            segment = self._segments[-1]
            try:
                _write(self._tail, frame)
            except OSError as error:
                self._cut(segment)
                raise _refusal(segment.path, error) from error
            segment.num_bytes += len(frame)
            segment.num_records += 1
            self._num_records += 1

    def front(self) -> list[bytes]:
        """The first bodies that were not dropped, of one segment; [] when there are none."""
        with self._guard:
            if not self._num_records:
                return []
            while self._segments[0].num_records == self._num_dropped:
                self._remove_first()  # the disk took no more of it, so another was begun
            first = self._segments[0]
            end, left = first.num_bytes, first.num_records - self._num_dropped
        if self._reading is None:
            self._reading = first.path.open("rb")
        self._reading.seek(self._at)
        bodies: list[bytes] = []
        num_bytes = 0
        for body in _bodies(self._reading, end - self._at):
            num_bytes += len(body)
            if bodies and num_bytes > TAKEN_BYTES:
                break
            bodies.append(body)
            if len(bodies) == min(TAKEN_RECORDS, left):
                break
        if not bodies:
            raise OSError(f"{first.path} no longer has what was written to it")
        return bodies

    def drop(self, bodies: list[bytes]) -> bool:
        """Forgets `bodies`, the first of the front; whether a segment was removed with them."""
        with self._guard:
            self._at += sum(FRAME.size + len(body) for body in bodies)
            self._num_dropped += len(bodies)
            self._num_records -= len(bodies)
            first = self._segments[0]
            is_last = len(self._segments) == 1
            if self._num_dropped < first.num_records or (
                is_last and self._tail >= 0 and first.num_bytes < self._segment_bytes
            ):
                return False
            if is_last:
                self._end_tail()
            self._remove_first()
        return True

    def close(self) -> None:
        """What was not dropped stays for the next one."""
        with self._guard:
            self._end_tail()
            if not self._num_records and self._segments:
                self._remove_first()
            if self._reading is not None:
                self._reading.close()

    def _begin(self) -> None:
        self._end_tail()
        path = self._folder / f"{self._number + 1}.journal"
        try:
            self._tail = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except OSError as error:
            raise _refusal(path, error) from error
        self._number += 1
        self._segments.append(Segment(path, 0, 0))

    def _end_tail(self) -> None:
        if self._tail >= 0:
            os.close(self._tail)
            self._tail = -1

    def _cut(self, segment: Segment) -> None:
        """Behind a torn frame nobody would look for the next one."""
        try:
            os.ftruncate(self._tail, segment.num_bytes)
        except OSError:
            self._end_tail()

    def _remove_first(self) -> None:
        first = self._segments.pop(0)
        if self._reading is not None:
            self._reading.close()
            self._reading = None
        first.path.unlink(missing_ok=True)
        self._at = self._num_dropped = 0


def _whole(path: Path) -> Segment | None:
    """What can be read of it; the file is removed, and None is given, when nothing can."""
    size = path.stat().st_size
    num_bytes = num_records = 0
    with path.open("rb") as file:
        for body in _bodies(file, size):
            num_bytes += FRAME.size + len(body)
            num_records += 1
    if num_bytes < size:
        log.warning("%s: its last %d bytes are no whole record", path, size - num_bytes)
    if not num_records:
        path.unlink()
        return None
    return Segment(path, num_bytes, num_records)


def _bodies(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    """Of the whole frames in the next `num_bytes`."""
    while num_bytes >= FRAME.size:
        head = file.read(FRAME.size)
        if len(head) < FRAME.size:
            return
        length, crc = FRAME.unpack(head)
        num_bytes -= FRAME.size + length
        if num_bytes < 0:
            return
        body = file.read(length)
        if len(body) < length or zlib.crc32(body) != crc:
            return
        yield body


def _refusal(path: Path, error: OSError) -> OSError:
    return OSError(error.errno, f"the journal {path} takes no record: {error.strerror}")


def _write(descriptor: int, content: bytes) -> None:
    written = os.write(descriptor, content)
    while written < len(content):  # a disk that is nearly full takes a part, then refuses
        written += os.write(descriptor, content[written:])
