"""A ledger for reading: what a policy is shown when it is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from operators.staleness.types import Ledger, OpenGroup, StalenessPolicy

MAX_GROUPS: Final = 50
"""Rows shown."""


def ledger_text(policy: StalenessPolicy[Any], state: Any, ledger: Ledger) -> str:
    """Several lines without an end of line: the counts, what the policy allows, every open group in
    admission order."""
    choice = policy.choose(state, ledger)
    bound = "not strict" if policy.bound is None else f"bound {policy.bound}"
    credits = policy.credits(state, ledger)
    held = ledger.held(choice)
    lines = [
        f"policy     {policy.name} ({bound})",
        f"open step  trains version {ledger.version}, {ledger.free_slots} of {ledger.batch_size} "
        f"places free; {ledger.published} is announced",
        f"groups     {ledger.num_granted} granted, {ledger.num_trained} trained, "
        f"{ledger.num_closed} closed, {len(ledger.groups)} open; {ledger.num_unpublished} trained "
        f"and not announced, {ledger.num_outstanding} outstanding",
        f"open       {len(ledger.running)} running, {len(ledger.ready)} ready, {len(held)} of them "
        "held",
        f"answers    {credits} {_plural(credits, policy.unit)} more to be granted, "
        f"{len(choice.commit)} to be committed, {len(choice.drop)} dropped, "
        f"{len(policy.cancel(state, ledger))} cancelled",
    ]
    rows = [_row(ledger, group, held) for group in ledger.groups[:MAX_GROUPS]]
    if rows:
        lines += _table([_TITLES, *rows])
    if len(ledger.groups) > MAX_GROUPS:
        lines.append(f"  and {len(ledger.groups) - MAX_GROUPS} more")
    return "\n".join(lines)


_TITLES: Final = ("group", "state", "oldest", "newest", "granted at", "age", "arrival")


def _row(ledger: Ledger, group: OpenGroup, held: Sequence[str]) -> tuple[str, ...]:
    return (
        group.group_id,
        "held" if group.group_id in held else group.state,
        str(group.oldest),
        "-" if group.newest is None else str(group.newest),
        str(group.admitted_at),
        str(ledger.age(group)),
        "-" if group.ready_order is None else str(group.ready_order),
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _plural(count: int, unit: str) -> str:
    many = {"trajectory": "trajectories", "group": "groups", "batch": "batches"}
    return unit if count == 1 else many[unit]
