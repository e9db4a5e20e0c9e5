"""A run's past as plain values, folded from its log: what `status`, `audit` and `trace` look at.

Nothing here trusts a process or the trainer's own books; everything comes from records. Pure,
except for `Follower`, which reads.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from connectors.kafka.client import Cluster, Reader, Record
from connectors.records import Fork, Manifest, Origin, Version, parse_group_id
from trainer.feed_state import FeedState, fresh

# What became of a granted prompt; several may hold of one.
ARRIVED: Final = 1  # it has a terminal in `trajectories`
CLOSED: Final = 2  # which says that it closed, or cannot be read
REFUNDED: Final = 4  # an announcement counts its refund
DROPPED: Final = 8  # a step on the chain lists it
TRAINED: Final = 16  # by a step on the chain
BEFORE: Final = 32  # it ended before the part of the log that is kept
_ENDED: Final = CLOSED | REFUNDED | DROPPED | TRAINED | BEFORE

CLOCK_SKEW_S: Final = 600.0
"""How far the clocks of two machines of a run may be apart."""

Place = tuple[int, int]
"""Partition and offset of a prompt."""


class Prompts:
    """What became of each granted prompt: five bytes an offset, however long the run.

    What is said of an offset before its grant is kept aside until that is read (`early`).

    topic    full name of `prompts`
    limits   per partition, the offset below which prompts are granted
    unread   prompts that had ended where the kept log begins, whose terminals come after it: how
    granted, open, closed, dropped (by the feed, and not closed), arrived (with a terminal): counts
    sampled_tokens, dropped_tokens: of the groups that `sampled` was told of
    """

    def __init__(self, topic: str, base: FeedState | None = None) -> None:
        """`base`: the ledger where the kept log begins, None for a whole log."""
        base = base or fresh(0)
        counts, ready = base.counts, [e for e in base.open if e.coordinate is not None]
        self.topic = topic
        self.limits = list(base.limits)
        self.num_granted, self.open = counts.granted, len(base.open)
        self.closed, self.dropped = counts.closed - counts.dropped, counts.dropped
        self.unread = {p: e.how for g, e in base.unread.items() if (p := self.place(g)) is not None}
        self.arrived = counts.trained + counts.closed - len(self.unread) + len(ready)
        self.early: dict[Place, int] = {}
        self.sampled_tokens = self.dropped_tokens = 0
        self._early_tokens: dict[Place, int] = {}
        self._starts = list(base.frontier)
        self._fates = [
            bytearray(limit - start)
            for start, limit in zip(base.frontier, base.limits, strict=True)
        ]
        self._tokens = [array("I", bytes(4 * len(fates))) for fates in self._fates]
        for partition, intervals in enumerate(base.settled):
            for start, end in intervals:
                first, last = start - self._starts[partition], end - self._starts[partition]
                self._fates[partition][first:last] = bytes([BEFORE]) * (last - first)
        for entry in ready:
            self._fates[entry.partition][entry.offset - self._starts[entry.partition]] = ARRIVED

    def grant(self, limits: Sequence[int]) -> list[tuple[int, int, int]]:
        """(partition, first, end) of what `limits` grant anew; a limit that falls grants
        nothing."""
        new = []
        for partition, limit in enumerate(limits):
            if partition == len(self.limits):
                self.limits.append(0)
                self._starts.append(0)
                self._fates.append(bytearray())
                self._tokens.append(array("I"))
            first = self.limits[partition]
            if limit > first:
                self._fates[partition].extend(bytes(limit - first))
                self._tokens[partition].frombytes(bytes(4 * (limit - first)))
                self.limits[partition] = limit
                self.num_granted += limit - first
                self.open += limit - first
                new.append((partition, first, limit))
        for place in [p for p in self.early if self.granted(p)]:
            self._tokens[place[0]][self._at(place)] = self._early_tokens.pop(place, 0)
            self.mark(place, self.early.pop(place))
        return new

    def place(self, group_id: str) -> Place | None:
        """The prompt a group came from; None when it is no id of this run's groups."""
        try:
            origin = parse_group_id(group_id)
        except ValueError:
            return None
        if origin.topic != self.topic or origin.partition < 0 or origin.offset < 0:
            return None
        return origin.partition, origin.offset

    def granted(self, place: Place) -> bool:
        partition, offset = place
        return partition < len(self.limits) and offset < self.limits[partition]

    def fate(self, place: Place) -> int:
        """What was marked."""
        if not self.granted(place):
            return self.early.get(place, 0)
        at = self._at(place)
        return BEFORE if at < 0 else self._fates[place[0]][at]

    def has_ended(self, place: Place) -> bool:
        return bool(self.fate(place) & _ENDED)

    def begin_at(self, starts: Sequence[int]) -> None:
        """Nothing below `starts` is granted; before the first grant only."""
        self.limits, self._starts = list(starts), list(starts)
        self._fates = [bytearray() for _ in starts]
        self._tokens = [array("I") for _ in starts]

    def sampled(self, place: Place, num_tokens: int) -> None:
        """Notes the tokens sampled for a prompt that has arrived; once each."""
        self.sampled_tokens += num_tokens
        if not self.granted(place):
            self._early_tokens[place] = num_tokens
        elif not (fate := self.fate(place)) & BEFORE:
            self._tokens[place[0]][self._at(place)] = num_tokens
            self.dropped_tokens += num_tokens * _is_dropped(fate)

    def read_again(self, place: Place, *, closed: bool) -> bool:
        """The terminal of an unread one: whether it closed by that. What was dropped and closes is
        no drop, what closed by an announcement and was scored is one."""
        how = self.unread.pop(place)
        self.arrived += 1
        if closed and how == "dropped":
            self.closed, self.dropped = self.closed + 1, self.dropped - 1
        elif not closed and how == "closed":
            self.closed, self.dropped = self.closed - 1, self.dropped + 1
        return closed and how != "trained"

    def mark(self, place: Place, what: int) -> int:
        """Adds `what`; the fate before."""
        return self._change(place, what, 0)

    def unmark(self, place: Place, what: int) -> int:
        return self._change(place, 0, what)

    def _change(self, place: Place, add: int, remove: int) -> int:
        before = self.fate(place)
        after = (before | add) & ~remove
        if not self.granted(place):
            self.early[place] = after
            return before
        if before & BEFORE or after == before:
            return before
        at, partition = self._at(place), place[0]
        self._fates[partition][at] = after
        self.open += (not after & _ENDED) - (not before & _ENDED)
        self.closed += bool(after & CLOSED) - bool(before & CLOSED)
        newly_dropped = _is_dropped(after) - _is_dropped(before)
        self.dropped += newly_dropped
        self.dropped_tokens += newly_dropped * self._tokens[partition][at]
        self.arrived += bool(after & ARRIVED) - bool(before & ARRIVED)
        return before

    def _at(self, place: Place) -> int:
        """Where a granted prompt is in its partition's arrays; negative before what is kept."""
        return place[1] - self._starts[place[0]]

    def id_of(self, place: Place) -> str:
        """The group id of a prompt."""
        return str(Origin(self.topic, *place))


