"""`psrl-roc`: reserve, occupy, consume (PSRL's staleness inventory).

Every train version has a buffer of B entries. A group of start version s may enter buffers up to
s + eta.

* Reserve: a granted group takes an entry of the latest buffer it may enter that has one free: the
  worst case, planned for at once. So many groups may be granted as entries are free in the buffers
  from the open step's to published + eta.
* Occupy: a finished group gives its entry back, and one running group of an earlier buffer that may
  enter that one, the youngest of the earliest buffer that has any, moves there. Then the finished
  group takes an entry of the earliest buffer that has one free.
* Consume: a step trains its buffer when all B entries are occupied, else it waits. A buffer without
  a free entry that still waits for running groups is stuck.

So finished groups come forward, running ones go back as far as they may, and no group is ever in a
buffer it is too old for: strict, bound eta, and nothing that was granted is dropped. A group that
closes untrained frees its entry.

Parameters: `staleness` eta (0; PSRL advises 1 to 3), `staleness_buffer_entries` B (512; in a run
its batch size). `proactive_filter` (None) gives up the running groups of the open step's buffer
when it is stuck on at most `proactive_filter_threshold` (4) of them; only those that started before
the published version, as the others can still move. "retry" puts them back, to start again under
that version: what they have generated is lost, the prompt is not. "truncate" closes them: no group
trains on half of its tokens here, so it is lost altogether, and what is trained tilts to short
groups. PSRL's redundant rollout is no matter of the policy. Unit: group.

Source: PSRL's `StalenessInventory`.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from connectors.parameters import Count, OneOf
from connectors.records import Cancel, Version
from operators.staleness.preset import MOST_STEPS, Preset
from operators.staleness.types import (
    Announced,
    Arrived,
    Choice,
    Closed,
    Committed,
    Event,
    Granted,
    Ledger,
    OpenGroup,
    Unit,
)


class Place(msgspec.Struct, frozen=True):
    """Where a group is. `buffer`: the number of the version it is to train; one that has passed
    stands for the open step's."""

    buffer: int
    start: Version
    running: bool


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """open     number of the version the open step trains
    places   of open groups, in admission order
    """

    published: Version | None = None
    open: int = 0
    places: dict[str, Place] = {}


