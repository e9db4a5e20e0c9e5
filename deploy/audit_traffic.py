"""The audit of live traffic: groups that nobody granted, followed by their own ids.

The feed takes them in the order of each partition of `trajectories`, and a step trains the first of
its queue. So once one is trained, every one before it in its partition has been trained or is
listed as dropped by that step or an earlier one: else it is lost. What lies behind the last one
trained may still be in the queue.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence

from connectors.records import Coordinate
from deploy.findings import Audit, Terminal
from trainer.feed_state import TrafficState
from trainer.remembered import Remembered
from trainer.traffic import is_traffic

_QUEUED, _TRAINED, _CLOSED, _DROPPED = "queued", "trained", "closed", "dropped"


class TrafficAudit:
    """Told of terminals, of what steps on the chain trained and of what they list as dropped, in
    the order of the log. `base`: what the feed knew where the kept log begins; `arrived`: the
    terminals of its queue."""

    def __init__(
        self,
        topics: Sequence[str],
        found: Audit,
        base: TrafficState | None,
        arrived: Iterable[Terminal] = (),
    ) -> None:
        base = base or TrafficState()
        self._topics, self._found = topics, found
        self._before = {lane: Remembered(bits) for lane, bits in base.ended.items()}
        self._unread, self._unlisted = set(base.unread), set(base.dropped)
        self._fates: dict[str, str] = {}
        self._queued: dict[str, Terminal] = {}
        self._order: defaultdict[int, deque[Terminal]] = defaultdict(deque)
        self._seen: set[str] = set()  # with a terminal
        self._again: set[str] = set()  # with a second one
        self._dropped_again: list[str] = []
        self._trained_to: dict[int, int] = {}  # by partition, in the step at hand
        counts = base.counts
        self._counts = Counter(
            {
                _TRAINED: counts.trained,
                _CLOSED: sum(counts.closed_by_reason.values()),
                _DROPPED: sum(counts.dropped_by_reason.values()) - len(base.dropped),
            }
        )
        self._num_duplicates = counts.duplicates
        for terminal in arrived:
            if self.owns(terminal.group_id):
                self._enqueue(terminal)

    def owns(self, group_id: str) -> bool:
        return is_traffic(group_id, self._topics)

    def take_in(self, terminal: Terminal) -> None:
        """A terminal, one that is corrupt among them: the feed closes its group."""
        group_id = terminal.group_id
        if group_id in self._unread:
            self._unread.discard(group_id)
            self._seen.add(group_id)
        elif group_id in self._seen or self._ended_before(group_id):
            self._num_duplicates += 1
            self._again.add(group_id)
        elif terminal.kind == "group":
            if group_id in self._fates:  # a step listed it before it was read here
                self._seen.add(group_id)
            else:
                self._enqueue(terminal)
        else:  # what was excluded before it was read, and closes, is no drop any more
            self._seen.add(group_id)
            self._counts[_DROPPED] -= self._fates.get(group_id) == _DROPPED
            self._end(group_id, _CLOSED)
            self._found.closed_by_reason[terminal.reason] += 1

    def train(self, record: Coordinate) -> tuple[bool, Terminal | None]:
        """A step trained it: whether it had not ended, and its terminal if there is any."""
        group_id = record.group_id
        fate = self._fates.get(group_id)
        is_first = fate == _QUEUED or (fate is None and not self._ended_before(group_id))
        if fate == _TRAINED:
            self._found.trained_twice.append(group_id)
        elif not is_first:
            self._found.settled_twice.append(group_id)
        self._end(group_id, _TRAINED)
        last = self._trained_to.get(record.partition, -1)
        self._trained_to[record.partition] = max(last, record.offset)
        return is_first, self._queued.pop(group_id, None)

    def drop(self, group_id: str) -> None:
        """A step lists it as dropped."""
        fate = self._fates.get(group_id)
        if fate == _CLOSED:
            return
        if fate in (_TRAINED, _DROPPED) or (fate is None and self._ended_before(group_id)):
            self._dropped_again.append(group_id)
            return
        self._unlisted.discard(group_id)
        self._end(group_id, _DROPPED)
        self._queued.pop(group_id, None)

    def step_ends(self, step: int) -> None:
        """All that the step trained and dropped was told."""
        for partition, offset in self._trained_to.items():
            order = self._order[partition]
            while order and order[0].offset < offset:
                passed = order.popleft()
                if self._queued.pop(passed.group_id, None) is not None:
                    self._found.lost[passed.group_id] = (
                        f"at trajectories/{partition}/{passed.offset}, before what step {step} "
                        "trained, and neither trained nor dropped"
                    )
        self._trained_to.clear()

    def has_terminal(self, group_id: str) -> bool:
        """In the log, or before the part of it that is kept."""
        lane, _, offset = group_id.rpartition("/")
        before = self._before.get(lane)
        known = before is not None and before.has(int(offset)) is not False
        return group_id in self._seen or (known and group_id not in self._unread)

    def finish(self, num_unscored: int) -> None:
        """`num_unscored` groups have no terminal yet. What is dropped after it ended was dropped
        for a second terminal, which came too late to be known as one; what is dropped and has no
        terminal was none of the run's."""
        found = self._found
        found.settled_twice += [g for g in self._dropped_again if g not in self._again]
        found.ungranted += [
            group_id
            for group_id, fate in self._fates.items()
            if fate == _DROPPED and group_id not in self._seen
        ]
        found.traffic = {
            **{how: self._counts[how] for how in (_TRAINED, _CLOSED, _DROPPED)},
            _QUEUED: len(self._queued),
            "scoring": num_unscored,
            "duplicates": self._num_duplicates,
        }

    def _enqueue(self, terminal: Terminal) -> None:
        self._seen.add(terminal.group_id)
        self._fates[terminal.group_id] = _QUEUED
        self._queued[terminal.group_id] = terminal
        self._order[terminal.partition].append(terminal)

    def _end(self, group_id: str, how: str) -> None:
        self._fates[group_id] = how
        self._counts[how] += 1

    def _ended_before(self, group_id: str) -> bool:
        """Where the kept log begins; what was dropped there and is still to be listed had not."""
        lane, _, offset = group_id.rpartition("/")
        before = self._before.get(lane)
        return (
            before is not None and bool(before.has(int(offset))) and group_id not in self._unlisted
        )
