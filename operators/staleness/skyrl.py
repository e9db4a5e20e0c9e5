"""`skyrl`: what may be outstanding is counted, finished groups are trained in the order they finish
(SkyRL's fully asynchronous trainer).

In step g (which trains at version g - 1) it has accepted or is running at most (S + g) B groups
since the start, so at most S + 1 batches are outstanding, each group until weights trained on it
are announced; and at most as many are running as there are generation workers. A filtered or failed
group returns its place at once. What turns out more than S steps old when it is trained is trained
all the same: SkyRL warns and counts such groups. Here nothing counts them; each step's manifest has
the mean, p99 and maximum staleness of its tokens. SkyRL drains everything at the end of an epoch; a
stream has none.

Parameters: `max_staleness_steps` S (4), `train_batch_size` B (that of the run),
`num_parallel_generation_workers`, from B to B (S + 1). SkyRL's default of 768 is above that in a
small run; left out (None) it is therefore 768, but at most B (S + 1). Unit: group.

Strict only at S = 0, with bound 0. For S >= 1 nothing bounds staleness, as in `areal`: at B = 1,
S = 1 a slow group of version 0 is overtaken by any number of fast ones in the other place.

Source: SkyRL's `FullyAsyncRayPPOTrainer`.
"""

from __future__ import annotations

from connectors.parameters import Count
from operators.staleness.preset import MOST_STEPS, Preset
from operators.staleness.stateless import Stateless
from operators.staleness.types import Choice, Ledger

NUM_WORKERS = 768


class Skyrl(Stateless):
    """`auditable` where the running groups never are the tighter limit."""

    name = "skyrl"

    def __init__(
        self,
        max_staleness_steps: int,
        num_parallel_generation_workers: int | None,
        train_batch_size: int | None,
    ) -> None:
        self.num_batches = max_staleness_steps + 1
        self.bound = 0 if max_staleness_steps == 0 else None
        given = num_parallel_generation_workers
        self.num_workers = NUM_WORKERS if given is None else given
        if train_batch_size is None:
            return
        most = train_batch_size * self.num_batches
        if given is None:
            self.num_workers = min(NUM_WORKERS, most)
        if not train_batch_size <= self.num_workers <= most:
            raise ValueError(
                "num_parallel_generation_workers must be from train_batch_size to "
                f"train_batch_size * (max_staleness_steps + 1), here {train_batch_size} to {most}, "
                f"got {self.num_workers}"
            )
        self.auditable = self.num_workers == most

    def credits(self, state: None, ledger: Ledger) -> int:
        slots = self.num_workers - len(ledger.running)
        places = self.num_batches * ledger.batch_size
        return max(0, min(slots, places - ledger.num_outstanding))

    def choose(self, state: None, ledger: Ledger) -> Choice:
        late = self.too_old(ledger)
        left = [g.group_id for g in ledger.arrivals if g.group_id not in late]
        return Choice(commit=tuple(left[: ledger.free_slots]), drop=late)


PRESETS = {
    "skyrl": Preset(
        build=Skyrl,
        parameters={
            "max_staleness_steps": Count(default=4, most=MOST_STEPS),
            "num_parallel_generation_workers": Count(default=None, least=1, optional=True),
            "train_batch_size": Count(default=None, least=1, optional=True),
        },
        from_run={"train_batch_size": lambda shape: shape.batch_size},
        fixed=("train_batch_size",),
    )
}
