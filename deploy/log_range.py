"""A range of a topic as a user names it: `--from` and `--to`.

    17                 offset 17 of every partition
    0/17               offset 17 of partition 0; then only partitions named so are read
    2026-05-01T12:00   a time, in UTC unless it says its zone

Both ends are within the range.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from connectors.config import ConfigError
from connectors.kafka.client import Reader

_OFFSET: Final = re.compile(r"(?:(\d+)/)?(\d+)")
Points = dict[int | None, int | datetime]
"""The offset or time given for a partition; None: for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """By partition. `first`: the first offset to read; `stop`: the one to stop before, not beyond
    the end of the log at the call; `held`: where the log starts and ends; `removed`: of a first
    offset asked for that retention removed, the first one that is left."""

    first: Mapping[int, int]
    stop: Mapping[int, int]
    held: Mapping[int, tuple[int, int]]
    removed: Mapping[int, int]


def resolve(reader: Reader, since: Sequence[str], until: Sequence[str]) -> Range:
    """What `--from` and `--to` mean for the topic of `reader`, which reads all its partitions.
    ConfigError when they mean nothing there."""
    starts, ends = reader.starts(), reader.ends()
    points = _points("--from", since), _points("--to", until)
    named = {p for given in points for p in given if p is not None}
    if unknown := sorted(named - starts.keys()):
        raise ConfigError(f"there is no partition {unknown[0]}; the topic has {len(starts)}")
    _refuse_empty(points, named or starts)
    asked = _offsets(reader, points[0], starts, after=False)
    last = _offsets(reader, points[1], ends, after=True)
    first, stop = {}, {}
    for p in sorted(named or starts):
        stop[p] = max(starts[p], min(last[p], ends[p]))
        first[p] = max(starts[p], min(asked[p], stop[p]))
    return Range(
        first=first,
        stop=stop,
        held={p: (starts[p], ends[p]) for p in first},
        removed={p: starts[p] for p in first if asked[p] < starts[p]},
    )


def _refuse_empty(points: tuple[Points, Points], partitions: Iterable[int]) -> None:
    """ConfigError where `--to` comes before `--from`, as far as both are offsets or times."""
    for p in partitions:
        match [given.get(p, given.get(None)) for given in points]:
            case [int() as first, int() as last] if last < first:
                raise ConfigError(f"--to {last} comes before --from {first} in partition {p}")
            case [datetime() as since, datetime() as until] if until < since:
                raise ConfigError(f"--to {until} comes before --from {since}")


def _points(option: str, given: Sequence[str]) -> Points:
    found: Points = {}
    for text in given:
        if match := _OFFSET.fullmatch(text):
            found[None if match[1] is None else int(match[1])] = int(match[2])
        else:
            found[None] = _time(option, text)
    if len(found) < len(given) or (None in found and len(found) > 1):
        raise ConfigError(
            f"{option}: is one offset, one time, or PARTITION/OFFSET once for each partition meant"
        )
    return found


def _time(option: str, text: str) -> datetime:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{option} {text}: is no offset, no PARTITION/OFFSET and no time like 2026-05-01T12:00"
        ) from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _offsets(
    reader: Reader, points: Points, default: Mapping[int, int], *, after: bool
) -> dict[int, int]:
    """Every partition's offset, or with `after` the one behind what the point means."""
    found = dict(default)
    for partition, point in points.items():
        if isinstance(point, datetime):
            found |= reader.offsets_at(int(point.timestamp() * 1000) + after)
        elif partition is None:
            found |= dict.fromkeys(found, point + after)
        else:
            found[partition] = point + after
    return found
