"""How far apart two versions are, across incarnations.

Incarnations form a line: each but the first was forked from the one before it at a version number
(`connectors.records.Fork`). This is the only place that subtracts versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from connectors.records import Fork, Version


def lag(newer: Version, older: Version, lineage: Mapping[int, Fork]) -> int:
    """Staleness, in steps, of a token of version `older` trained at version `newer`; negative when
    `older` is ahead. `lineage` maps an incarnation to its fork; one that is not in it counts as a
    rebuild. Tokens of a version that a rollback gave up are as far away as the way back to the fork
    and forth again: (v - fork) + (m - fork).
    """
    incarnation, common = newer.incarnation, newer.number
    rolled_back = False
    while incarnation != older.incarnation and incarnation in lineage:
        fork = lineage[incarnation]
        if fork.reason == "rollback":
            common, rolled_back = min(common, fork.number), True
        incarnation = fork.parent
    if rolled_back and older.number > common:
        return (newer.number - common) + (older.number - common)
    return newer.number - older.number


def stalest(
    versions: Iterable[Version], newer: Version, lineage: Mapping[int, Fork]
) -> Version | None:
    """The one of `versions` that is the furthest behind `newer`, None of none. Of two, it stays the
    same one however far training goes on."""
    return max(versions, key=lambda version: lag(newer, version, lineage), default=None)
