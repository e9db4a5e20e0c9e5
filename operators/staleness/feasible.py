"""Whether every open group can still be trained in time, and which cannot.

The step to come trains version v and has k free places, each step after it B. A group's *slack* is
the bound less its age at v: how many steps may close before the one that must train it, negative
once it is overdue. With N(j) the number of groups of a slack of at most j, all can be trained in
time iff N(j) <= k + jB for every j >= 0 (Hall's condition). The places of a slack lie within those
of every larger one, so sets of groups that fit are the independent sets of a laminar matroid: one
greedy pass in any order leaves out as few as can be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Final

from connectors.records import Version
from operators.staleness.lineage import lag
from operators.staleness.types import Ledger, OpenGroup

_OLDEST: Final = attrgetter("oldest")


class Places:
    """`left[j]`: k + jB - N(j), for the steps up to which the groups of the ledger could be too
    many. A larger slack counts as the last of them: they all fit by then."""

    def __init__(self, ledger: Ledger) -> None:
        too_many = max(0, len(ledger.groups) - ledger.free_slots)
        num_steps = -(-too_many // ledger.batch_size) + 1
        self.left = [ledger.free_slots + j * ledger.batch_size for j in range(num_steps)]

    def reserve(self, slack: int) -> bool:
        """Takes a place in time for a group, if there is one."""
        first = min(slack, len(self.left) - 1)
        if slack < 0 or min(self.left[first:]) < 1:
            return False
        for j in range(first, len(self.left)):
            self.left[j] -= 1
        return True

    def reserve_all(self, num_of: Iterable[tuple[int, int]]) -> bool:
        """The same for (slack, how many groups) each, all of them or none."""
        last = len(self.left) - 1
        due = [0] * len(self.left)
        for slack, num in num_of:
            if slack < 0:
                return False
            due[min(slack, last)] += num
        left = [room - num for room, num in zip(self.left, accumulate(due), strict=True)]
        if min(left) < 0:
            return False
        self.left = left
        return True

    def commit(self, slack: int) -> bool:
        """Gives a reserved group a place of the step to come, if those due before it can spare one:
        k and every N(j) with it go down by one, so only what is `left` before its slack does."""
        last = min(slack, len(self.left) - 1)
        if min(self.left[:last], default=1) < 1:
            return False
        for j in range(last):
            self.left[j] -= 1
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """slack   by oldest version
    late    the fewest groups without which the others can all be trained in time
    places  what is left of them for those
    """

    slack: Mapping[Version, int]
    late: tuple[OpenGroup, ...]
    places: Places


def plan(ledger: Ledger, bound: int) -> Plan:
    """Where not all fit, those that arrived go before those that run (their work is done, and
    nobody waits for them) and those admitted first before later ones (they should end first). The
    same groups stay late until they end: training a timely one, or granting what fits beside all
    that are open, changes nothing about the others."""
    num_of = Counter(map(_OLDEST, ledger.groups))
    slack = {oldest: bound - lag(ledger.version, oldest, ledger.lineage) for oldest in num_of}
    places = Places(ledger)
    late: tuple[OpenGroup, ...] = ()
    if not places.reserve_all((slack[oldest], num) for oldest, num in num_of.items()):
        in_turn = sorted(ledger.groups, key=lambda group: group.state == "running")
        late = tuple(group for group in in_turn if not places.reserve(slack[group.oldest]))
    return Plan(slack=slack, late=late, places=places)


def infeasible(ledger: Ledger, bound: int) -> tuple[OpenGroup, ...]:
    """The open groups that no order of steps can train within `bound`: empty unless a rollback, a
    lowered bound, a smaller batch or an engine that broke its promise came in between."""
    return plan(ledger, bound).late
