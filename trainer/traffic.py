"""Live traffic in the ledger: groups that nobody granted, in a queue until a step trains them.

    first terminal ──▶ in time? ──▶ queue, in the order read ──(T a step)──▶ trained
         │                └─ no: dropped as stale         └─ no signal, excluded, gone: dropped
         └─ closed, or a second one: counted

Every step takes the first T = `num_places` of the queue, or as many as there are, and nothing ever
goes before another. So the group at position q is trained by the q // T-th step from the open one
on, at version v + q // T: it is admitted iff all its tokens are within the bound there, and of what
was admitted none is ever trained older. Only a rollback or a lowered bound changes that: `recheck`.

Each terminal is trained, dropped or in the queue. Which groups have ended is remembered as one bit
an offset of the topics that name them (`trainer.remembered`), so in bounded memory however long the
run: a terminal that comes a million calls too late to say whether it is its group's first is
dropped as stale, and never trained twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

from connectors.kafka.client import Cluster
from connectors.records import Coordinate, Fork, Version, parse_group_id
from connectors.traffic import TOPICS
from operators.staleness.lineage import lag
from trainer.accounts import LedgerBroken
from trainer.actions import FILTERED, STALE
from trainer.feed_state import Queued, TrafficCounts, TrafficState
from trainer.remembered import Remembered

_TRAINED: Final = ""
"""How a group ended that a manifest trained before its terminal was read; else why it was
dropped."""
_BOUND: Final = "nearline_bound"
_LABELS: Final = ("nearline_low", "nearline_high")


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowance:
    """What `[nearline]` gives live traffic.

    num_places  of each step's groups, at most
    bound       steps that a trained token may be old
    topics      full names of those whose records name its groups
    labels      the bounds of its labels
    """

    num_places: int
    bound: int
    topics: tuple[str, ...]
    labels: tuple[float, float] = (0.0, 1.0)

    def settings(self) -> dict[str, float | str]:
        """As a manifest's settings hold it."""
        return {_BOUND: self.bound, **dict(zip(_LABELS, self.labels, strict=True))}


def bound_of(settings: Mapping[str, float | str]) -> int | None:
    """Of live traffic in a step with these settings; None without `[nearline]`."""
    return int(settings[_BOUND]) if _BOUND in settings else None


def labels_of(settings: Mapping[str, float | str]) -> tuple[float, float] | None:
    """The bounds of live traffic's labels, as `bound_of`."""
    low, high = (settings.get(name) for name in _LABELS)
    return None if low is None or high is None else (float(low), float(high))


def topics_of(cluster: Cluster) -> tuple[str, ...]:
    """Full names of those whose records name groups of live traffic."""
    return tuple(cluster.topic(name) for name in TOPICS)


def is_traffic(group_id: str, topics: Iterable[str]) -> bool:
    """Whether a record of one of `topics` (full names) names the group."""
    try:
        origin = parse_group_id(group_id)
    except ValueError:
        return False
    return origin.topic in topics and origin.partition >= 0 and origin.offset >= 0


