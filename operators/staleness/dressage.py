"""`dressage`: a filter on the version of a group's last token (Dressage's rollout).

Admission. A group starts while fewer than `max_active_groups` are being generated and fewer than
0.8 of `output_queue_size` wait beyond those of the open batch. A finished group frees its place.

Staleness. Each finished group shows the version of its last token. Of those versions the newest K
that were seen, `dressage_staleness_keep_versions`, are kept; a group that ended before them is
dropped, also while it waits for its batch to fill. A batch is trained when it is full, in the order
of finishing. The versions are compared with each other, never with the trainer's.

Switches. With `max_partial_rollout_preempts` = P, a trajectory that saw more than P new versions
since its first fails: its group starts again from its prompt, `rollout_max_retries` times, and is
given up after that. A policy sees none of the versions between a group's oldest and its newest, and
none per trajectory: it takes the group for as many switches as its versions are apart, while it
runs from its start to the announced version. So a group restarts when its limit is announced, not
at its next response. One that finished all the same is dropped.

Parameters: `max_active_groups` (in a run, its batch size), `output_queue_size` (1000),
`dressage_staleness_keep_versions` (0 = off), `max_partial_rollout_preempts` (None = off),
`rollout_max_retries` (2). Unit: group.

Not strict, nothing bounds staleness, whatever K is: with K = 1 a group that starts at version 0 and
ends at version 10 has ended at the newest version; it trains, ten versions old.

Two things differ. Dressage keeps versions in the order in which they were first seen; when scoring
lets an old one be seen late, that pushes out the newest for good, and its run ends over too many
drops. Here they are in the order of versions. And what a batch has no room for waits for the next,
as in Dressage's partially asynchronous rollout; its fully asynchronous one loses it.

Source: Dressage's fully asynchronous rollout, staleness tracker and proxy.
"""

from __future__ import annotations

import msgspec

from connectors.parameters import Count
from connectors.records import Cancel, Version
from operators.staleness.lineage import lag
from operators.staleness.preset import MOST_STEPS, Preset
from operators.staleness.types import (
    Arrived,
    Choice,
    Closed,
    Committed,
    Event,
    Ledger,
    OpenGroup,
    Requeued,
    Unit,
)


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """versions  the newest that groups ended with, ascending
    restarts  of each running group that had any
    """

    versions: tuple[Version, ...] = ()
    restarts: dict[str, int] = {}


class Dressage:
    unit: Unit = "group"
    bound: int | None = None
    auditable = False
    name = "dressage"

    def __init__(
        self,
        max_active_groups: int,
        output_queue_size: int,
        dressage_staleness_keep_versions: int,
        max_partial_rollout_preempts: int | None,
        rollout_max_retries: int,
    ) -> None:
        self.max_active = max_active_groups
        self.watermark = max(1, int(0.8 * output_queue_size))
        self.num_kept = dressage_staleness_keep_versions
        self.max_switches = max_partial_rollout_preempts
        self.max_retries = rollout_max_retries

    def start(self) -> Seen:
        return Seen()

    def observe(self, state: Seen, event: Event) -> Seen:
        match event:
            case Requeued(group_id):
                restarts = {**state.restarts, group_id: state.restarts.get(group_id, 0) + 1}
                return Seen(versions=state.versions, restarts=restarts)
            case Arrived(group_id, newest=newest):
                versions = sorted({*state.versions, newest})[-self.num_kept :]
                return Seen(
                    versions=tuple(versions) if self.num_kept else (),
                    restarts=_without(state.restarts, group_id),
                )
            case Closed(group_id) | Committed(group_id):
                return Seen(versions=state.versions, restarts=_without(state.restarts, group_id))
            case _:
                return state

    def credits(self, state: Seen, ledger: Ledger) -> int:
        if len(ledger.ready) - ledger.free_slots >= self.watermark:
            return 0
        return max(0, self.max_active - len(ledger.running))

    def cancel(self, state: Seen, ledger: Ledger) -> tuple[Cancel, ...]:
        cancels = []
        for group in ledger.running:
            if self._switched(ledger, group, ledger.published):
                again = state.restarts.get(group.group_id, 0) < self.max_retries
                cancels.append(Cancel(group.group_id, "requeue" if again else "close", "stale"))
        return tuple(cancels)

    def choose(self, state: Seen, ledger: Ledger) -> Choice:
        """A whole batch, or nothing yet."""
        drop = tuple(
            group.group_id for group in ledger.ready if self._refused(state, ledger, group)
        )
        left = [group.group_id for group in ledger.arrivals if group.group_id not in drop]
        full = len(left) >= ledger.free_slots
        return Choice(commit=tuple(left[: ledger.free_slots]) if full else (), drop=drop)

    def _refused(self, state: Seen, ledger: Ledger, group: OpenGroup) -> bool:
        newest = group.newest or group.oldest
        ended_before = self.num_kept > 0 and newest not in state.versions[-self.num_kept :]
        return ended_before or self._switched(ledger, group, newest)

    def _switched(self, ledger: Ledger, group: OpenGroup, newest: Version) -> bool:
        """Whether it saw too many new versions from its oldest to `newest`."""
        if self.max_switches is None:
            return False
        return lag(newest, group.oldest, ledger.lineage) > self.max_switches


def _without(restarts: dict[str, int], group_id: str) -> dict[str, int]:
    return {known: number for known, number in restarts.items() if known != group_id}


PRESETS = {
    "dressage": Preset(
        build=Dressage,
        parameters={
            "max_active_groups": Count(least=1),
            "output_queue_size": Count(default=1000, least=1),
            "dressage_staleness_keep_versions": Count(default=0, most=MOST_STEPS),
            "max_partial_rollout_preempts": Count(default=None, optional=True, most=MOST_STEPS),
            "rollout_max_retries": Count(default=2),
        },
        from_run={"max_active_groups": lambda shape: shape.batch_size},
    )
}
