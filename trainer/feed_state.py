"""What the feed remembers between two steps: `FeedState`, JSON-encodable, in every checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from connectors.records import Coordinate, Fork, Version
from connectors.settled import Intervals

FIRST_VERSION = Version(0, 0)


class Unread(msgspec.Struct, frozen=True):
    """How a group ended whose terminal in `trajectories` has not been read yet: `closed` by an
    announcement, which a drop may be the cause of; `dropped`, and for what `reason`."""

    how: Literal["trained", "closed", "dropped"]
    reason: str = ""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """An open group: OpenGroup's fields, and where its record is once it arrived."""

    group_id: str
    partition: int
    offset: int
    oldest: Version
    newest: Version | None
    admitted_at: Version
    order: int
    ready_order: int | None = None
    coordinate: Coordinate | None = None
    num_rows: int = 0


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """granted = trained + closed + open. `dropped` (by the feed) and `closed_by_reason` are parts
    of `closed`, `dropped_by_reason` says how much of the latter are drops. After a recovery both
    miss closed groups whose terminal is still to be read, and a drop that no manifest listed yet
    counts as `stale` where neither its terminal nor a fork gives another reason. What is dropped
    and then closes by its terminal is no drop any more."""

    granted: int = 0
    trained: int = 0
    closed: int = 0
    dropped: int = 0
    duplicates: int = 0  # later terminals of an offset
    ungranted: int = 0  # terminals of offsets that were never granted
    closed_by_reason: dict[str, int] = {}
    dropped_by_reason: dict[str, int] = {}

    @property
    def ended_by_reason(self) -> Counter[str]:
        """Groups that closed by what their terminals say."""
        return Counter(self.closed_by_reason) - Counter(self.dropped_by_reason)


class Bits(msgspec.Struct, frozen=True):
    """A set of offsets from `floor` on, the lowest in the lowest bit of the first byte
    (`trainer.remembered`)."""

    floor: int = 0
    bits: bytes = b""


class Queued(msgspec.Struct, frozen=True):
    """A group of live traffic that waits for its step; `oldest` of its tokens, None of text."""

    coordinate: Coordinate
    oldest: Version | None


class TrafficCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of live traffic, by how they ended; `duplicates`: later terminals of one."""

    trained: int = 0
    duplicates: int = 0
    closed_by_reason: dict[str, int] = {}
    dropped_by_reason: dict[str, int] = {}


class TrafficState(msgspec.Struct, frozen=True, kw_only=True):
    """Live traffic between two steps (`trainer.traffic`).

    queue    in the order in which it is trained
    ended    by partition of a topic that names groups (TOPIC/PARTITION), which offsets have ended
    unread   groups that ended before their terminal was read: why they were dropped, "" trained
    dropped  as in `FeedState`
    """

    queue: tuple[Queued, ...] = ()
    ended: dict[str, Bits] = {}
    unread: dict[str, str] = {}
    dropped: dict[str, str] = {}
    counts: TrafficCounts = TrafficCounts()


class FeedState(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger between two steps.

    version        the open step trains it; its number is that of the steps closed so far
    published      the last announced version, None before the first; `digest` its weights'
    epoch          of the last announcement applied
    read           next offset of each `trajectories` partition
    policy_offset  next offset of `policy`
    limits         per prompt partition: below it, granted
    frontier       per prompt partition: below it, settled (trained or closed)
    settled        per prompt partition: settled offsets above the frontier
    open           groups neither trained nor closed, in admission order
    unread         settled groups whose terminal lies at or after `read`
    refunded       closed groups that no announcement has listed yet
    dropped        groups the feed dropped since the last closed step, and why
    cancelled      open groups whose cancel was announced
    unpublished    (version after the step, groups) of steps whose weights are not announced
    actions        of the policy since the last closed step, but for drops, counted (`FeedCore`)
    lineage        the fork of each incarnation up to the version's
    traffic        groups of live traffic, which nobody granted: in no count above
    policy         state of the staleness policy `policy_name`
    """

    version: Version
    published: Version | None
    digest: str
    epoch: int
    read: tuple[int, ...]
    policy_offset: int
    limits: tuple[int, ...]
    frontier: tuple[int, ...]
    settled: tuple[Intervals, ...]
    open: tuple[Entry, ...] = ()
    unread: dict[str, Unread] = {}
    refunded: tuple[str, ...] = ()
    dropped: dict[str, str] = {}
    cancelled: tuple[str, ...] = ()
    unpublished: tuple[tuple[Version, int], ...] = ()
    actions: dict[str, int] = {}
    lineage: dict[int, Fork] = {}
    traffic: TrafficState = TrafficState()
    num_admitted: int = 0
    num_arrived: int = 0
    counts: Counts = Counts()
    policy_name: str = ""
    policy: Any = None

    def terminals_from(self) -> dict[int, int]:
        """By partition of `trajectories`: the first offset that a recovery from here reads, of
        what was open or not read."""
        first = dict(enumerate(self.read))
        waiting = [e.coordinate for e in self.open if e.coordinate is not None]
        for at in (*waiting, *(queued.coordinate for queued in self.traffic.queue)):
            first[at.partition] = min(first[at.partition], at.offset)
        return first


def fresh(
    num_partitions: int,
    *,
    version: Version = FIRST_VERSION,
    starts: Sequence[int] | None = None,
) -> FeedState:
    """The state of a run that has granted nothing. `starts`: first offset of each prompt partition
    (what retention removed before the run is not granted)."""
    first = tuple(starts) if starts is not None else (0,) * num_partitions
    return FeedState(
        version=version,
        published=None,
        digest="",
        epoch=-1,
        read=(0,) * num_partitions,
        policy_offset=0,
        limits=first,
        frontier=first,
        settled=((),) * num_partitions,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedStep:
    """A full step: `records` in admission order, to be trained at `version` as step number `step`
    (= version.number + 1). `snapshot` is the ledger right after it closed: what the checkpoint of
    this step holds. `dropped` goes into its manifest as it is, and so do `actions`; tokens below
    `mask_before` are not trained."""

    step: int
    version: Version
    records: tuple[Coordinate, ...]
    dropped: tuple[str, ...]
    actions: Mapping[str, int]
    mask_before: Version | None
    snapshot: FeedState
