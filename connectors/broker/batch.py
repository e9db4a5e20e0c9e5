"""The header of a record batch (Kafka message format v2) and its checksum.

Layout, big-endian: base offset int64, length int32 (bytes after this field), leader epoch int32,
magic int8 = 2, crc uint32 (CRC-32C of everything after it), attributes int16, last offset delta
int32, base and max timestamp int64, producer id int64, producer epoch int16, base sequence int32,
number of records int32, then the records, possibly compressed as one block. The broker writes the
first 16 bytes and nothing else.
"""

from __future__ import annotations

import mmap
import struct
from typing import NamedTuple

import google_crc32c

HEADER = struct.Struct(">qiibIhiqqqhii")
PLACEMENT = struct.Struct(">qii")  # base offset, length, leader epoch: outside of the checksum
LENGTH_COVERS_FROM = 12
CRC_COVERS_FROM = 21
MAGIC = 2
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
    crc = 0
    end = position + header.size
    for start in range(position + CRC_COVERS_FROM, end, _CRC_SLICE_BYTES):
        crc = google_crc32c.extend(crc, bytes(data[start : min(start + _CRC_SLICE_BYTES, end)]))
    return bool(crc == header.crc)
