"""What a crash or a bad disk leaves in a run's files, done to files nobody has open."""

from __future__ import annotations

import random
from pathlib import Path

import psutil

from connectors.broker.batch import HEADER, parse_header

GARBAGE_BYTES = 300


def newest_segment(broker_data: Path, topic: str) -> Path | None:
    """Of the fullest partition of a topic (its full name)."""
    segments = sorted((broker_data / "topics" / topic).glob("*/*.log"))
    newest = {segment.parent: segment for segment in segments}
    return max(newest.values(), key=lambda s: s.stat().st_size, default=None)


def tear_tail(segment: Path, how: str, rng: random.Random) -> None:
    """Leaves at a segment's end what a broker that was killed while it wrote leaves there: bytes
    that were never acknowledged."""
    with segment.open("ab") as file:
        file.write(_torn(segment.read_bytes(), how, rng))


def _torn(log: bytes, how: str, rng: random.Random) -> bytes:
    """Half of the batch that would have come next, or noise."""
    position, last = 0, None
    while position < len(log):
        last = parse_header(log, position)
        position += last.size
    if how == "garbage" or last is None:
        return rng.randbytes(GARBAGE_BYTES)
    following = HEADER.pack(*last._replace(base_offset=last.base_offset + last.num_records))
    batch = following + log[-last.size + len(following) :]
    return batch[: rng.randrange(1, len(batch))]


def damage_checkpoint(checkpoints: Path, how: str) -> int:
    """Damages the newest one; its step."""
    newest = max(checkpoints.glob("step-*"))
    step = int(newest.name.removeprefix("step-"))
    largest = max((f for f in newest.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    if how == "a file gone":
        largest.unlink()
        return step
    content = bytearray(largest.read_bytes())
    if how == "cut short":
        del content[len(content) // 2 :]
    else:
        content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    return step


def limit_files(process: psutil.Process, num_bytes: int) -> None:
    """No file of the process grows beyond `num_bytes`, as if its disk were full; -1: no limit.

    The kernel holds to it, so it is true of every library (torch's writer, SQLite), of a write that
    is cut short, and of a process that runs already. What differs from a full disk is the error's
    number: EFBIG, not ENOSPC."""
    _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (hard if num_bytes < 0 else num_bytes, hard))
