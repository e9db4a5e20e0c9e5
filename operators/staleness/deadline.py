"""`deadline`: bounds every token, drops nothing it granted, and waits only where going on would
make the bound impossible later. Our own.

A group's deadline is its start bound + the bound; `lookahead` L, at most the bound, says how much
is granted ahead and so sets the mean. With v the version the open step trains, k its free places, B
groups a step and N(x) the open groups with a deadline of at most x:

* reserve iff outstanding < (L + 1)B, a group being outstanding until weights trained on it are
  announced;
* keep N(x) <= k + (x - v)B for all x >= v: commit a ready group iff that still holds with k - 1 and
  without the group, else hold it.

Why the first rule implies the second for newcomers: published at p = v - u, with uB groups
unpublished and B - k committed, at most k + (L - u)B are open after a grant, and a newcomer's
deadline is v + bound - u, where k + (bound - u)B fit. (Where the batch size changed in between, the
latter is what is granted.) Later events only relax it: a true version is never older than its
grant's, a group that fails leaves, and a step that closes leaves the same places. At x = v it says
that what is due now fits into this step, so no group ever becomes overdue. Something can always go
on: a group is held only while groups due before it take up all their places, and all of those run.

Several ready at once are committed in the order of their deadlines, then of arrival. Any order
closes this step equally early (greedy bases of a matroid are equally large); this one leaves the
most slack to the steps after it: where a group of a later deadline went first, the two can change
places, and both stay in time.

"Wait only for groups that are due now" is not enough: with B = 1, let a and b both be due at
version 2. A fresh group trained at version 1 leaves one step for the two.

An infeasible ledger (rollback, lowered bound, smaller batch, an engine that broke its promise) fits
no order of steps. `feasible.plan` then says which groups are late, as few as can be. A late group
that arrived is dropped, one that runs is cancelled and counts for nothing until it ends: the rest
keep the rule above, so training neither stops nor exceeds the bound.

`at_deadline` says what becomes of a group that does not make it in time:
  wait      training waits for it (all of the above)
  drop      never waits; a ready group over age is dropped, a running one past its deadline is
            cancelled
  mask      never waits; tokens over age are masked. A group with none left is dropped. So are, for
            `bound` + 1 steps after a rollback, groups over age: no single version parts their old
            tokens from those of others
  reweight  never waits; the loss of a late token is multiplied by decay ** (staleness - bound)
The last three commit whatever is ready, oldest first.

Parameters: bound (4), lookahead (min(2, bound); or "auto", see `operators.staleness.pace`),
at_deadline (wait), decay (0.9; only with reweight). Unit: group. Strict with its bound, per token
under `mask`; `reweight` is not strict.
"""

from __future__ import annotations

from typing import Final, Literal

from connectors.parameters import Count, CountOr, Number, OneOf
from connectors.records import Cancel, Version
from operators.staleness.feasible import plan
from operators.staleness.pace import Pace, paced, started
from operators.staleness.preset import MOST_STEPS, Preset
from operators.staleness.types import Choice, Event, Ledger, OpenGroup, Unit

AtDeadline = Literal["wait", "mask", "drop", "reweight"]

LOOKAHEAD: Final = 2
"""Where nothing is said, if the bound allows it."""
DECAY: Final = 0.9


