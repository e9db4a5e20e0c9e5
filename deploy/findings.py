"""What enters the audit and what leaves it, as plain values."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from connectors.records import PolicyRecord, StepRecord, Version
from deploy.history import Place
from operators.staleness.types import StalenessPolicy
from trainer.checkpoint_meta import CheckpointMeta

PAUSE_S: Final = 10.0
"""Between two records of a partition: in a longer one nobody may have been at work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """One record of `trajectories`; `versions` wrote its trained tokens. `reason`: why its group
    closed. `error`: why a corrupt one cannot be read."""

    group_id: str
    partition: int
    offset: int
    crc: int
    kind: Literal["group", "closed", "corrupt"]
    versions: frozenset[Version] = frozenset()
    written_at: float = 0.0
    reason: str = "malformed"
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What the log holds.

    steps        (offset, record), all of them; read twice
    policy       (offset, record); what lies at or after `policy_end` only says what was granted
    terminals    of each partition of `trajectories` in offset order; ungranted ones at or after
                 `terminal_ends` may have been granted later than `policy` was read
    rollouts     of the prompts given, those with a record in `rollouts`, and when it was written;
                 its second argument is the time of the first grant among them
    prompt_starts, prompt_ends   what the broker holds of each partition of `prompts`
    strategy     the staleness policy; its bound None: not strict
    patience_s   the longest the reward stage works on one group
    base         where the kept part of the log begins, None for a whole one; `arrived`: terminals
                 of the groups that were ready there, or in the queue
    traffic_topics   full names of those whose records name groups of live traffic
    sessions     those groups in `rollouts`: id, partition, when it was written
    """

    prompts_topic: str
    steps: Iterable[tuple[int, StepRecord]]
    policy: Iterable[tuple[int, PolicyRecord]]
    terminals: Mapping[int, Iterable[Terminal]]
    rollouts: Callable[[Collection[Place], float], Iterable[tuple[Place, float]]]
    strategy: StalenessPolicy[Any]
    batch_size: int
    group_size: int
    patience_s: float
    policy_end: float = float("inf")
    terminal_ends: Mapping[int, float] = field(default_factory=dict)
    prompt_starts: Mapping[int, int] = field(default_factory=dict)
    prompt_ends: Mapping[int, int] = field(default_factory=dict)
    base: CheckpointMeta | None = None
    arrived: Sequence[Terminal] = ()
    traffic_topics: tuple[str, ...] = ()
    sessions: Callable[[], Iterable[tuple[str, int, float]]] = tuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A group one of whose trained tokens is older than the bound, or newer than the step."""

    group_id: str
    step: int
    staleness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Overgrant:
    """An announcement (its offset in `policy`) that grants more than the policy allowed."""

    offset: int
    version: Version
    granted: int
    allowed: int


@dataclass(slots=True, kw_only=True)
class Audit:
    """traffic         groups of live traffic, by how they ended; all else counts those granted
    lost            groups that never ended, and why they cannot end any more
    trained_twice      on the chain
    settled_twice      closed or dropped, and trained as well
    ungranted          trained, refunded or ended without a grant
    excluded_trained   by a step after the fork that excluded them
    wrong_records      trained, but the log does not hold the record that the manifest names
    overgrants         announcements that granted more than the policy allowed
    chain_breaks       why `digest_chain_ok` is false: steps, versions, digests, limits, epochs
    unreadable         records that are none of theirs topics'; they settle nothing
    given_up           steps that a rollback gave up, and groups in them
    num_void           records of fenced trainers, which count for nothing
    closed_by_reason   groups, by what their terminals say
    dropped_by_reason  groups, by what the steps say that list them as dropped
    grants_checked     the policy's grants follow from the log: overgrants would show
    bound_checked      the policy has a bound: violations would show
    """

    groups: dict[str, int] = field(default_factory=dict)
    traffic: dict[str, int] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    trained_twice: list[str] = field(default_factory=list)
    settled_twice: list[str] = field(default_factory=list)
    ungranted: list[str] = field(default_factory=list)
    excluded_trained: list[str] = field(default_factory=list)
    wrong_records: dict[str, str] = field(default_factory=dict)
    bound_violations: list[Violation] = field(default_factory=list)
    overgrants: list[Overgrant] = field(default_factory=list)
    chain_breaks: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    lineage: list[dict[str, Any]] = field(default_factory=list)
    given_up: dict[str, int] = field(default_factory=lambda: {"steps": 0, "groups": 0})
    credit_balance: int = 0
    num_void: int = 0
    closed_by_reason: Counter[str] = field(default_factory=Counter)
    dropped_by_reason: Counter[str] = field(default_factory=Counter)
    grants_checked: bool = True
    bound_checked: bool = True
    from_step: int = 1
    to_step: int = 0

    @property
    def digest_chain_ok(self) -> bool:
        return not self.chain_breaks

    @property
    def ok(self) -> bool:
        return not (
            self.lost or self.trained_twice or self.settled_twice or self.ungranted
            or self.excluded_trained or self.wrong_records or self.bound_violations
            or self.overgrants or self.credit_balance or self.chain_breaks
        )  # fmt: skip


@dataclass(slots=True)
class Activity:
    """When a stage was at work, from the times of what it wrote: the latest stretches without a
    pause."""

    stretches: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=1000))

    def add(self, at: float) -> None:
        if self.stretches and at - self.stretches[-1][1] <= PAUSE_S:
            start, end = self.stretches[-1]
            self.stretches[-1] = (start, max(end, at))
        else:
            self.stretches.append((at, at))

    def since(self, at: float) -> float:
        """Seconds at work after `at`, as far as it shows."""
        return sum(max(0.0, end - max(start, at)) for start, end in self.stretches)