class ReserveOccupyConsume:
    unit: Unit = "group"
    auditable = False
    name = "psrl-roc"

    def __init__(
        self,
        staleness: int,
        staleness_buffer_entries: int,
        proactive_filter: str | None,
        proactive_filter_threshold: int,
    ) -> None:
        self.eta = staleness
        self.bound: int | None = staleness
        self.num_entries = staleness_buffer_entries
        self.filter = proactive_filter
        self.threshold = proactive_filter_threshold

    def start(self) -> Inventory:
        return Inventory()

    def observe(self, state: Inventory, event: Event) -> Inventory:
        match event:
            case Granted(group_id, version):
                state = self._reserve(state, group_id, version)
            case Arrived(group_id, oldest) if group_id in state.places:
                state = self._occupy(state, group_id, oldest)
            case Committed(group_id, step):
                state = msgspec.structs.replace(_without(state, group_id), open=step)
            case Closed(group_id):
                state = _without(state, group_id)
            case Announced(version):
                state = _published(state, version)
        return self._retry(state) if self.filter == "retry" else state

    def credits(self, state: Inventory, ledger: Ledger) -> int:
        return sum(self._free(state, ledger.version.number, ledger.published.number).values())

    def cancel(self, state: Inventory, ledger: Ledger) -> tuple[Cancel, ...]:
        """Until it is obeyed, a group that is to start again is older in the ledger than here."""
        running = {g.group_id: g for g in ledger.running if g.group_id in state.places}
        if self.filter == "truncate":
            stuck = [g for g in self._stuck(state) if g in running]
            return tuple(Cancel(g, then="close", reason="cancelled") for g in stuck)
        again = (g for g in running.values() if g.oldest < state.places[g.group_id].start)
        return tuple(Cancel(g.group_id, then="requeue", reason="cancelled") for g in again)

    def choose(self, state: Inventory, ledger: Ledger) -> Choice:
        """A ready group that is too old all the same is dropped wherever it is; what a rollback or
        a changed batch size left in a wrong buffer trains late, or ends like that."""
        late = tuple(g.group_id for g in ledger.ready if ledger.age(g) > self.eta)
        occupied = [
            g for g in ledger.ready if g.group_id not in late and _is_open(g, state, ledger)
        ]
        if len(occupied) < ledger.free_slots:
            return Choice(drop=late)
        return Choice(commit=tuple(g.group_id for g in occupied[: ledger.free_slots]), drop=late)

    def _free(self, state: Inventory, first: int, newest: int) -> dict[int, int]:
        """Free entries, if any, of each buffer from `first` on that a group of version `newest` may
        enter."""
        taken = Counter(max(place.buffer, first) for place in state.places.values())
        buffers = range(first, newest + self.eta + 1)
        return {b: self.num_entries - taken[b] for b in buffers if taken[b] < self.num_entries}

    def _reserve(self, state: Inventory, group_id: str, start: Version) -> Inventory:
        free = self._free(state, state.open, start.number)
        latest = max(free, default=max(state.open, start.number + self.eta))
        return _with(state, group_id, Place(latest, start, running=True))

    def _occupy(self, state: Inventory, group_id: str, oldest: Version) -> Inventory:
        left = max(state.places[group_id].buffer, state.open)
        state = _without(state, group_id)
        earlier = [
            (max(place.buffer, state.open), -order, other)
            for order, (other, place) in enumerate(state.places.items())
            if place.running
            and max(place.buffer, state.open) < left <= place.start.number + self.eta
        ]
        if earlier:
            _, _, other = min(earlier)
            moved = msgspec.structs.replace(state.places[other], buffer=left)
            state = _with(state, other, moved)
        free = self._free(state, state.open, oldest.number)
        return _with(state, group_id, Place(min(free, default=left), oldest, running=False))

    def _stuck(self, state: Inventory) -> list[str]:
        """The groups of the open step's buffer that the filter gives up."""
        here = {g: place for g, place in state.places.items() if place.buffer <= state.open}
        running = {g: place for g, place in here.items() if place.running}
        published = state.published
        free = len(here) < self.num_entries
        if published is None or free or len(running) > self.threshold:
            return []
        return [g for g, place in running.items() if place.start < published]

    def _retry(self, state: Inventory) -> Inventory:
        published = state.published
        if published is None:
            return state
        for group_id in self._stuck(state):
            again = msgspec.structs.replace(state.places[group_id], start=published)
            state = _with(state, group_id, again)
        return state


def _published(state: Inventory, version: Version) -> Inventory:
    """In a new incarnation the run may have gone back."""
    same = state.published is not None and state.published.incarnation == version.incarnation
    first = max(state.open, version.number) if same else version.number
    return msgspec.structs.replace(state, published=version, open=first)


def _is_open(group: OpenGroup, state: Inventory, ledger: Ledger) -> bool:
    place = state.places.get(group.group_id)
    return place is None or place.buffer <= ledger.version.number


def _with(state: Inventory, group_id: str, place: Place) -> Inventory:
    return msgspec.structs.replace(state, places={**state.places, group_id: place})


def _without(state: Inventory, group_id: str) -> Inventory:
    places = {g: place for g, place in state.places.items() if g != group_id}
    return msgspec.structs.replace(state, places=places)


PRESETS = {
    "psrl-roc": Preset(
        build=ReserveOccupyConsume,
        parameters={
            "staleness": Count(0, most=MOST_STEPS),
            "staleness_buffer_entries": Count(512, least=1),
            "proactive_filter": OneOf((None, "retry", "truncate"), None),
            "proactive_filter_threshold": Count(4, least=1),
        },
        from_run={"staleness_buffer_entries": lambda shape: shape.batch_size},
        fixed=("staleness_buffer_entries",),
    )
}
