"""The feed in virtual time: the ledger, the policy's state, and what the policy makes of them.

As the live feed does, it asks the policy after every event for cancels, for a choice and for
credits, in that order and until nothing changes any more; at most one full step waits for the
trainer. What costs in a long run is the ledger, so each open group is kept as the policy sees it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple

from connectors.config import ConfigError
from connectors.records import REASONS, Version
from deploy.simulate.workload import Workload
from operators.staleness.printed import ledger_text
from operators.staleness.types import (
    Announced,
    Arrived,
    Closed,
    Committed,
    EngineLoad,
    Event,
    Granted,
    Ledger,
    OpenGroup,
    Requeued,
    StalenessPolicy,
)
from trainer.grants import group_credits

PATIENCE: Final = 100
"""Batches of groups that end untrained without a step filling: from then on the policy is held to
make no progress."""
MOST_GROUPS: Final = 20_000
MOST_TRAJECTORIES: Final = 1_000_000
"""Open at once: with more, a step would take hours to simulate."""

GivenUp = Literal["dropped", "cancelled", "requeued"]


class Step(NamedTuple):
    """`version` is the one it trains at; tokens of versions below `mask_before` are masked."""

    version: int
    group_ids: tuple[str, ...]
    mask_before: int


class Feed:
    """`start` is called with each group that is granted, `give_up` with each that the policy drops
    or cancels. `full` is the full step that waits for the trainer."""

    def __init__(
        self,
        policy: StalenessPolicy[Any],
        workload: Workload,
        *,
        start: Callable[[str], None],
        give_up: Callable[[str, GivenUp], None],
    ) -> None:
        self.policy = policy
        self.full: Step | None = None
        self.closed: dict[str, int] = {}  # groups by reason
        self.num_fruitless = 0  # groups since the last full step
        self._workload = workload
        self._start = start
        self._give_up = give_up
        self._state = policy.start()
        self._version = self._published = Version(0, 0)
        self._open: dict[str, OpenGroup] = {}
        self._committed: list[str] = []
        self._mask_before = 0  # of the open step
        self._num_granted = self._num_arrived = self._num_trained = self._num_closed = 0
        self._ledger: Ledger | None = None  # until something changes
        self._stirred = False

    # ---------------------------------------------------------------------------------- events
    def announce(self, version: int) -> None:
        self._published = Version(0, version)
        self._observe(Announced(self._published))

    def arrive(self, group_id: str, oldest: int, newest: int) -> None:
        first, last = Version(0, oldest), Version(0, newest)
        self._open[group_id] = replace(
            self._open[group_id],
            oldest=first,
            newest=last,
            state="ready",
            ready_order=self._num_arrived,
            num_running=0,
        )
        self._num_arrived += 1
        self._observe(Arrived(group_id, first, last))

    def close(self, group_id: str, reason: str) -> None:
        del self._open[group_id]
        self._num_closed += 1
        self.num_fruitless += 1
        self.closed[reason] = self.closed.get(reason, 0) + 1
        self._observe(Closed(group_id, reason))

    def load(self, load: EngineLoad) -> bool:
        """Whether the policy, no auditable one, heeds it."""
        before = self._state
        self._state = self.policy.observe(before, load)
        if self._state is before:
            return False
        self._changed()
        return True

    def take(self) -> Step | None:
        """The full step, if one waits; there is room for the next one then."""
        taken, self.full = self.full, None
        if taken is not None:
            self._changed()
        return taken

    # ----------------------------------------------------------------------------- the policy
    def settle(self) -> None:
        if not self._stirred:
            return
        num_quiet = 0
        for ask in itertools.cycle((self._cancel, self._choose, self._grant)):
            num_quiet = 0 if ask() else num_quiet + 1
            if num_quiet == 3 or self.is_fruitless():
                break
        self._stirred = False

    def is_fruitless(self) -> bool:
        return self.num_fruitless > PATIENCE * self._workload.batch_size

    def _cancel(self) -> bool:
        """Whether anything was. What has arrived is beyond a cancel; what is put back may have
        started before the published version, under which it begins again."""
        changed = False
        for cancel in self.policy.cancel(self._state, self.ledger()):
            group = self._open.get(cancel.group_id)
            if group is None or group.state != "running":
                continue
            if cancel.then == "close":
                self._give_up(cancel.group_id, "cancelled")
                known = cancel.reason in REASONS
                self.close(cancel.group_id, cancel.reason if known else "cancelled")
                changed = True
            elif group.oldest < self._published:
                self._open[cancel.group_id] = replace(group, oldest=self._published)
                self._observe(Requeued(cancel.group_id, self._published))
                self._give_up(cancel.group_id, "requeued")
                changed = True
        return changed

    def _choose(self) -> bool:
        if self.full is not None:
            return False
        choice = self.policy.choose(self._state, self.ledger())
        if choice.mask_before is not None:
            self._mask_before = max(self._mask_before, choice.mask_before.number)
        for group_id in choice.drop:
            self._give_up(group_id, "dropped")
            self.close(group_id, "stale")
        for group_id in choice.commit:
            if self._open[group_id].state == "running":
                raise RuntimeError(f"{self.policy.name} committed {group_id}, which is not ready")
            if len(self._committed) == self._workload.batch_size:
                raise RuntimeError(f"{self.policy.name} committed more than the step's free slots")
            del self._open[group_id]
            self._committed.append(group_id)
            self._observe(Committed(group_id, self._version.number + 1))
        if len(self._committed) == self._workload.batch_size:
            self._close_step()
        return bool(choice.drop or choice.commit)

    def _close_step(self) -> None:
        self.full = Step(self._version.number, tuple(self._committed), self._mask_before)
        self.num_fruitless = self._mask_before = 0
        self._num_trained += len(self._committed)
        self._committed.clear()
        self._version = Version(0, self._version.number + 1)

    def _grant(self) -> bool:
        credits = group_credits(self.policy, self._state, self.ledger())
        self._check_room(credits)
        for _ in range(credits):
            group_id = f"prompts/0/{self._num_granted}"
            self._open[group_id] = OpenGroup(
                group_id=group_id,
                partition=0,
                offset=self._num_granted,
                oldest=self._published,
                newest=None,
                admitted_at=self._published,
                state="running",
                order=self._num_granted,
                num_running=self._workload.group_size,
            )
            self._num_granted += 1
            self._observe(Granted(group_id, self._published))
            self._start(group_id)
        return credits > 0

    def _check_room(self, credits: int) -> None:
        num_open, group_size = len(self._open) + credits, self._workload.group_size
        if num_open > MOST_GROUPS or num_open * group_size > MOST_TRAJECTORIES:
            raise ConfigError(
                f"simulate: at most {MOST_GROUPS} groups and {MOST_TRAJECTORIES} trajectories may "
                f"be open at once, got {num_open} groups of {group_size} with {self.policy.name}"
            )

    def report(self) -> str:
        """Where it stands."""
        return ledger_text(self.policy, self._state, self.ledger())

    def ledger(self) -> Ledger:
        if self._ledger is None:
            batch_size = self._workload.batch_size
            self._ledger = Ledger(
                version=self._version,
                published=self._published,
                batch_size=batch_size,
                free_slots=batch_size - len(self._committed),
                group_size=self._workload.group_size,
                groups=tuple(self._open.values()),
                num_granted=self._num_granted,
                num_trained=self._num_trained,
                num_closed=self._num_closed,
                num_unpublished=(self._version.number - self._published.number) * batch_size,
            )
        return self._ledger

    def _observe(self, event: Event) -> None:
        self._state = self.policy.observe(self._state, event)
        self._changed()

    def _changed(self) -> None:
        self._ledger = None
        self._stirred = True
