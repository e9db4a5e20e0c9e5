"""`prime-rl`: as many trajectories as the engines take, cancelled and dropped beyond M versions
(prime-rl's orchestrator).

Admission. The trajectories in flight are kept at a cap, which the engines' load moves. It starts at
`initial_inflight` and stays between `min_inflight` and `max_inflight`.
* Up: by 1.25 for each turnover of what is in flight, if at the last poll no engine used more than
  0.6 of its KV cache and none queued, no cut drains, and 0.9 of the cap are in flight.
* Trim, KV use above 0.8: down to 0.7 / use of what is in flight, and not again for 6 polls. Above
  0.9 what exceeds the new cap is cancelled too, the youngest groups first.
* Cut: preemptions, down to 0.8 of what is in flight; queues longer than half of what runs at 6
  polls in a row, down to 0.9; a second cut within 6 polls after the first has drained, to 0.5. What
  exceeds the cap is cancelled; nothing else is cut until what is in flight fits.
* Between two polls what is in flight grows by a tenth of the cap or one group, whichever is more.
  A trajectory that ends gives its admission back, one that is cancelled does not. prime-rl counts
  them one by one; here a group's are in flight until its last one is scored, for the log tells of
  whole groups only.
* Nothing starts while the open step is more than one version (or M, if that is less) ahead of the
  announced one, and no batch is shipped while it is more than one ahead.

Staleness. A group whose version of dispatch is more than `max_off_policy_steps` M behind the open
step is cancelled while it runs and dropped if it finished; its prompt is lost. The others are
trained in the order they came.

Parameters: `max_off_policy_steps` (8), `initial_inflight` (None: the maximum; in a run, its
engines' slots. prime-rl starts at the contexts that their KV caches hold, which no policy is told),
`min_inflight` (1), `max_inflight` (1024), `group_size` (1; in a run, its own). Unit: trajectory,
though groups are granted whole, and at least one of them.

Strict, with bound M: no token is older than its group's version of dispatch.

A poll is an `EngineLoad` event, 5 s apart in prime-rl, so its limit on growth per 5 s is one per
poll here. Its test that the last poll is younger than 15 s needs a clock and is left out. Until a
first poll comes, the cap stays as it is and growth has no limit. A group that failed is taken for a
cancelled one.

Source: prime-rl's concurrency controller, dispatcher and train sink.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import replace

from connectors.parameters import Count
from connectors.records import Cancel
from operators.staleness.preset import MOST_STEPS, Preset
from operators.staleness.types import (
    Arrived,
    Choice,
    Closed,
    Committed,
    EngineLoad,
    Event,
    Granted,
    Ledger,
    OpenGroup,
    Unit,
)

TARGET_LAG: Final = 1
GROWTH_PER_TURNOVER: Final = 1.25
BINDING: Final = 0.9
CLEAR_KV_USE: Final = 0.6
SOFT_KV_USE: Final = 0.8
HARD_KV_USE: Final = 0.9
TRIM_TO_KV_USE: Final = 0.7
CUT_BY_QUEUE: Final = 0.9
CUT_BY_PREEMPTION: Final = 0.8
CUT_AGAIN: Final = 0.5
QUEUED_SHARE: Final = 0.5
NUM_POLLS: Final = 6
"""Of queues before a cut, between two trims, and after a cut in which the next one is harder."""


class Inflight(msgspec.Struct, frozen=True, kw_only=True):
    """cap        trajectories that may be in flight
    running       the groups in flight
    growth        trajectories by which they may still grow before the next poll, None = no limit
    clear         the last poll allows the cap to grow
    shed          what exceeds the cap is cancelled
    draining      a cut was made and what is in flight does not fit yet
    num_queued    polls in a row with long queues
    until_trim    polls until the next trim
    while_harder  polls during which a cut is a second one
    """

    cap: float
    running: tuple[str, ...] = ()
    growth: int | None = None
    clear: bool = False
    shed: bool = False
    draining: bool = False
    num_queued: int = 0
    until_trim: int = 0
    while_harder: int = 0


class PrimeRL:
    unit: Unit = "trajectory"
    auditable = False
    name = "prime-rl"

    def __init__(
        self,
        max_off_policy_steps: int,
        initial_inflight: int | None,
        min_inflight: int,
        max_inflight: int,
        group_size: int,
    ) -> None:
        if min_inflight > max_inflight:
            raise ValueError(
                f"min_inflight must be at most max_inflight, got {min_inflight} and {max_inflight}"
            )
        self.bound: int | None = max_off_policy_steps
        self.max_off_policy_steps = max_off_policy_steps
        self.initial = max_inflight if initial_inflight is None else initial_inflight
        self.least, self.most = min_inflight, max_inflight
        self.group_size = group_size

    def start(self) -> Inflight:
        return Inflight(cap=self._clamped(self.initial))

    def observe(self, state: Inflight, event: Event) -> Inflight:
        match event:
            case Granted(group_id=group_id):
                return replace(
                    state,
                    running=(*state.running, group_id),
                    growth=None if state.growth is None else max(0, state.growth - self.group_size),
                )
            case Arrived(group_id=group_id) if group_id in state.running:
                return self._ended(state, group_id)
            case Committed(group_id=group_id) | Closed(group_id=group_id):
                return replace(state, running=_without(state.running, group_id))
            case EngineLoad():
                return self._polled(state, event)
            case _:
                return state

    def credits(self, state: Inflight, ledger: Ledger) -> int:
        # A group started more than M behind would be cancelled at once, again and again.
        if ledger.steps_ahead > min(TARGET_LAG, self.max_off_policy_steps):
            return 0
        room = self._cap(state, ledger) - _num_inflight(ledger)
        if state.growth is not None:
            # Engines may stop to report: with nothing in flight, nothing would ever end either.
            least = 0 if ledger.running else ledger.group_size
            room = min(room, max(state.growth, least))
        return max(0, room)

    def cancel(self, state: Inflight, ledger: Ledger) -> tuple[Cancel, ...]:
        stale = [group for group in ledger.running if self._is_stale(ledger, group)]
        cancels = [Cancel(group.group_id, "close", "stale") for group in stale]
        excess = _num_inflight(ledger) - self._cap(state, ledger)
        excess -= sum(group.num_running for group in stale)
        for group in reversed(ledger.running):
            if not state.shed or excess <= 0:
                break
            if group not in stale:
                cancels.append(Cancel(group.group_id, "close", "cancelled"))
                excess -= group.num_running
        return tuple(cancels)

    def choose(self, state: Inflight, ledger: Ledger) -> Choice:
        stale = tuple(g.group_id for g in ledger.ready if self._is_stale(ledger, g))
        if ledger.steps_ahead > TARGET_LAG:
            return Choice(drop=stale)
        fresh = [g.group_id for g in ledger.arrivals if g.group_id not in stale]
        return Choice(commit=tuple(fresh[: ledger.free_slots]), drop=stale)

    def _is_stale(self, ledger: Ledger, group: OpenGroup) -> bool:
        """By its version of dispatch; after a rollback its tokens may be further away."""
        age = max(ledger.age_since_grant(group), ledger.age(group))
        return age > self.max_off_policy_steps

    def _cap(self, state: Inflight, ledger: Ledger) -> int:
        return max(ledger.group_size, int(self._clamped(state.cap)))

    def _clamped(self, cap: float) -> float:
        return min(max(cap, self.least), self.most)

    def _ended(self, state: Inflight, group_id: str) -> Inflight:
        """A group arrived: the cap's share of a turnover, and its admissions back."""
        num_groups, cap = len(state.running), state.cap
        binds = num_groups * self.group_size >= BINDING * cap
        if state.clear and binds:
            cap = self._clamped(cap * GROWTH_PER_TURNOVER ** (1 / num_groups))
        growth = None if state.growth is None else state.growth + self.group_size
        return replace(state, cap=cap, running=_without(state.running, group_id), growth=growth)

    def _polled(self, state: Inflight, load: EngineLoad) -> Inflight:
        draining = state.draining and self._num_running(state) > state.cap
        queued = load.num_queued > QUEUED_SHARE * load.num_running and not draining
        state = replace(
            state,
            shed=False,
            draining=draining,
            num_queued=state.num_queued + 1 if queued else 0,
            until_trim=max(0, state.until_trim - 1),
            while_harder=max(0, state.while_harder - (not state.draining)),
        )
        if not state.draining:
            state = self._lowered(state, load)
        quiet = load.kv_use <= CLEAR_KV_USE and load.num_queued == 0
        return replace(
            state,
            clear=quiet and not state.draining,
            growth=max(self.group_size, int(state.cap) // 10),
        )

    def _lowered(self, state: Inflight, load: EngineLoad) -> Inflight:
        """The cap after a cut or a trim, if this poll asks for one."""
        num_running = self._num_running(state)
        if load.num_preempted or state.num_queued >= NUM_POLLS:
            first = CUT_BY_PREEMPTION if load.num_preempted else CUT_BY_QUEUE
            share = CUT_AGAIN if state.while_harder else first
            return replace(
                state,
                cap=min(state.cap, self._clamped(share * num_running)),
                shed=True,
                draining=True,
                num_queued=0,
                while_harder=NUM_POLLS,
            )
        if load.kv_use > SOFT_KV_USE and not state.until_trim:
            cap = self._clamped(num_running * TRIM_TO_KV_USE / load.kv_use)
            return replace(
                state,
                cap=min(state.cap, cap),
                shed=load.kv_use > HARD_KV_USE,
                until_trim=NUM_POLLS,
            )
        return state

    def _num_running(self, state: Inflight) -> int:
        return len(state.running) * self.group_size


def _without(groups: tuple[str, ...], group_id: str) -> tuple[str, ...]:
    return tuple(group for group in groups if group != group_id)


def _num_inflight(ledger: Ledger) -> int:
    return sum(group.num_running for group in ledger.running)


PRESETS = {
    "prime-rl": Preset(
        build=PrimeRL,
        parameters={
            "max_off_policy_steps": Count(default=8, most=MOST_STEPS),
            "initial_inflight": Count(default=None, least=1, optional=True),
            "min_inflight": Count(default=1, least=1),
            "max_inflight": Count(default=1024, least=1),
            "group_size": Count(default=1, least=1),
        },
        from_run={
            "initial_inflight": lambda shape: shape.num_slots,
            "group_size": lambda shape: shape.group_size,
        },
        fixed=("group_size",),
    )
}
