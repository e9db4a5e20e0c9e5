"""What a staleness policy did for a step, and why groups were dropped, as its manifest says it.

The metric `staleness/NAME` counts each action that `FeedCore` names. `dropped` lists the groups in
the order of their reasons' names, `staleness/drops/REASON` how many there are of each: so a ledger
that is folded again knows the reason of every drop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest
from typing import Final

from connectors.records import Manifest

STALE: Final = "stale"
"""Why a group is dropped whose drop is known, but not the reason."""
FILTERED: Final = "filtered"
"""Why one is that carries no signal, or that a fork excludes."""

_PREFIX: Final = "staleness/"
_DROPS: Final = "drops/"


def metrics(actions: Mapping[str, int]) -> dict[str, float]:
    """As they are in a manifest."""
    return {f"{_PREFIX}{name}": float(count) for name, count in actions.items()}


def told(manifest: Manifest) -> Counter[str]:
    """The opposite of `metrics`. What the trainer waited for is in it too, as `waits/REASON`: no
    other metric of a manifest begins as these do."""
    return Counter(
        {
            name.removeprefix(_PREFIX): int(count)
            for name, count in manifest.metrics.items()
            if name.startswith(_PREFIX)
        }
    )


def drops(dropped: Mapping[str, str]) -> Counter[str]:
    """The actions that drops (group id to reason) are."""
    return Counter(f"{_DROPS}{reason}" for reason in dropped.values())


def listed(dropped: Mapping[str, str]) -> tuple[str, ...]:
    """The group ids as a manifest lists them."""
    return tuple(sorted(dropped, key=lambda group_id: dropped[group_id]))


def drop_reasons(manifest: Manifest) -> dict[str, str]:
    """Of each group that it lists."""
    found = told(manifest)
    names = sorted(name for name in found if name.startswith(_DROPS))
    reasons = [name.removeprefix(_DROPS) for name in names for _ in range(found[name])]
    known = reasons[: len(manifest.dropped)]
    return dict(zip_longest(manifest.dropped, known, fillvalue=STALE))
