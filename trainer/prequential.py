"""Test, then train: how well the tracked value of a session foretold its label, before the label
was learnt from (Dawid, 1984; "prequential").

    traffic/groups, traffic/corrections    of live traffic that the step trained; the latter are
                                           among the former
    prequential/TASK/VERSION/n             sessions whose label is final, by the newest version that
                                           served them (`unknown` where nothing tells)
    prequential/TASK/VERSION/reward        sum of their labels
    prequential/TASK/VERSION/squared       sum of (label - value)^2
    prequential/TASK/VERSION/absolute      sum of |label - value|

Label and value are both mapped to [0, 1], a label outside its bounds cut to them. All of a step's
sessions are foretold by the values from before the step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from connectors.branches import LABEL, SERVED
from connectors.records import Group
from operators.tracker import TrackerState, ValueTracker
from trainer import values
from trainer.late_labels import is_correction

UNKNOWN: Final = "unknown"
_VERSION: Final = re.compile(r"[0-9]+\.[0-9]+")


def metrics(
    tracker: ValueTracker, before: TrackerState, groups: Sequence[Group]
) -> dict[str, float]:
    """Of a step whose values were `before`; without live traffic none."""
    found = defaultdict[str, float](float)
    for group in groups:
        row = group.trajectories[0]
        if row.source == "rollout":
            continue
        found["traffic/groups"] += 1
        if is_correction(group):
            found["traffic/corrections"] += 1
        elif row.metadata.get(LABEL) == "final":
            name = f"prequential/{group.task}/{_served(group)}"
            label = tracker.mapped(values.cut(tracker, row.reward))
            foretold = tracker.value(before, values.key_of(group.prompt))
            error = label - tracker.mapped(values.cut(tracker, foretold))
            for what, value in (
                ("n", 1.0), ("reward", label), ("squared", error**2), ("absolute", abs(error)),
            ):  # fmt: skip
                found[f"{name}/{what}"] += value
    return dict(found)


def _served(group: Group) -> str:
    said = group.trajectories[0].metadata.get(SERVED, "")
    return said if _VERSION.fullmatch(said) else UNKNOWN