def _is_dropped(fate: int) -> bool:
    return bool(fate & (REFUNDED | DROPPED)) and not fate & CLOSED


_NONE: Final[dict[str, Any]] = {}


def slim(manifest: Manifest) -> Manifest:
    """What a chain of steps needs of a manifest: a few hundred bytes, however many records."""
    return msgspec.structs.replace(
        manifest, records=(), micro_batches=(), environment=_NONE, settings=_NONE, metrics=_NONE,
        staleness=_NONE,
    )  # fmt: skip


class Line:
    """The versions that lead to the current weights; the others were given up."""

    def __init__(self, incarnation: int, lineage: Mapping[int, Fork]) -> None:
        self.lineage = lineage
        self._ends: dict[int, float] = {incarnation: float("inf")}
        while (fork := lineage.get(incarnation)) is not None and fork.parent not in self._ends:
            kept = fork.number if fork.reason == "rollback" else float("inf")
            self._ends[fork.parent] = min(kept, self._ends[incarnation])
            incarnation = fork.parent

    def __contains__(self, version: Version) -> bool:
        return version.number <= self._ends.get(version.incarnation, -1)


def lineage_of(forks: Mapping[int, Fork]) -> list[dict[str, Any]]:
    """`lineage` of `status` and `audit`: the fork of each incarnation."""
    return [
        {"incarnation": incarnation, **msgspec.structs.asdict(fork)}
        for incarnation, fork in sorted(forks.items())
    ]


def fork_text(fork: Mapping[str, Any]) -> str:
    """One entry of `lineage`, as `status` and `audit` list it. `rollback` and `fork` write the same
    record."""
    how = "a rebuild of" if fork["reason"] == "rebuild" else "goes on from"
    return f"{fork['incarnation']}: {how} incarnation {fork['parent']} after step {fork['number']}"


class Follower:
    """Reads partitions of a topic from their start, and what is new at each call."""

    def __init__(self, cluster: Cluster, topic: str, partitions: Sequence[int]) -> None:
        """`topic` without namespace. KafkaFailure when it does not exist."""
        self._reader = Reader(cluster, cluster.topic(topic), dict.fromkeys(partitions, 0))
        self.starts: Mapping[int, int] = self._reader.rewind()
        self.ends: Mapping[int, int] = dict(self.starts)

    def seek(self, partition: int, offset: int) -> None:
        self._reader.seek(partition, max(offset, self.starts[partition]))

    def seek_time(self, time_s: float) -> None:
        """To the first records written then or later."""
        for partition, offset in self._reader.offsets_at(max(0, int(time_s * 1000))).items():
            self.seek(partition, offset)

    def news(self) -> Iterator[Record]:
        """Every record up to the end at the call, in offset order a partition."""
        self.ends = self._reader.ends()
        yield from self._reader.read_to(self.ends, 5_000)

    def to(self, ends: Mapping[int, int]) -> Iterator[Record]:
        """Every record below `ends`."""
        for record in self._reader.read_to(ends, 5_000):
            if record.offset < ends[record.partition]:
                yield record

    def skip(self) -> None:
        """Only takes note of the ends."""
        self.ends = self._reader.ends()

    def close(self) -> None:
        self._reader.close()
