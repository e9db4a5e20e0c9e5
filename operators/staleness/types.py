"""The staleness policy as a pure fold: no clocks, no I/O. The feed, the tests and the simulator run
the same object; its state is in the checkpoint (so it must be JSON-encodable by msgspec)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from connectors.records import Cancel, Fork, Version

Unit = Literal["trajectory", "group", "batch"]
GroupState = Literal["running", "ready", "held"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenGroup:
    """A granted group that is neither trained nor closed.

    oldest       lower bound of its start version; once it arrived, its true oldest version (across
                 forks: its stalest)
    newest       its newest version once it arrived
    admitted_at  the published version when it was granted
    order        of admission, from 0; ready_order: of arrival, None while running
    num_running  trajectories still being generated or scored
    """

    group_id: str
    partition: int
    offset: int
    oldest: Version
    newest: Version | None
    admitted_at: Version
    state: GroupState
    order: int
    ready_order: int | None = None
    num_running: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """All the feed knows when it asks. `version` is the one the open step trains at;
    `num_unpublished` counts groups trained (or committed to a closed step) whose weights are not
    announced yet; `lineage` is the fork of each incarnation, for `lag`."""

    version: Version
    batch_size: int
    free_slots: int
    group_size: int
    groups: tuple[OpenGroup, ...]
    num_granted: int
    num_trained: int
    num_closed: int
    num_unpublished: int
    lineage: Mapping[int, Fork] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Ids in the policy's unit. Nothing committed means wait. `mask_before`: token mask, None =
    none."""

    commit: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    hold: tuple[str, ...] = ()
    mask_before: Version | None = None


# ------------------------------------------------------------------------------------------ events
@dataclass(frozen=True, slots=True)
class Granted:
    group_id: str
    version: Version  # published at the grant


@dataclass(frozen=True, slots=True)
class Arrived:
    group_id: str
    oldest: Version
    newest: Version


@dataclass(frozen=True, slots=True)
class Committed:
    group_id: str
    step: int  # the step it was committed to


@dataclass(frozen=True, slots=True)
class Closed:
    """The group ended untrained: its credit returns."""

    group_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Announced:
    version: Version


@dataclass(frozen=True, slots=True)
class EngineLoad:
    num_running: int
    num_queued: int
    kv_use: float
    tags: dict[str, str] = field(default_factory=dict)


Event = Granted | Arrived | Committed | Closed | Announced | EngineLoad
S = TypeVar("S")


class StalenessPolicy(Protocol[S]):
    name: str
    unit: Unit
    bound: int | None  # None: not strict

    def start(self) -> S: ...

    def observe(self, state: S, event: Event) -> S:
        """The next state; never changes `state`."""

    def credits(self, state: S, ledger: Ledger) -> int:
        """How many more units may be granted now (the feed floors to whole groups)."""

    def cancel(self, state: S, ledger: Ledger) -> tuple[Cancel, ...]: ...

    def choose(self, state: S, ledger: Ledger) -> Choice: ...