class Deadline:
    """`max_age` is the parameter `bound`, whether or not that is strict; `decay` is for who weighs
    the loss under `reweight`."""

    name = "deadline"
    unit: Unit = "group"

    def __init__(
        self, *, bound: int, lookahead: int | Literal["auto"], at_deadline: AtDeadline, decay: float
    ) -> None:
        if lookahead != "auto" and lookahead > bound:
            raise ValueError(
                f"lookahead must be at most the bound, got lookahead {lookahead} and bound {bound}"
            )
        self.max_age = bound
        self.lookahead = lookahead
        self.at_deadline = at_deadline
        self.decay = decay
        self.bound: int | None = None if at_deadline == "reweight" else bound
        self.auditable = lookahead != "auto"  # its L hangs on when commits came

    def start(self) -> Pace:
        return started(min(1, self.max_age) if self.lookahead == "auto" else self.lookahead)

    def observe(self, state: Pace, event: Event) -> Pace:
        if self.lookahead != "auto":
            return state
        return paced(state, event, least=min(1, self.max_age), most=self.max_age)

    def credits(self, state: Pace, ledger: Ledger) -> int:
        ahead = state.lookahead if self.lookahead == "auto" else self.lookahead
        ahead = min(ahead, self.max_age)  # the bound may have been lowered
        allowed = (ahead + 1) * ledger.batch_size - ledger.num_outstanding
        steps_left = self.max_age - ledger.steps_ahead
        fitting = ledger.free_slots + steps_left * ledger.batch_size - len(ledger.groups)
        return max(0, min(allowed, fitting))

    def cancel(self, state: Pace, ledger: Ledger) -> tuple[Cancel, ...]:
        """Running groups that can no longer be trained."""
        late: tuple[OpenGroup, ...] = ()
        if self.at_deadline == "wait":
            late = plan(ledger, self.max_age).late
        elif self.at_deadline == "drop":
            late = tuple(group for group in ledger.running if self._overdue(ledger, group))
        return tuple(Cancel(g.group_id, "close", "stale") for g in late if g.state == "running")

    def choose(self, state: Pace, ledger: Ledger) -> Choice:
        if all(group.state == "running" for group in ledger.groups):
            return Choice()
        if self.at_deadline == "wait":
            return _commit_what_others_can_spare(ledger, self.max_age)
        mask_before = mask_below(ledger, self.max_age) if self.at_deadline == "mask" else None
        oldest_first = sorted(ledger.arrivals, key=ledger.age, reverse=True)
        lost = {
            group.group_id
            for group in oldest_first
            if self.at_deadline != "reweight"
            and self._overdue(ledger, group)
            and (mask_before is None or _newest(group) < mask_before)
        }
        left = [group.group_id for group in oldest_first if group.group_id not in lost]
        return Choice(
            commit=tuple(left[: ledger.free_slots]),
            drop=tuple(group.group_id for group in oldest_first if group.group_id in lost),
            mask_before=mask_before,
        )

    def _overdue(self, ledger: Ledger, group: OpenGroup) -> bool:
        return ledger.age(group) > self.max_age


def _commit_what_others_can_spare(ledger: Ledger, bound: int) -> Choice:
    planned = plan(ledger, bound)
    late = {group.group_id for group in planned.late}
    ready = sorted(
        (group for group in ledger.arrivals if group.group_id not in late),
        key=lambda group: planned.slack[group.oldest],
    )
    num_committed = 0
    for group in ready[: ledger.free_slots]:
        if not planned.places.commit(planned.slack[group.oldest]):
            break  # of a larger slack, none can be spared either
        num_committed += 1
    return Choice(
        commit=tuple(group.group_id for group in ready[:num_committed]),
        drop=tuple(group.group_id for group in planned.late if group.state != "running"),
    )


def mask_below(ledger: Ledger, bound: int) -> Version | None:
    """The version that parts tokens over age from the others at the open step: all below it are
    over age and none above. None where none can be, or, for `bound` + 1 steps after a rollback,
    where no version parts them (versions that were given up are older than lower ones of their
    incarnation). The same for a whole step."""
    incarnation, number = ledger.version.incarnation, ledger.version.number - bound
    while (fork := ledger.lineage.get(incarnation)) is not None and number <= fork.number:
        if fork.reason == "rollback":
            return None
        incarnation = fork.parent
    return Version(incarnation, number) if number > 0 else None


def _newest(group: OpenGroup) -> Version:
    return group.newest if group.newest is not None else group.oldest


def _built(
    bound: int,
    lookahead: int | Literal["auto"] | None,
    at_deadline: AtDeadline,
    decay: float | None,
) -> Deadline:
    if decay is not None and at_deadline != "reweight":
        raise ValueError(
            f"decay needs at_deadline 'reweight', got decay {decay} and at_deadline {at_deadline!r}"
        )
    return Deadline(
        bound=bound,
        lookahead=min(LOOKAHEAD, bound) if lookahead is None else lookahead,
        at_deadline=at_deadline,
        decay=DECAY if decay is None else decay,
    )


PRESETS = {
    "deadline": Preset(
        build=_built,
        parameters={
            "bound": Count(4, most=MOST_STEPS),
            "lookahead": CountOr("auto", None, optional=True, most=MOST_STEPS),
            "at_deadline": OneOf(("wait", "mask", "drop", "reweight"), "wait"),
            "decay": Number(None, most=1.0, optional=True),
        },
    ),
}
