"""The report of a run that came to a standstill."""

from __future__ import annotations

from typing import Final

from operators.staleness.types import Ledger, OpenGroup

NUM_GROUPS: Final = 40
"""Shown of those that are open."""


def report(policy: str, ledger: Ledger, now: float, why: str) -> str:
    """Where it stands, a line for each open group."""
    open_groups = len(ledger.groups)
    lines = [
        f"{policy} stalled after {now:.0f} s: {why}.",
        f"The open step trains at version {ledger.version}, {ledger.published} is published; it "
        f"has room for {ledger.free_slots} of {ledger.batch_size} groups. {open_groups} groups "
        f"are open ({len(ledger.ready)} ready), {ledger.num_outstanding} outstanding; "
        f"{ledger.num_granted} were granted, {ledger.num_trained} trained, "
        f"{ledger.num_closed} closed.",
        *(_line(ledger, group) for group in ledger.groups[:NUM_GROUPS]),
    ]
    if open_groups > NUM_GROUPS:
        lines.append(f"  and {open_groups - NUM_GROUPS} more")
    return "\n".join(lines)


def _line(ledger: Ledger, group: OpenGroup) -> str:
    return (
        f"  {group.group_id}  {group.state}  granted at {group.admitted_at}  "
        f"oldest {group.oldest} (age {ledger.age(group)})"
    )
