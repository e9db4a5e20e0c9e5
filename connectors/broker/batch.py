"""The header of a record batch (Kafka message format v2) and its checksum.

Layout, big-endian: base offset int64, length int32 (bytes after this field), leader epoch int32,
magic int8 = 2, crc uint32 (CRC-32C of everything after it), attributes int16, last offset delta
int32, base and max timestamp int64, producer id int64, producer epoch int16, base sequence int32,
number of records int32, then the records, possibly compressed as one block. The broker writes the
first 16 bytes, and attributes, max timestamp and crc where a topic wants its own time; never the
records.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from typing import NamedTuple

import google_crc32c
from kafka.record import MemoryRecords

from connectors.broker.errors import ErrorCode, Refused

HEADER = struct.Struct(">qiibIhiqqqhii")
LENGTH_COVERS_FROM = 12
CRC_COVERS_FROM = 21
MAGIC = 2
LOG_APPEND_TIME = 0x08  # attribute: each record's time is the batch's max timestamp
TRANSACTIONAL_OR_CONTROL = 0x30
SEQUENCE_MASK = 0x7FFFFFFF  # sequence numbers wrap to 0 after 2**31 - 1
_CRC_SLICE_BYTES = 1 << 20  # other threads run between slices

Buffer = bytes | bytearray | memoryview | mmap.mmap


class BatchHeader(NamedTuple):
    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    """-1: not idempotent."""
    producer_epoch: int
    first_sequence: int
    num_records: int

    @property
    def size(self) -> int:
        """Bytes of the whole batch."""
        return self.length + LENGTH_COVERS_FROM

    @property
    def last_sequence(self) -> int:
        return (self.first_sequence + self.num_records - 1) & SEQUENCE_MASK

    @property
    def plausible(self) -> bool:
        """The fields that fix the batch's extent agree with each other."""
        return (
            self.magic == MAGIC
            and self.size >= HEADER.size
            and self.num_records > 0
            and self.last_offset_delta == self.num_records - 1
        )


def parse_header(data: Buffer, position: int = 0) -> BatchHeader:
    """struct.error when fewer than 61 bytes are left at `position`."""
    return BatchHeader._make(HEADER.unpack_from(data, position))


def checksum_matches(header: BatchHeader, data: Buffer, position: int = 0) -> bool:
    """Whether the batch at `position`, wholly in `data`, is the one its producer wrote."""
    return _extended(0, data, position + CRC_COVERS_FROM, position + header.size) == header.crc


def with_append_time(header: BatchHeader, data: Buffer, now_ms: int) -> BatchHeader:
    """The header of the same batch, its records dated `now_ms` by this broker."""
    header = header._replace(
        attributes=header.attributes | LOG_APPEND_TIME, max_timestamp_ms=now_ms
    )
    crc = google_crc32c.value(HEADER.pack(*header)[CRC_COVERS_FROM:])
    return header._replace(crc=_extended(crc, data, HEADER.size, header.size))


def _extended(crc: int, data: Buffer, start: int, end: int) -> int:
    for position in range(start, end, _CRC_SLICE_BYTES):
        crc = google_crc32c.extend(
            crc, bytes(data[position : min(position + _CRC_SLICE_BYTES, end)])
        )
    return int(crc)


def record_times(data: bytes) -> Iterator[tuple[int, int]]:
    """Offset and timestamp of each record of a stored batch, decompressed for it. Refused when its
    producer put no records into it."""
    try:
        for record in MemoryRecords(data).next_batch():
            yield record.offset, record.timestamp
    # The checksum tells that it is as it was sent; decoders raise whatever noise makes them raise.
    except Exception as error:
        raise Refused(ErrorCode.CORRUPT_MESSAGE, f"a batch holds no records: {error}") from error
