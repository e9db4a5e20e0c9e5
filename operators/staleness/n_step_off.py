"""`n-step-off`: every group is reserved for one step, at most n versions after it starts. Strict,
and drops nothing while engines keep their promise to start no group below its grant's version.

This is NeMo-RL's `in_order` sampler with look-ahead n. Its rule: targets are filled in order, B
groups each; target t may be granted while t <= published + n; the step that trains version t waits
for exactly the groups of target t. It is kept here without naming targets: a grant takes the lowest
free *slot*, a commit uses its slot up, a group that closes untrained gives its slot back. The k
free places of the open step belong to the k lowest slots that are not used up, taken or not, the
next B to the step after it, and so on. A replacement so inherits the earliest short target by
itself, the bound follows as for `in_order` (the place of a slot in that order never gets worse),
and a changed batch size needs no care.

`sync` is n = 0 and `one-step-off` n = 1.
"""

from __future__ import annotations

import bisect

import msgspec

from connectors.parameters import Count
from connectors.records import Cancel, Version
from operators.staleness.lineage import lag
from operators.staleness.preset import MOST_STEPS, Preset
from operators.staleness.types import (
    Announced,
    Choice,
    Closed,
    Committed,
    Event,
    Granted,
    Ledger,
    Unit,
)


class Slots(msgspec.Struct, frozen=True, kw_only=True):
    """published   the last announced version
    taken       the slot of each open group
    free        slots given back, ascending
    next_slot   the first slot never taken
    """

    published: Version | None = None
    taken: dict[str, int] = {}
    free: tuple[int, ...] = ()
    next_slot: int = 0


class NStepOff:
    """The policy object; `bound` = n."""

    unit: Unit = "group"
    auditable = True

    def __init__(self, n: int, name: str = "n-step-off") -> None:
        self.name = name
        self.bound: int | None = n
        self.n = n

    def start(self) -> Slots:
        return Slots()

    def observe(self, state: Slots, event: Event) -> Slots:
        match event:
            case Granted(group_id=group_id):
                return _take(state, group_id)
            case Committed(group_id=group_id):
                return _remove(state, group_id, give_back=False)
            case Closed(group_id=group_id):
                return _remove(state, group_id, give_back=True)
            case Announced(version=version):
                return msgspec.structs.replace(state, published=version)
            case _:
                return state

    def places(self, state: Slots, ledger: Ledger) -> int:
        """In the open step and in the steps up to published + n; the lowest slots have them."""
        if state.published is None:
            return 0
        steps_ahead = self.n - lag(ledger.version, state.published, ledger.lineage)
        return 0 if steps_ahead < 0 else ledger.free_slots + steps_ahead * ledger.batch_size

    def credits(self, state: Slots, ledger: Ledger) -> int:
        """Places that no open group has. One given back early in the order is granted again even
        while later slots, beyond those places, are taken: the open step would wait for it for
        ever."""
        places = self.places(state, ledger)
        known = sorted([*state.taken.values(), *state.free])
        given_back = bisect.bisect_right(state.free, known[:places][-1]) if known and places else 0
        return given_back + max(0, places - len(known))

    def cancel(self, state: Slots, ledger: Ledger) -> tuple[Cancel, ...]:
        return ()

    def choose(self, state: Slots, ledger: Ledger) -> Choice:
        """Commits what is ready for the open step. A ready group that is too old all the same (n
        was lowered, a rollback, or an engine broke its promise) is dropped, due or not: it may not
        be trained, and held it would stop training for ever."""
        ready = [group for group in ledger.groups if group.state != "running"]
        late = {g.group_id for g in ready if lag(ledger.version, g.oldest, ledger.lineage) > self.n}
        order = sorted([*state.taken.values(), *state.free])[: ledger.free_slots]
        commit = tuple(
            g.group_id
            for g in ready
            if g.group_id not in late and order and state.taken[g.group_id] <= order[-1]
        )
        return Choice(commit=commit, drop=tuple(g.group_id for g in ready if g.group_id in late))


def _take(state: Slots, group_id: str) -> Slots:
    if group_id in state.taken:
        raise ValueError(f"{group_id} is granted twice")
    if state.free:
        taken = {**state.taken, group_id: state.free[0]}
        return msgspec.structs.replace(state, taken=taken, free=state.free[1:])
    taken = {**state.taken, group_id: state.next_slot}
    return msgspec.structs.replace(state, taken=taken, next_slot=state.next_slot + 1)


def _remove(state: Slots, group_id: str, *, give_back: bool) -> Slots:
    taken = dict(state.taken)
    slot = taken.pop(group_id, None)
    if slot is None:
        return state
    free = list(state.free)
    if give_back:
        bisect.insort(free, slot)
    return msgspec.structs.replace(state, taken=taken, free=tuple(free))


PRESETS = {
    "n-step-off": Preset(build=lambda n: NStepOff(n), parameters={"n": Count(most=MOST_STEPS)}),
    "sync": Preset(build=lambda: NStepOff(0, "sync")),
    "one-step-off": Preset(build=lambda: NStepOff(1, "one-step-off")),
}
