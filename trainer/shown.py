"""What a staleness policy is shown of the ledger: its open groups, and after a change of policy
what happened to them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from operators.staleness.types import (
    Announced,
    Arrived,
    Event,
    Granted,
    OpenGroup,
    StalenessPolicy,
)
from trainer.feed_state import Entry, FeedState


class Shown:
    """An entry that changes is another one, so each is made once: policies are asked at every
    arrival."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._shown: dict[str, tuple[Entry, OpenGroup]] = {}

    def groups(
        self, entries: Mapping[str, Entry], committed: Collection[str]
    ) -> tuple[OpenGroup, ...]:
        """Those that the open step has not taken, in admission order."""
        known, self._shown = self._shown, {}
        for group_id, entry in entries.items():
            shown = known.get(group_id)
            if shown is None or shown[0] is not entry:
                shown = entry, _open_group(entry, self._group_size)
            self._shown[group_id] = shown
        return tuple(shown for g, (_, shown) in self._shown.items() if g not in committed)


def resumed(policy: StalenessPolicy[Any], state: FeedState) -> Any:
    """The policy's state from the snapshot; under another policy than the snapshot's, what it makes
    of the groups that are open."""
    first = policy.start()
    if state.policy_name == policy.name:
        return msgspec.convert(state.policy, type=type(first))
    events: list[Event] = [] if state.published is None else [Announced(state.published)]
    for entry in state.open:
        events.append(Granted(entry.group_id, entry.admitted_at))
        if entry.coordinate is not None:
            events.append(Arrived(entry.group_id, entry.oldest, entry.newest or entry.oldest))
    for event in events:
        first = policy.observe(first, event)
    return first


def _open_group(entry: Entry, group_size: int) -> OpenGroup:
    running = entry.coordinate is None
    return OpenGroup(
        group_id=entry.group_id,
        partition=entry.partition,
        offset=entry.offset,
        oldest=entry.oldest,
        newest=entry.newest,
        admitted_at=entry.admitted_at,
        state="running" if running else "ready",
        order=entry.order,
        ready_order=entry.ready_order,
        num_running=group_size if running else 0,
    )
