"""Lines of `headwater log` as a file, written aside and renamed when it is whole.

.jsonl     one line an object
.parquet   the record's place and headers; of groups one row a trajectory, its Arrow columns as
           they are, and `prompt`; of other records `value`, as JSON text; `unreadable`

NaN is null in both.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from connectors.arrow import SCHEMA
from connectors.config import ConfigError
from deploy.read_log import Decoded, Line

SUFFIXES: Final = (".jsonl", ".parquet")
ROW_GROUP_ROWS: Final = 10_000
ROW_GROUP_BYTES: Final = 64 << 20

_PLACE: Final = [
    pa.field("partition", pa.int32()),
    pa.field("offset", pa.int64()),
    pa.field("time", pa.timestamp("ms", tz="UTC")),
    pa.field("key", pa.string()),
    pa.field("headers", pa.map_(pa.string(), pa.string())),
]
_OTHER: Final = [pa.field("value", pa.string()), pa.field("unreadable", pa.string())]


def check(file: Path) -> None:
    """ConfigError unless `file` can be exported to."""
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"--export {file}: its name must end in {' or '.join(SUFFIXES)}")
    if file.exists():
        raise ConfigError(f"--export {file}: is there already; name another file, or remove it")
    if not file.parent.is_dir():
        raise ConfigError(f"--export {file}: there is no folder {file.parent}")


def export(found: Iterable[Decoded], file: Path, *, groups: bool) -> int:
    """Writes `found` to `file`, which `check` let pass: the lines written. `groups`: the topic may
    hold groups."""
    with _aside(file) as staged:
        if file.suffix == ".parquet":
            return _parquet(found, staged, groups=groups)
        return _jsonl(found, staged)


@contextmanager
def _aside(file: Path) -> Iterator[Path]:
    staged = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        yield staged
        check(file)
        staged.rename(file)
    finally:
        staged.unlink(missing_ok=True)


def _jsonl(found: Iterable[Decoded], file: Path) -> int:
    count = 0
    with file.open("wb") as out:
        for decoded in found:
            for line in decoded.lines:
                out.write(msgspec.json.encode(line) + b"\n")
                count += 1
    return count


def _parquet(found: Iterable[Decoded], file: Path, *, groups: bool) -> int:
    columns = [*SCHEMA, pa.field("prompt", pa.string())] if groups else []
    schema = pa.schema([*_PLACE, *columns, *_OTHER])
    count = 0
    with pq.ParquetWriter(file, schema) as writer:
        for table in _row_groups(_batches(found, schema), schema):
            writer.write_table(table)
            count += table.num_rows
    return count


def _row_groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    rows = num_bytes = 0
    for batch in batches:
        held.append(batch)
        rows, num_bytes = rows + batch.num_rows, num_bytes + batch.nbytes
        if rows >= ROW_GROUP_ROWS or num_bytes >= ROW_GROUP_BYTES:
            yield pa.Table.from_batches(held, schema)
            held, rows, num_bytes = [], 0, 0
    if held:
        yield pa.Table.from_batches(held, schema)


def _batches(found: Iterable[Decoded], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    others: list[dict[str, Any]] = []
    for decoded in found:
        if decoded.batch is None:
            others += [_other(line) for line in decoded.lines]
        if others and (decoded.batch is not None or len(others) >= ROW_GROUP_ROWS):
            yield pa.RecordBatch.from_pylist(others, schema)
            others = []
        if decoded.batch is not None:
            yield _trajectories(decoded, schema)
    if others:
        yield pa.RecordBatch.from_pylist(others, schema)


def _other(line: Line) -> dict[str, Any]:
    row = {
        **line,
        "time": datetime.fromisoformat(line["time"]),
        "headers": list(line["headers"].items()),
    }
    if "value" in line:
        row["value"] = msgspec.json.encode(line["value"]).decode()
    return row


def _trajectories(decoded: Decoded, schema: pa.Schema) -> pa.RecordBatch:
    assert decoded.batch is not None
    batch = decoded.batch.take(pa.array(list(decoded.rows), pa.int64()))
    place: Mapping[str, Any] = _other({**decoded.lines[0], "value": None})
    known = set(batch.schema.names) & set(SCHEMA.names)
    made = {name: place[name] for name in ("partition", "offset", "time", "key", "headers")}
    made["prompt"] = msgspec.json.encode(decoded.lines[0]["value"]["prompt"]).decode()
    arrays = []
    for field in schema:
        if field.name in known:
            arrays.append(_without_nan(batch.column(field.name)))
        else:
            value = made.get(field.name)
            arrays.append(pa.array([value] * batch.num_rows, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _without_nan(column: pa.Array) -> pa.Array:
    """NaN as null; also within lists, maps and structs."""
    kind = column.type
    if pa.types.is_floating(kind):
        return pc.if_else(pc.is_nan(column), pa.scalar(None, kind), column)
    if pa.types.is_list(kind):
        inner = _without_nan(column.values)
        return pa.ListArray.from_arrays(column.offsets, inner, kind, mask=column.is_null())
    if pa.types.is_map(kind):
        inner = _without_nan(column.items)
        return pa.MapArray.from_arrays(
            column.offsets, column.keys, inner, kind, mask=column.is_null()
        )
    if pa.types.is_struct(kind):
        inner = [_without_nan(column.field(i)) for i in range(kind.num_fields)]
        return pa.StructArray.from_arrays(inner, fields=list(kind), mask=column.is_null())
    return column
