"""`roll`: a window of start steps that drains from its old end (ROLL's replay buffer).

A prompt is bound to the step at which it started, which is the version announced when it was
granted. At step t, ceil(B r) + (t + 1) B may have been started since the beginning; what closes
untrained returns its place at once. A batch takes from the start steps t - ceil(r) to t, oldest
first and within one in the order of finishing, and waits for an older step's running groups before
it looks at a younger step. Of the oldest step a fractional r takes only its part,
ceil(int(B n (r mod 1)) / n) groups of n. When the batch is full, what started at t - ceil(r) or
before is given up: the running ones are cancelled for good and the finished ones dropped.

With `is_use_additional_prompts`, `max_additional_running_prompts` are kept running once the budget
is used up; those too start, end and are trained like the others. Here such a group counts against
the budget until it is trained or given up, while ROLL opens B places a step whatever is in surplus.

With an integer r and no additional prompts nothing is ever given up. At most (t + 1) B groups
started by step t - r, and oldest first those are just what is trained by then: each batch is of one
start step, r behind. With a fractional r what the oldest step has beyond its part is given up as
soon as the part is ready: no batch will take it.

Parameters: `async_generation_ratio` r (0, or at least 1), `is_use_additional_prompts` (false),
`max_additional_running_prompts` (16). Unit: group. Strict at every setting, with bound ceil(r): no
token is older than its group's start step. A group of the window that never ends stops training.

Source: ROLL's `ReplayBuffer` for RLVR (`generate_opt_level` 1).
"""

from __future__ import annotations

import math

from connectors.parameters import Count, Flag, Number
from connectors.records import Cancel
from operators.staleness.preset import MOST_STEPS, Preset
from operators.staleness.stateless import Stateless
from operators.staleness.types import Choice, Ledger, OpenGroup


class Roll(Stateless):
    """`auditable` unless additional prompts are on, which hang on what is running."""

    name = "roll"

    def __init__(
        self,
        async_generation_ratio: float,
        is_use_additional_prompts: bool,
        max_additional_running_prompts: int,
    ) -> None:
        if 0 < async_generation_ratio < 1:
            raise ValueError(
                f"async_generation_ratio must be 0 or at least 1, got {async_generation_ratio}"
            )
        self.ratio = async_generation_ratio
        self.window = math.ceil(async_generation_ratio)
        self.num_additional = max_additional_running_prompts if is_use_additional_prompts else 0
        self.bound = self.window
        self.auditable = not is_use_additional_prompts

    def credits(self, state: None, ledger: Ledger) -> int:
        """Additional prompts only when the budget has no room left. Nothing while the announced
        version is so far behind the open step that it could be given up at once, again and again;
        ROLL is never that far ahead."""
        if ledger.steps_ahead > int(self.ratio):
            return 0
        budget = math.ceil(ledger.batch_size * self.ratio) + ledger.batch_size
        room = budget - ledger.num_outstanding
        return room if room > 0 else max(0, self.num_additional - len(ledger.running))

    def cancel(self, state: None, ledger: Ledger) -> tuple[Cancel, ...]:
        return tuple(
            Cancel(group.group_id, "close", "stale")
            for group in self._given_up(ledger)
            if group.state == "running"
        )

    def choose(self, state: None, ledger: Ledger) -> Choice:
        """A whole batch, or nothing yet."""
        given_up = self._given_up(ledger)
        drop = tuple(group.group_id for group in given_up if group.state != "running")
        started: dict[int, list[OpenGroup]] = {}
        for group in (*ledger.arrivals, *ledger.running):
            started.setdefault(_age(ledger, group), []).append(group)
        batch: list[OpenGroup] = []
        for age in sorted((age for age in started if age <= self.window), reverse=True):
            want = min(self._part(ledger, age), ledger.free_slots - len(batch))
            ready = [group for group in started[age] if group.state != "running"]
            batch += ready[:want]
            if len(ready) < min(want, len(started[age])):
                break
        full = len(batch) == ledger.free_slots
        return Choice(commit=tuple(g.group_id for g in batch) if full else (), drop=drop)

    def _part(self, ledger: Ledger, age: int) -> int:
        """How many groups of that age a batch takes at most."""
        if age < self.window or self.ratio % 1 == 0:
            return ledger.batch_size
        num_samples = int(ledger.batch_size * ledger.group_size * (self.ratio % 1))
        return math.ceil(num_samples / ledger.group_size)

    def _given_up(self, ledger: Ledger) -> tuple[OpenGroup, ...]:
        """Groups that no batch will take any more."""
        part = self._part(ledger, self.window)
        oldest = [g for g in ledger.arrivals if _age(ledger, g) == self.window]
        kept = {g.group_id for g in oldest[:part]}
        fills = self.ratio % 1 > 0 and len(oldest) >= part
        return tuple(
            group
            for group in ledger.groups
            if (age := _age(ledger, group)) > self.window
            or (fills and age == self.window and group.group_id not in kept)
        )


def _age(ledger: Ledger, group: OpenGroup) -> int:
    """Steps since the group's start step; after a rollback its tokens may be further away."""
    return max(ledger.age_since_grant(group), ledger.age(group))


PRESETS = {
    "roll": Preset(
        build=Roll,
        parameters={
            "async_generation_ratio": Number(default=0, most=MOST_STEPS),
            "is_use_additional_prompts": Flag(False),
            "max_additional_running_prompts": Count(default=16, least=1),
        },
    )
}