class Traffic:
    """`queue` by group id, in order; `dropped`: since the last closed step, and why. Without an
    allowance no group is one of live traffic."""

    def __init__(self, state: TrafficState, allowance: Allowance | None = None) -> None:
        self.allowance = allowance or Allowance(num_places=0, bound=0, topics=())
        self.queue = {queued.coordinate.group_id: queued for queued in state.queue}
        self.dropped = dict(state.dropped)
        self._ended = {lane: Remembered(bits) for lane, bits in state.ended.items()}
        self._unread = dict(state.unread)
        self._num_trained = state.counts.trained
        self._num_duplicates = state.counts.duplicates
        self._closed = Counter(state.counts.closed_by_reason)
        self._drops = Counter(state.counts.dropped_by_reason)

    @property
    def num_places(self) -> int:
        return self.allowance.num_places

    def settings(self) -> dict[str, float | str]:
        """What a step's manifest is to say of it."""
        return self.allowance.settings() if self.num_places else {}

    def owns(self, group_id: str) -> bool:
        return self.num_places > 0 and is_traffic(group_id, self.allowance.topics)

    def state(self) -> TrafficState:
        return TrafficState(
            queue=tuple(self.queue.values()),
            ended={lane: remembered.bits() for lane, remembered in self._ended.items()},
            unread=dict(self._unread),
            dropped=dict(self.dropped),
            counts=self.counts(),
        )

    def counts(self) -> TrafficCounts:
        return TrafficCounts(
            trained=self._num_trained,
            duplicates=self._num_duplicates,
            closed_by_reason=dict(+self._closed),
            dropped_by_reason=dict(+self._drops),
        )

    # --------------------------------------------------------------------------------- terminals
    def awaits(self, group_id: str) -> bool:
        """Whether the next terminal of the group is its first, and no step trained it."""
        if (ended := self._unread.get(group_id)) is not None:
            return ended != _TRAINED
        return group_id not in self.queue and self._has_ended(group_id) is False

    def is_over(self, group_id: str) -> bool:
        """Whether it has ended, and its terminal was read."""
        return group_id not in self._unread and self._has_ended(group_id) is not False

    def arrive(
        self,
        coordinate: Coordinate,
        oldest: Version | None,
        version: Version,
        lineage: Mapping[int, Fork],
    ) -> bool:
        """A group was read at `coordinate`, while the open step trains `version`. True if it is in
        the queue now: its first terminal, in time. `oldest`: of its tokens, None of text."""
        group_id = coordinate.group_id
        if not self._is_first(group_id):
            return False
        forgotten = self._has_ended(group_id) is None
        self.queue[group_id] = queued = Queued(coordinate, oldest)
        if forgotten or not self._in_time(queued, len(self.queue) - 1, version, lineage):
            self.drop(group_id, STALE)
        return group_id in self.queue

    def close(self, group_id: str, reason: str) -> bool:
        """A `closed` terminal was read. True if it is the group's first. LedgerBroken if a step
        trained the group before."""
        ended = self._unread.get(group_id)
        if ended == _TRAINED:
            raise LedgerBroken(f"{group_id} was trained, but its first terminal says {reason}")
        if not self._is_first(group_id) and ended is None:
            return False
        if ended is not None:  # excluded before it was read: it has an end of its own
            self._drops[ended] -= 1
        self._mark(group_id)
        self._closed[reason] += 1
        return True

    def _is_first(self, group_id: str) -> bool:
        if self._unread.pop(group_id, None) is not None:
            return False
        if group_id in self.queue or self._has_ended(group_id):
            self._num_duplicates += 1
            return False
        return True

    # -------------------------------------------------------------------------------------- ends
    def take(self) -> tuple[Coordinate, ...]:
        """What the step that closes trains."""
        taken = list(islice(self.queue.items(), self.num_places))
        for group_id, _ in taken:
            del self.queue[group_id]
            self._mark(group_id)
        self._num_trained += len(taken)
        return tuple(queued.coordinate for _, queued in taken)

    def drop(self, group_id: str, reason: str) -> bool:
        """Gives up a queued group, to be listed in the next step's manifest. False if it is not in
        the queue."""
        if self.queue.pop(group_id, None) is None:
            return False
        self._mark(group_id)
        self.dropped[group_id] = reason
        self._drops[reason] += 1
        return True

    def recheck(self, version: Version, lineage: Mapping[int, Fork]) -> list[str]:
        """Drops what is too old by now; their ids. For a queue that comes from elsewhere: other
        weights, or another bound."""
        late: list[str] = []
        for position, (group_id, queued) in enumerate(list(self.queue.items())):
            if not self._in_time(queued, position - len(late), version, lineage):
                self.drop(group_id, STALE)
                late.append(group_id)
        return late

    # ----------------------------------------------------------------- what the log says happened
    def trained(self, record: Coordinate) -> None:
        """A manifest trained it. LedgerBroken where it is another record, or had ended."""
        group_id = record.group_id
        queued = self.queue.pop(group_id, None)
        if queued is None:
            if group_id in self._unread or self._has_ended(group_id):
                raise LedgerBroken(f"{group_id} was trained, though it had ended")
            self._unread[group_id] = _TRAINED
        elif queued.coordinate != record:
            raise LedgerBroken(f"{record} was trained; in the queue it is {queued.coordinate}")
        self._mark(group_id)
        self._num_trained += 1

    def drop_recorded(self, group_id: str, reason: str) -> None:
        """A manifest lists it as dropped, so the next one need not."""
        before = self.dropped.pop(group_id, None)
        if before is not None:
            self._drops[before] -= 1
        elif self.queue.pop(group_id, None) is None:
            if self._has_ended(group_id):
                return
            self._unread[group_id] = reason
        self._mark(group_id)
        self._drops[reason] += 1

    def exclude(self, group_id: str) -> None:
        """A fork says that it must not be trained."""
        if self.drop(group_id, FILTERED) or self._has_ended(group_id) is not False:
            return
        self._mark(group_id)
        self._unread[group_id] = self.dropped[group_id] = FILTERED
        self._drops[FILTERED] += 1

    # ------------------------------------------------------------------------------------ helpers
    def _in_time(
        self, queued: Queued, position: int, version: Version, lineage: Mapping[int, Fork]
    ) -> bool:
        if queued.oldest is None:
            return True
        steps = position // self.num_places
        at = Version(version.incarnation, version.number + steps)
        return lag(at, queued.oldest, lineage) <= self.allowance.bound

    def _has_ended(self, group_id: str) -> bool | None:
        """None where it is forgotten."""
        lane, _, offset = group_id.rpartition("/")
        remembered = self._ended.get(lane)
        return False if remembered is None else remembered.has(int(offset))

    def _mark(self, group_id: str) -> None:
        lane, _, offset = group_id.rpartition("/")
        self._ended.setdefault(lane, Remembered()).add(int(offset))
