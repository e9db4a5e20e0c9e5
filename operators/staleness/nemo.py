"""The four samplers of NeMo-RL's single controller. They differ in what may be admitted and in what
may be trained; all hold the same permits.

`nemo-windowed`     admits as long as there are permits. Groups that started more than eta versions
                    ago are aborted while they run and evicted once ready; any other ready group may
                    train, in dispatch order or the freshest first. Strict, bound eta.
`nemo-weight-fifo`  trains only groups of the oldest start version within eta that any group still
                    has, running or ready, and waits for them. Strict, bound eta.
`nemo-ready-first`  trains whatever is ready, in dispatch order. Not strict: a slow group is
                    overtaken without end. B = 1, eta = 1: A and others start at version 0; while A
                    runs, the others train one by one, each is replaced; A ends at version 5 and
                    trains, five versions old.
`nemo-in-order`     reserves every group for one step and waits for the groups of that step: the
                    rule of `n-step-off`, which see. Strict, bound eta.

The last three are gated: eta + 1 batches may be outstanding, so a whole further batch is admitted
with every version that is published. A group that closes untrained gives its place back at once.
A group's start version is the one its grant announced; its oldest token cannot be older.

Permits: `max_inflight_prompts` groups may run, `max_buffered_rollouts` may be granted and not yet
committed to a step, and a step takes groups only while `min_groups_for_streaming_train` of them, or
all that it lacks, can be taken at once. eta is `max_lookahead_versions` (1) of `nemo-in-order` and
`max_staleness_versions` (1) of the others. Their defaults (32, 64, 32) are right for 32 groups a
step and eta = 1. A run gives what its configuration leaves out: None for the first two, for the
(eta + 1) B groups that the buffer of a gated sampler must hold (a smaller one is refused), and B
groups for the third. Unit: group.

`nemo-weight-fifo` can wait for ever, with nothing running: when the groups left of the oldest
version are fewer than `min_groups_for_streaming_train`. A batch comes to straddle two versions so
when too few groups may be in flight, and when a group that failed is replaced after the next
publish. A run's own values are therefore as many in flight as the buffer holds, and 1 for the
third: so it never waits like that.

Source: NeMo-RL's `staleness_sampler` and single controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from connectors.parameters import Count, Flag, Parameter
from connectors.records import Cancel
from operators.staleness.n_step_off import NStepOff, Slots
from operators.staleness.preset import MOST_STEPS, Preset
from operators.staleness.stateless import Stateless
from operators.staleness.types import Choice, Ledger, OpenGroup, StalenessPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class Permits:
    """NeMo-RL's parameters; None: the first two are no limits beyond (eta + 1) B groups, the batch
    size is not known before the ledger tells it."""

    max_inflight_prompts: int | None
    max_buffered_rollouts: int | None
    min_groups_for_streaming_train: int
    num_prompts_per_step: int | None

    def require(self, num_groups: int, why: str) -> None:
        """ValueError if the buffer is smaller than that."""
        if self.max_buffered_rollouts is not None and self.max_buffered_rollouts < num_groups:
            raise ValueError(
                f"max_buffered_rollouts must be at least {num_groups}, {why}, "
                f"got {self.max_buffered_rollouts}"
            )

    def require_batches(self, eta: int) -> None:
        if self.num_prompts_per_step is not None:
            size = self.num_prompts_per_step
            self.require(size * (eta + 1), f"the groups of {eta + 1} batches of {size}")

    def buffer(self, ledger: Ledger, eta: int) -> int:
        if self.max_buffered_rollouts is None:
            return (eta + 1) * ledger.batch_size
        return self.max_buffered_rollouts

    def limit(self, credits: int, ledger: Ledger) -> int:
        """Of that many groups, how many may be started now."""
        if self.max_inflight_prompts is not None:
            credits = min(credits, self.max_inflight_prompts - len(ledger.running))
        return max(0, credits)

    def take(self, eligible: Sequence[OpenGroup], num_slots: int) -> Sequence[OpenGroup]:
        enough = len(eligible) >= min(self.min_groups_for_streaming_train, num_slots)
        return eligible[:num_slots] if enough else ()


class Sampler(Stateless):
    """A gated one; `auditable` where the groups in flight never are the tighter limit."""

    name: str
    strict = True

    def __init__(self, max_staleness_versions: int, permits: Permits) -> None:
        self.eta = max_staleness_versions
        self.bound = self.eta if self.strict else None
        self.permits = permits
        self.check()

    def check(self) -> None:
        self.permits.require_batches(self.eta)
        self.auditable = self.permits.max_inflight_prompts is None

    def gate(self, ledger: Ledger) -> int:
        return (self.eta + 1) * ledger.batch_size - ledger.num_outstanding

    def credits(self, state: None, ledger: Ledger) -> int:
        buffered = self.permits.buffer(ledger, self.eta) - len(ledger.groups)
        return self.permits.limit(min(self.gate(ledger), buffered), ledger)

    def choose(self, state: None, ledger: Ledger) -> Choice:
        """Takes groups until there are not enough: what is taken can make others eligible."""
        late = self.too_old(ledger, since_grant=True)
        left = [g for g in ledger.groups if g.group_id not in late]
        commit: list[str] = []
        while taken := self.permits.take(
            self.eligible(left, ledger), ledger.free_slots - len(commit)
        ):
            commit += [g.group_id for g in taken]
            left = [g for g in left if g not in taken]
        return Choice(commit=tuple(commit), drop=late)

    def eligible(self, groups: Sequence[OpenGroup], ledger: Ledger) -> Sequence[OpenGroup]:
        """Of open groups, in admission order: the ready ones that may train now, in the order they
        are to be taken."""
        return [g for g in groups if g.state != "running"]


class Windowed(Sampler):
    name = "nemo-windowed"

    def __init__(
        self, max_staleness_versions: int, sample_freshest_first: bool, permits: Permits
    ) -> None:
        super().__init__(max_staleness_versions, permits)
        self.freshest_first = sample_freshest_first

    def check(self) -> None:
        if self.permits.num_prompts_per_step is not None:
            least = self.permits.min_groups_for_streaming_train
            least = min(least, self.permits.num_prompts_per_step)
            self.permits.require(least, "the groups a step takes at once")

    def gate(self, ledger: Ledger) -> int:
        """Shut only while weights are on their way that a group started now would be too old for:
        it would be aborted and replaced without end."""
        return 0 if ledger.steps_ahead > self.eta else self.permits.buffer(ledger, self.eta)

    def cancel(self, state: None, ledger: Ledger) -> tuple[Cancel, ...]:
        late = (g for g in ledger.running if ledger.age_since_grant(g) > self.eta)
        return tuple(Cancel(g.group_id, then="close", reason="stale") for g in late)

    def eligible(self, groups: Sequence[OpenGroup], ledger: Ledger) -> Sequence[OpenGroup]:
        ready = super().eligible(groups, ledger)
        return sorted(ready, key=ledger.age_since_grant) if self.freshest_first else ready


class WeightFifo(Sampler):
    name = "nemo-weight-fifo"

    def eligible(self, groups: Sequence[OpenGroup], ledger: Ledger) -> Sequence[OpenGroup]:
        ages = [ledger.age_since_grant(g) for g in groups]
        oldest = max((age for age in ages if age <= self.eta), default=0)
        ready = super().eligible(groups, ledger)
        return [g for g in ready if ledger.age_since_grant(g) == oldest]


class ReadyFirst(Sampler):
    name = "nemo-ready-first"
    strict = False


class InOrder(NStepOff):
    """`n-step-off` with NeMo-RL's permits. The buffer's go to the earliest steps first, so that a
    place given back there is granted again even when a smaller batch or bound left it overfull."""

    def __init__(self, max_lookahead_versions: int, permits: Permits) -> None:
        super().__init__(max_lookahead_versions, "nemo-in-order")
        permits.require_batches(self.n)
        self.permits = permits
        self.auditable = permits.max_inflight_prompts is None

    def places(self, state: Slots, ledger: Ledger) -> int:
        return min(super().places(state, ledger), self.permits.buffer(ledger, self.n))

    def credits(self, state: Slots, ledger: Ledger) -> int:
        return self.permits.limit(super().credits(state, ledger), ledger)

    def choose(self, state: Slots, ledger: Ledger) -> Choice:
        due = super().choose(state, ledger)
        ready = [g for g in ledger.ready if g.group_id in due.commit]
        taken = self.permits.take(ready, ledger.free_slots)
        return Choice(commit=tuple(g.group_id for g in taken), drop=due.drop)


_PERMITS: dict[str, Parameter] = {
    "max_inflight_prompts": Count(32, least=1, optional=True),
    "max_buffered_rollouts": Count(64, least=1, optional=True),
    "min_groups_for_streaming_train": Count(32, least=1),
    "num_prompts_per_step": Count(None, least=1, optional=True),
}


def _preset(sampler: Any, *, run_least: int | None = None, **own: Parameter) -> Preset:
    """`run_least`: what a run gives as `min_groups_for_streaming_train`; None: its batch size."""

    def build(**given: Any) -> StalenessPolicy[Any]:
        permits = Permits(**{name: given.pop(name) for name in _PERMITS})
        subject: StalenessPolicy[Any] = sampler(permits=permits, **given)
        return subject

    return Preset(
        build=build,
        parameters={**own, **_PERMITS},
        from_run={
            "max_inflight_prompts": lambda shape: None,
            "max_buffered_rollouts": lambda shape: None,
            "min_groups_for_streaming_train": lambda shape: run_least or shape.batch_size,
            "num_prompts_per_step": lambda shape: shape.batch_size,
        },
        fixed=("num_prompts_per_step",),
    )


PRESETS = {
    "nemo-windowed": _preset(
        Windowed,
        max_staleness_versions=Count(1, most=MOST_STEPS),
        sample_freshest_first=Flag(False),
    ),
    "nemo-weight-fifo": _preset(
        WeightFifo, run_least=1, max_staleness_versions=Count(1, most=MOST_STEPS)
    ),
    "nemo-ready-first": _preset(ReadyFirst, max_staleness_versions=Count(1, most=MOST_STEPS)),
    "nemo-in-order": _preset(InOrder, max_lookahead_versions=Count(1, most=MOST_STEPS)),
}
