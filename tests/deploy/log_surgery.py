"""Changing one record in the files of a broker that does not run, as somebody with access to the
disk would: the batch around it is made anew, with a right checksum of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from connectors.broker.batch import HEADER, parse_header

Change = Callable[[bytes, Mapping[str, bytes]], tuple[bytes, Mapping[str, bytes]]]
"""Value and headers as they are -> as they shall be."""


def change_record(data_dir: Path, topic: str, partition: int, offset: int, change: Change) -> None:
    """`topic` is the full name."""
    for file in sorted((data_dir / "topics" / topic / str(partition)).glob("*.log")):
        data, position, out = file.read_bytes(), 0, bytearray()
        while position < len(data):
            header = parse_header(data, position)
            batch = data[position : position + header.size]
            if header.base_offset <= offset <= header.base_offset + header.last_offset_delta:
                batch = _changed(batch, offset, change)
            out += batch
            position += header.size
        file.write_bytes(out)


def _changed(batch: bytes, offset: int, change: Change) -> bytes:
    header = parse_header(batch)
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=0, is_transactional=0, producer_id=header.producer_id,
        producer_epoch=header.producer_epoch, base_sequence=header.first_sequence,
        batch_size=1 << 26,
    )  # fmt: skip
    for record in DefaultRecordBatch(bytearray(batch)):
        value, headers = record.value, dict(record.headers)
        if record.offset == offset:
            value, headers = change(value, headers)
        builder.append(
            record.offset - header.base_offset, record.timestamp, record.key, value,
            list(headers.items()),
        )  # fmt: skip
    made = bytes(builder.build())
    placed = parse_header(made)._replace(base_offset=header.base_offset, leader_epoch=0)
    return HEADER.pack(*placed) + made[HEADER.size :]
