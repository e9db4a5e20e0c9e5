"""`areal`: what may be outstanding is counted, and nothing else (AReaL's staleness manager).

At version v it has accepted or is running at most (ofp + v + 1) bs groups since the start, and at
most `max_concurrent_rollouts` of them are running. Counted from what is trained, that is ofp + 1
batches outstanding, each group until weights trained on it are announced. A rejected or failed
group returns its place at once. The trainer waits for a whole batch of finished groups and takes
those that were submitted first. AReaL shuffles them, our feed trains them in admission order.

Parameters: `max_head_offpolicyness` ofp (0), `consumer_batch_size` bs (1; in a run its batch size),
`max_concurrent_rollouts` (None: bs). Unit: group.

Strict only at ofp = 0, with bound 0: a batch is admitted when the one before is announced, so there
is nothing to be overtaken by. For ofp >= 1 nothing bounds staleness. With bs = 1, ofp = 1 and two
running: a slow A and a fast B start at version 0. B trains, its place goes to C, which trains, and
so on; when A ends, at version 5, it trains, five versions old. AReaL only logs that; here each
step's manifest has the mean, p99 and maximum staleness of its tokens.

Source: AReaL's `StalenessManager` and `WorkflowExecutor`.
"""

from __future__ import annotations

from connectors.parameters import Count
from operators.staleness.preset import MOST_STEPS, Preset
from operators.staleness.stateless import Stateless
from operators.staleness.types import Choice, Ledger


class Areal(Stateless):
    """`auditable` where the running groups never are the tighter limit."""

    name = "areal"

    def __init__(
        self,
        max_head_offpolicyness: int,
        consumer_batch_size: int,
        max_concurrent_rollouts: int | None,
    ) -> None:
        self.places = (max_head_offpolicyness + 1) * consumer_batch_size
        self.max_running = max_concurrent_rollouts or consumer_batch_size
        self.bound = 0 if max_head_offpolicyness == 0 else None
        self.auditable = self.max_running >= self.places

    def credits(self, state: None, ledger: Ledger) -> int:
        slots = self.max_running - len(ledger.running)
        return max(0, min(slots, self.places - ledger.num_outstanding))

    def choose(self, state: None, ledger: Ledger) -> Choice:
        late = self.too_old(ledger)
        left = [g.group_id for g in ledger.ready if g.group_id not in late]
        enough = len(left) >= ledger.free_slots
        return Choice(commit=tuple(left[: ledger.free_slots]) if enough else (), drop=late)


PRESETS = {
    "areal": Preset(
        build=Areal,
        parameters={
            "max_head_offpolicyness": Count(default=0, most=MOST_STEPS),
            "consumer_batch_size": Count(default=1, least=1),
            "max_concurrent_rollouts": Count(default=None, least=1, optional=True),
        },
        from_run={"consumer_batch_size": lambda shape: shape.batch_size},
        fixed=("consumer_batch_size",),
    )
}
