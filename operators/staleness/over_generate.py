"""`over-generate`: a synchronous step starts more groups than it trains.

With every published version B + `extra` groups start. The first B that finish are the step; the
rest is given up: with `then` = "close" at once, so that the engines are free for the next step's
groups, with "requeue" when the next version is published, to start again under it: their prompts
are not lost, and they are among the next B + `extra`. A finished group beyond the B is dropped. So
a step does not wait for its slowest groups, and what is trained tilts to short ones.

Strict, bound 0, with either. Parameters: `extra` groups (a run gives a quarter of its batch size,
rounded up), `then` ("close"). Unit: group.
"""

from __future__ import annotations

from typing import Literal

from connectors.parameters import Count, OneOf
from connectors.records import Cancel
from operators.staleness.preset import Preset
from operators.staleness.stateless import Stateless
from operators.staleness.types import Choice, Ledger


class OverGenerate(Stateless):
    name = "over-generate"

    def __init__(self, extra: int, then: Literal["close", "requeue"]) -> None:
        self.extra = extra
        self.then = then
        self.bound = 0

    def credits(self, state: None, ledger: Ledger) -> int:
        if ledger.steps_ahead:
            return 0
        return max(0, ledger.batch_size + self.extra - ledger.num_outstanding)

    def cancel(self, state: None, ledger: Ledger) -> tuple[Cancel, ...]:
        """A group put back before the next version is published would start under the old one."""
        if self.then == "requeue" and ledger.steps_ahead:
            return ()
        late = (g.group_id for g in ledger.running if ledger.age(g) > 0)
        return tuple(Cancel(g, then=self.then, reason="cancelled") for g in late)

    def choose(self, state: None, ledger: Ledger) -> Choice:
        late = self.too_old(ledger)
        first = [g.group_id for g in ledger.arrivals if g.group_id not in late]
        return Choice(commit=tuple(first[: ledger.free_slots]), drop=late)


PRESETS = {
    "over-generate": Preset(
        build=OverGenerate,
        parameters={"extra": Count(), "then": OneOf(("close", "requeue"), "close")},
        from_run={"extra": lambda shape: -(-shape.batch_size // 4)},
    )
}
