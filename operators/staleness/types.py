"""The staleness policy as a pure fold: no clocks, no I/O. The feed, the tests and the simulator run
the same object; its state is in the checkpoint (so it must be JSON-encodable by msgspec)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from connectors.records import Cancel, Fork, Version
from operators.staleness.lineage import lag

Unit = Literal["trajectory", "group", "batch"]
GroupState = Literal["running", "ready"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenGroup:
    """A granted group that is neither trained nor closed.

    oldest       lower bound of its start version; once it arrived, its true oldest version (across
                 forks: its stalest)
    newest       its newest version once it arrived
    admitted_at  the published version when it was granted
    order        of admission, from 0; ready_order: of arrival, None while running
    num_running  trajectories that are not through: all of them until the group arrives (the log
                 tells of whole groups only), then none
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
    """All the feed knows when it asks.

    version          the one the open step trains at
    published        the last announced one, or the one that is about to be
    groups           granted, neither closed nor committed to a step, in admission order
    num_unpublished  groups of closed steps whose weights are not announced yet
    lineage          the fork of each incarnation, for `lag`
    """

    version: Version
    published: Version
    batch_size: int
    free_slots: int
    group_size: int
    groups: tuple[OpenGroup, ...]
    num_granted: int
    num_trained: int
    num_closed: int
    num_unpublished: int
    lineage: Mapping[int, Fork] = field(default_factory=dict)

    @property
    def running(self) -> tuple[OpenGroup, ...]:
        return tuple(group for group in self.groups if group.state == "running")

    @property
    def ready(self) -> tuple[OpenGroup, ...]:
        """Arrived groups, in admission order."""
        return tuple(group for group in self.groups if group.state != "running")

    @property
    def arrivals(self) -> tuple[OpenGroup, ...]:
        """Arrived groups, in the order they arrived."""
        return tuple(sorted(self.ready, key=lambda group: group.ready_order or 0))

    @property
    def num_outstanding(self) -> int:
        """Groups granted and not closed, each until weights trained on it are announced."""
        num_committed = self.batch_size - self.free_slots
        return len(self.groups) + num_committed + self.num_unpublished

    @property
    def steps_ahead(self) -> int:
        """Versions trained and not announced yet."""
        return lag(self.version, self.published, self.lineage)

    def age(self, group: OpenGroup) -> int:
        """Staleness of the group's oldest token, were it committed to the open step; of a running
        group the most it can be."""
        return lag(self.version, group.oldest, self.lineage)

    def age_since_grant(self, group: OpenGroup) -> int:
        """As `age`, counted from the version that was announced when the group was granted."""
        return lag(self.version, group.admitted_at, self.lineage)

    def held(self, choice: Choice) -> tuple[str, ...]:
        """The ready groups that a choice keeps back though it leaves room."""
        if len(choice.commit) >= self.free_slots:
            return ()
        gone = {*choice.commit, *choice.drop}
        return tuple(group.group_id for group in self.ready if group.group_id not in gone)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Group ids. Nothing committed means wait.

    commit       ready groups that enter the open step, at most `free_slots`
    drop         groups given up, arrived or running: refunded, never trained
    mask_before  tokens of versions below it are masked in what is committed, None = none
    """

    commit: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
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
class Requeued:
    """A cancel put the group back: it starts again, no earlier than that version."""

    group_id: str
    version: Version


@dataclass(frozen=True, slots=True)
class Announced:
    version: Version


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What all engines together reported at one poll. `kv_use` is that of the fullest one;
    `num_preempted` counts since the poll before."""

    num_running: int
    num_queued: int
    kv_use: float
    num_preempted: int = 0
    tags: dict[str, str] = field(default_factory=dict)


Event = Granted | Arrived | Committed | Closed | Requeued | Announced | EngineLoad
S = TypeVar("S")


class StalenessPolicy(Protocol[S]):
    """name       of the preset
    unit       that `credits` counts
    bound      no trained token is staler, whatever happens; None: not strict
    auditable  its credits follow from what the log shows (announcements, grants, refunds, trained
               steps), so an audit can ask it again; else they hang on arrivals or on engine load
    """

    name: str
    unit: Unit
    bound: int | None
    auditable: bool

    def start(self) -> S: ...

    def observe(self, state: S, event: Event) -> S:
        """The next state; never changes `state`."""

    def credits(self, state: S, ledger: Ledger) -> int:
        """How many more units may be granted now (the feed floors to whole groups)."""

    def cancel(self, state: S, ledger: Ledger) -> tuple[Cancel, ...]: ...

    def choose(self, state: S, ledger: Ledger) -> Choice: ...
