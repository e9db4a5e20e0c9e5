"""Files of foreign logs as rows, one at a time in memory.

    JSON lines, a JSON array or document, CSV, Parquet; all but the last plain or gzip ─▶ Row

UTF-8 with or without a byte order mark, or UTF-16 with one. What cannot be read is a row too, whose
value is a `LeftOut`: reading goes on behind it, unless nothing behind it can be told apart.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import ijson
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from connectors.imports.outcome import LeftOut

MAX_ROW_BYTES: Final = 64 << 20
HEAD_BYTES: Final = 64 << 10
PARQUET_ROWS: Final = 64

_DOCUMENT: Final = re.compile(
    rb'\s*\{\s*"(resourceSpans|resource_spans|data|observations|scores|traces)"\s*:\s*\['
)
_DAMAGED: Final = (EOFError, zlib.error, gzip.BadGzipFile)
_NO_JSON: Final = (msgspec.DecodeError, UnicodeError, RecursionError)
_UTF16: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_SUFFIXES: Final = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")


@dataclass(frozen=True, slots=True)
class Row:
    """`where` it stands: `line 3` or `row 3`, from 1. `at`: bytes of the file read so far."""

    where: str
    value: Any
    at: int


def files(path: Path) -> list[Path]:
    """The file, or those of a folder that may be logs, by name; scores behind all others, for they
    may need the sessions these name."""
    if not path.is_dir():
        return [path]
    found = [
        file
        for file in path.rglob("*")
        if file.is_file() and file.name.removesuffix(".gz").lower().endswith(_SUFFIXES)
    ]
    return sorted(found, key=lambda file: ("score" in file.name.lower(), str(file)))


def rows(path: Path) -> Iterator[Row]:
    """What cannot be opened is one row, left out."""
    try:
        with path.open("rb") as raw:
            magic = raw.read(4)
            raw.seek(0)
            if magic == b"PAR1":
                yield from _parquet(raw)
            elif magic[:2] == b"\x1f\x8b":
                with gzip.open(raw) as unpacked:
                    yield from _texts(path, raw, cast(BinaryIO, unpacked))
            else:
                yield from _texts(path, raw, raw)
    except OSError as error:
        yield Row("file", LeftOut("unreadable", error.strerror or str(error)), 0)


def _texts(path: Path, raw: BinaryIO, file: BinaryIO) -> Iterator[Row]:
    if _head(file, 2) in _UTF16:
        file = cast(BinaryIO, codecs.EncodedFile(file, "utf-8", "utf-16"))
    start = _head(file, HEAD_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    document = _DOCUMENT.match(start)
    if path.name.removesuffix(".gz").lower().endswith(".csv"):
        yield from _csv(raw, file)
    elif start.startswith(b"["):
        yield from _elements(raw, file, "item")
    elif document and not _is_value(_head(file, MAX_ROW_BYTES, line=True)):
        yield from _elements(raw, file, document[1].decode())
    else:
        yield from _lines(raw, file)


def _head(file: BinaryIO, size: int, *, line: bool = False) -> bytes:
    """The first bytes, of the first line only with `line`; as many as are not damaged."""
    found = b""
    with suppress(*_DAMAGED, UnicodeError):  # said where the rows are read
        found = file.readline(size) if line else file.read(size)
    file.seek(0)
    return found


def _is_value(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except _NO_JSON:
        return False
    return True


# ------------------------------------------------------------------------------------------- JSON
def _lines(raw: BinaryIO, file: BinaryIO) -> Iterator[Row]:
    number = 0
    while True:
        number += 1
        where = f"line {number}"
        try:
            line = file.readline(MAX_ROW_BYTES)
            is_long = len(line) >= MAX_ROW_BYTES and not line.endswith(b"\n")
            rest = line if is_long else b""
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(MAX_ROW_BYTES)
        except _DAMAGED as error:
            yield Row(where, LeftOut("truncated", f"the file is damaged: {error}"), raw.tell())
            return
        except UnicodeError as error:
            yield Row(where, LeftOut("bad_encoding", f"no UTF-16 any more: {error}"), raw.tell())
            return
        if not line:
            return
        text = line.removeprefix(codecs.BOM_UTF8).strip(b" \t\r\n")
        if is_long:
            yield Row(where, LeftOut("too_large", f"more than {MAX_ROW_BYTES} bytes"), raw.tell())
        elif text:
            yield Row(where, _decoded(text, is_whole=line.endswith(b"\n")), raw.tell())


def _decoded(text: bytes, *, is_whole: bool) -> Any:
    """`is_whole`: a line break stands behind it."""
    try:
        return msgspec.json.decode(text)
    except _NO_JSON as error:
        try:
            text.decode()
        except UnicodeDecodeError as undecoded:
            return LeftOut("bad_encoding", f"no UTF-8: {undecoded.reason}")
        return LeftOut("not_json" if is_whole else "truncated", str(error))


def _elements(raw: BinaryIO, file: BinaryIO, key: str) -> Iterator[Row]:
    """Of the array, or of the array under `key` of the document."""
    number = 0
    try:
        for number, value in enumerate(_parsed(file, key), 1):
            whole = {"resourceSpans": [value]} if key.startswith("resource") else value
            yield Row(f"row {number}", whole, raw.tell())
    except (*_DAMAGED, ijson.JSONError, UnicodeError, RecursionError) as error:
        is_cut = isinstance(error, ijson.IncompleteJSONError | EOFError)
        reason = "truncated" if is_cut else "not_json"
        yield Row(f"row {number + 1}", LeftOut(reason, " ".join(str(error).split())), raw.tell())


def _parsed(file: BinaryIO, key: str) -> Iterator[Any]:
    if file.read(3) != codecs.BOM_UTF8:
        file.seek(0)
    prefix = key if key == "item" else f"{key}.item"
    yield from ijson.items(file, prefix, use_float=True)


# ----------------------------------------------------------------------------------------- tables
def _csv(raw: BinaryIO, file: BinaryIO) -> Iterator[Row]:
    csv.field_size_limit(MAX_ROW_BYTES)
    text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    table = csv.DictReader(text, strict=True)
    number = 1
    while True:
        number = table.line_num + 1
        value: Any
        try:
            row = next(table)
            value = {key: cell for key, cell in row.items() if key and cell not in (None, "")}
            "".join(map(str, value.values())).encode()
        except StopIteration:
            text.detach()
            return
        except csv.Error as error:
            is_cut = "unexpected end" in str(error)
            value = LeftOut("truncated" if is_cut else "damaged", str(error))
        except UnicodeError as error:
            value = LeftOut("bad_encoding", f"no UTF-8: {error}")
        except _DAMAGED as error:
            yield Row(f"line {number}", LeftOut("truncated", str(error)), raw.tell())
            return
        yield Row(f"line {number}", value, raw.tell())


def _parquet(raw: BinaryIO) -> Iterator[Row]:
    number = 0
    try:
        with closing(pq.ParquetFile(raw)) as table:
            for batch in table.iter_batches(batch_size=PARQUET_ROWS):
                for value in batch.to_pylist():
                    number += 1
                    present = {key: cell for key, cell in value.items() if cell is not None}
                    yield Row(f"row {number}", present, raw.tell())
    except (pa.ArrowException, OSError, UnicodeError) as error:
        message = " ".join(str(error).split())
        yield Row(f"row {number + 1}", LeftOut("damaged", message), raw.seek(0, io.SEEK_END))
