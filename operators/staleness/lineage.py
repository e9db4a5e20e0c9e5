"""How far apart two versions are, across incarnations.

Incarnations form a tree: each but the first was forked from a parent at a version number, either as
a `rebuild` (the same manifests re-executed on hardware that gives other bits, so numbers go on
meaning the same) or as a `rollback` (the parent's later versions were given up).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from connectors.records import Version


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """An incarnation left `parent` after its version `number`."""

    parent: int
    number: int
    reason: Literal["rebuild", "rollback"]


def lag(newer: Version, older: Version, lineage: Mapping[int, Fork] | None = None) -> int:
    """Staleness, in steps, of a token of version `older` trained at version `newer`; negative when
    `older` is ahead. `lineage` maps an incarnation to its fork; one that is not in it counts as a
    rebuild. Tokens of a version that a rollback gave up are as far away as the way back to the fork
    and forth again: (v - fork) + (m - fork).
    """
    distance, incarnation, number = 0, newer.incarnation, newer.number
    while incarnation != older.incarnation and lineage is not None and incarnation in lineage:
        fork = lineage[incarnation]
        if fork.reason == "rollback":
            distance, number = distance + number - fork.number, fork.number
        incarnation = fork.parent
    given_up = distance > 0 and older.number > number
    return distance + (older.number - number if given_up else number - older.number)
