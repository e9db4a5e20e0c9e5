"""What a staleness policy did for a step, and why groups were dropped, as its manifest says it.

The metric `staleness/NAME` counts each action that `FeedCore` names. `dropped` lists the groups in
the order of their reasons' names, those of live traffic after the others; `staleness/drops/REASON`
and, of live traffic, `staleness/traffic/REASON` say how many there are of each: so a ledger that is
folded again knows the reason of every drop.
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

PREFIX: Final = "staleness/"
TRAFFIC: Final = "traffic/"
_DROPS: Final = "drops/"


def metrics(actions: Mapping[str, int]) -> dict[str, float]:
    """As they are in a manifest."""
    return {f"{PREFIX}{name}": float(count) for name, count in actions.items()}


def told(manifest: Manifest) -> Counter[str]:
    """The opposite of `metrics`. What the trainer waited for is in it too, as `waits/REASON`: no
    other metric of a manifest begins as these do."""
    return Counter(
        {
            name.removeprefix(PREFIX): int(count)
            for name, count in manifest.metrics.items()
            if name.startswith(PREFIX)
        }
    )


def drops(dropped: Mapping[str, str], traffic: Mapping[str, str] | None = None) -> Counter[str]:
    """The actions that drops (group id to reason) are; `traffic`: those of live traffic."""
    return Counter(
        [f"{_DROPS}{reason}" for reason in dropped.values()]
        + [f"{TRAFFIC}{reason}" for reason in (traffic or {}).values()]
    )


def listed(dropped: Mapping[str, str], traffic: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The group ids as a manifest lists them."""
    each = (dropped, traffic or {})
    return tuple(group_id for found in each for group_id in sorted(found, key=found.__getitem__))


def drop_reasons(manifest: Manifest) -> dict[str, str]:
    """Of each group that it lists."""
    found = told(manifest)
    reasons = [
        name.removeprefix(kind)
        for kind in (_DROPS, TRAFFIC)
        for name in sorted(found)
        if name.startswith(kind)
        for _ in range(found[name])
    ]
    known = reasons[: len(manifest.dropped)]
    return dict(zip_longest(manifest.dropped, known, fillvalue=STALE))
