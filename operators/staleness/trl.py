"""`trl`: a fixed number of generation slots, and samples that are too old when the trainer pulls
them are thrown away (TRL's asynchronous GRPO).

A slot is one conversation, and is free again when that ends in TRL, here when the last one of its
group is scored (the log tells of whole groups only), whoever trains on it when. A group carries the
version at which its first conversation took a slot. The trainer pulls in the order of arrival; what
is more than `max_staleness` versions behind at that moment is dropped, its prompt is lost. TRL
drops single samples, whose siblings may still train; we train groups whole, so here the group goes:
its members carry the same version, so they are too old together.

Parameters: `max_staleness` (4), `max_inflight_tasks`, the slots (-1: max(max_staleness, 1) times
the samples of a step), `queue_maxsize` (1024), the finished samples beyond which no slot is filled
again, `weight_sync_steps` (1: we publish every step). Unit: trajectory. Slots for less than a group
count as for one; TRL would generate it bit by bit.

Strict with bound `max_staleness` where the check tells the version that will be trained at. In TRL
the data loader fetches one batch ahead, so the first micro-batch of a step is one version staler
than it was checked for. Our feed also fills a step ahead, but the ledger's version is the one that
step trains at, so here the check is exact. A prompt that would be too old for the open step as it
is granted is not granted; TRL would generate it and throw it away.

Source: TRL's `experimental.async_grpo`.
"""

from __future__ import annotations

from connectors.parameters import Count, OneOf
from operators.staleness.preset import MOST_STEPS, Preset
from operators.staleness.stateless import Stateless
from operators.staleness.types import Choice, Ledger, Unit


class Trl(Stateless):
    name = "trl"
    unit: Unit = "trajectory"

    def __init__(
        self,
        max_staleness: int,
        max_inflight_tasks: int,
        queue_maxsize: int,
        weight_sync_steps: int,
    ) -> None:
        if max_inflight_tasks == 0:
            raise ValueError("max_inflight_tasks must be -1 or at least 1, got 0")
        self.max_staleness = max_staleness
        self.bound = max_staleness
        self.max_inflight_tasks = max_inflight_tasks
        self.queue_maxsize = queue_maxsize

    def credits(self, state: None, ledger: Ledger) -> int:
        num_queued = len(ledger.ready) * ledger.group_size
        if num_queued >= self.queue_maxsize or ledger.steps_ahead > self.max_staleness:
            return 0
        slots = self.max_inflight_tasks
        if slots == -1:
            slots = max(self.max_staleness, 1) * ledger.batch_size * ledger.group_size
        taken = sum(group.num_running for group in ledger.running)
        return max(0, max(slots, ledger.group_size) - taken)

    def choose(self, state: None, ledger: Ledger) -> Choice:
        stale = self.too_old(ledger, since_grant=True)
        fresh = [g.group_id for g in ledger.arrivals if g.group_id not in stale]
        return Choice(commit=tuple(fresh[: ledger.free_slots]), drop=stale)


PRESETS = {
    "trl": Preset(
        build=Trl,
        parameters={
            "max_staleness": Count(default=4, most=MOST_STEPS),
            "max_inflight_tasks": Count(default=-1, least=-1),
            "queue_maxsize": Count(default=1024, least=1),
            "weight_sync_steps": OneOf((1,), default=1),
        },
    )
}
