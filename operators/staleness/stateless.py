"""A policy that needs to remember nothing: the ledger says it all."""

from __future__ import annotations

from connectors.records import Cancel
from operators.staleness.types import Choice, Event, Ledger, Unit


class Stateless:
    """Its state is None. What a subclass leaves out: it is not strict, cancels nothing and trains
    what is ready in the order of arrival."""

    unit: Unit = "group"
    bound: int | None = None
    auditable = False

    def start(self) -> None:
        return None

    def observe(self, state: None, event: Event) -> None:
        return None

    def cancel(self, state: None, ledger: Ledger) -> tuple[Cancel, ...]:
        return ()

    def choose(self, state: None, ledger: Ledger) -> Choice:
        ready = ledger.arrivals[: ledger.free_slots]
        return Choice(commit=tuple(group.group_id for group in ready))

    def too_old(self, ledger: Ledger, *, since_grant: bool = False) -> tuple[str, ...]:
        """Ready groups beyond the bound, for a strict policy to drop; with `since_grant` also those
        that are beyond it only when their age is counted from the grant. Where a policy's own rule
        keeps the bound, only a rollback, a lowered bound, a smaller batch or an engine that broke
        its promise leaves any."""
        bound = self.bound
        if bound is None:
            return ()
        return tuple(
            g.group_id
            for g in ledger.ready
            if ledger.age(g) > bound or (since_grant and ledger.age_since_grant(g) > bound)
        )
