"""A policy that needs to remember nothing: the ledger says it all."""

from __future__ import annotations

from connectors.records import Cancel
from operators.staleness.types import Choice, Event, Ledger, Unit


class Stateless:
    """Its state is None. What a subclass leaves out: it cancels nothing and trains what is ready in
    the order of arrival."""

    unit: Unit = "group"
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
