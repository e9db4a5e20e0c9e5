"""The accounts of a run's groups: every granted prompt offset is one entry, until it is settled.

    grant ──▶ open, running ──(arrive)──▶ open, ready
                    └──────────┬─────────────┘
                               ▼
    settled: trained by a step, or closed (by its terminal, by an announcement, dropped by the feed)

It promises that each granted prompt offset is open, trained or closed, exactly one of them, and
that the first terminal of an offset counts and later ones are only counted. It knows no policy;
`trainer.ledger` decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Literal

import msgspec

from connectors.records import Cancel, Coordinate, Origin, Version, parse_group_id
from trainer.actions import STALE
from trainer.feed_state import Counts, Entry, FeedState, Unread
from trainer.frontier import Frontier


class LedgerBroken(RuntimeError):
    """The log contradicts the ledger, or a policy broke its contract."""


class Accounts:
    """`prompts_topic` is the full name: group ids start with it. `limits`, `open`, `refunded`,
    `dropped` and `cancelled` are those of `FeedState`."""

    def __init__(self, state: FeedState, prompts_topic: str) -> None:
        self.prompts_topic = prompts_topic
        self.limits = list(state.limits)
        self.open = {entry.group_id: entry for entry in state.open}
        self.refunded = list(state.refunded)
        self.dropped = dict(state.dropped)
        self.cancelled = set(state.cancelled)
        self._frontiers = [
            Frontier(at, above) for at, above in zip(state.frontier, state.settled, strict=True)
        ]
        self._unread = dict(state.unread)
        self._num_admitted = state.num_admitted
        self._num_arrived = state.num_arrived
        self._counts = Counter(
            {
                name: getattr(state.counts, name)
                for name in ("granted", "trained", "closed", "dropped", "duplicates", "ungranted")
            }
        )
        self._by_reason = Counter(state.counts.closed_by_reason)
        self._drops = Counter(state.counts.dropped_by_reason)

    def fields(self) -> dict[str, Any]:
        """The accounts as fields of a `FeedState`."""
        return {
            "limits": tuple(self.limits),
            "frontier": tuple(f.at for f in self._frontiers),
            "settled": tuple(f.above for f in self._frontiers),
            "open": tuple(self.open.values()),
            "unread": dict(self._unread),
            "refunded": tuple(self.refunded),
            "dropped": dict(self.dropped),
            "cancelled": tuple(sorted(self.cancelled)),
            "num_admitted": self._num_admitted,
            "num_arrived": self._num_arrived,
            "counts": self.counts(),
        }

    # ------------------------------------------------------------------------------------ grants
    def granted(self, group_id: str) -> bool:
        """Whether `group_id` names a prompt offset that was ever granted."""
        try:
            origin = parse_group_id(group_id)
        except ValueError:
            return False
        return (
            origin.topic == self.prompts_topic
            and 0 <= origin.partition < len(self.limits)
            and 0 <= origin.offset < self.limits[origin.partition]
        )

    def grant(self, limits: Sequence[int], version: Version) -> list[str]:
        """Opens the offsets below `limits`, by partition, then offset: their group ids. `version`
        is the published one. LedgerBroken when limits go back or are of other partitions."""
        if len(limits) != len(self.limits):
            raise LedgerBroken(
                f"an announcement limits {len(limits)} prompt partitions; "
                f"this run has {len(self.limits)}"
            )
        new: list[str] = []
        for partition, limit in enumerate(limits):
            if limit < self.limits[partition]:
                raise LedgerBroken(
                    f"the limit of prompts/{partition} went back from {self.limits[partition]} "
                    f"to {limit}"
                )
            for offset in range(self.limits[partition], limit):
                new.append(self._admit(partition, offset, version))
            self.limits[partition] = limit
        return new

    def _admit(self, partition: int, offset: int, version: Version) -> str:
        group_id = str(Origin(self.prompts_topic, partition, offset))
        self.open[group_id] = Entry(
            group_id=group_id,
            partition=partition,
            offset=offset,
            oldest=version,
            newest=None,
            admitted_at=version,
            order=self._num_admitted,
        )
        self._num_admitted += 1
        self._counts["granted"] += 1
        return group_id

    def forget_refunds(self, announced: Collection[str]) -> None:
        """These closed groups are counted by an announcement."""
        self.refunded = [g for g in self.refunded if g not in announced]

    # ----------------------------------------------------------------------------------- cancels
    def may_cancel(self, cancel: Cancel, version: Version) -> bool:
        """Whether announcing it with `version` would change anything: the group runs, is not closed
        by an earlier one and, to be put back, may have started before that version."""
        entry = self.open.get(cancel.group_id)
        if entry is None or entry.coordinate is not None or cancel.group_id in self.cancelled:
            return False
        return cancel.then == "close" or entry.oldest < version

    def cancel(self, cancel: Cancel, version: Version) -> None:
        """It was announced with `version`. A group to be closed stays open until its terminal
        comes, whatever that is; one that is put back starts no earlier than that version. A group
        that has arrived, or ended, is not concerned."""
        if not self.may_cancel(cancel, version):
            return
        if cancel.then == "close":
            self.cancelled.add(cancel.group_id)
            return
        entry = self.open[cancel.group_id]
        self.open[cancel.group_id] = msgspec.structs.replace(entry, oldest=version)

    # --------------------------------------------------------------------------------- terminals
    def awaits(self, group_id: str) -> bool:
        """Whether the next terminal of the group is its first, and no step trained it."""
        if (entry := self.open.get(group_id)) is not None:
            return entry.coordinate is None
        unread = self._unread.get(group_id)
        return unread is not None and unread.how != "trained"

    def arrive(
        self,
        coordinate: Coordinate,
        oldest: Version | None,
        newest: Version | None,
        num_rows: int,
        *,
        drop_reason: str = STALE,
    ) -> Entry | None:
        """The entry, now ready, of the group whose record was read; None when that is not the
        group's first terminal. Its true oldest version replaces the bound of its grant.
        `drop_reason`: what it was dropped for, if an announcement says that it was refunded."""
        entry = self._first_terminal(coordinate.group_id, None, drop_reason)
        if entry is None:
            return None
        entry = msgspec.structs.replace(
            entry,
            oldest=oldest if oldest is not None else entry.oldest,
            newest=newest if newest is not None else entry.oldest,
            ready_order=self._num_arrived,
            coordinate=coordinate,
            num_rows=num_rows,
        )
        self._num_arrived += 1
        self.open[entry.group_id] = entry
        return entry

    def close(self, group_id: str, reason: str) -> bool:
        """A `closed` terminal was read. True if it is the group's first terminal: its credit
        returns."""
        entry = self._first_terminal(group_id, reason, STALE)
        if entry is None:
            return False
        self._by_reason[reason] += 1
        self.settle(entry, "closed", read=True)
        self.refunded.append(group_id)
        return True

    def drop(self, group_id: str, reason: str) -> bool:
        """Gives up an open group, arrived or not. False if it is not open."""
        entry = self.open.get(group_id)
        if entry is None:
            return False
        self._count_drop(reason)
        self.settle(entry, "dropped", read=entry.coordinate is not None, reason=reason)
        self.dropped[group_id] = reason
        self.refunded.append(group_id)
        return True

    def _first_terminal(self, group_id: str, reason: str | None, drop_reason: str) -> Entry | None:
        if not self.granted(group_id):
            self._counts["ungranted"] += 1
            return None
        if group_id in self._unread:
            self._read_again(group_id, self._unread.pop(group_id), reason, drop_reason)
            return None
        entry = self.open.get(group_id)
        if entry is None or entry.coordinate is not None:
            self._counts["duplicates"] += 1
            return None
        return entry

    def _read_again(
        self, group_id: str, ended: Unread, reason: str | None, drop_reason: str
    ) -> None:
        """The first terminal of a group that was settled before it was read (`reason` None: a
        scored group)."""
        if reason is None:
            self._num_arrived += 1
            if ended.how == "closed":  # refunded: the feed that announced it had dropped it
                self._count_drop(drop_reason)
                self.dropped[group_id] = drop_reason
            return
        if ended.how == "trained":
            raise LedgerBroken(f"{group_id} was trained, but its first terminal says {reason}")
        if ended.how == "dropped":  # while it ran: it has an end of its own
            self._count_drop(ended.reason, -1)
        self._by_reason[reason] += 1

    # ------------------------------------------------------------------------------------ settled
    def settle(
        self,
        entry: Entry,
        how: Literal["trained", "closed", "dropped"],
        *,
        read: bool,
        reason: str = "",
    ) -> None:
        """Ends an open group. `read`: whether its terminal was; `reason`: of a drop."""
        del self.open[entry.group_id]
        if not read:
            self._unread[entry.group_id] = Unread(how, reason)
        self.cancelled.discard(entry.group_id)
        self._frontiers[entry.partition].add(entry.offset)
        self._counts["trained" if how == "trained" else "closed"] += 1

    def drop_recorded(self, group_id: str, reason: str) -> None:
        """A manifest lists the drop of a settled group and says why, so the next one need not."""
        before, unread = self.dropped.pop(group_id, None), self._unread.get(group_id)
        if before is not None:
            self._count_drop(before, -1)
        elif unread is None or unread.how != "closed":
            return
        self._count_drop(reason)
        if unread is not None:
            self._unread[group_id] = Unread("dropped", reason)

    def _count_drop(self, reason: str, num: int = 1) -> None:
        self._by_reason[reason] += num
        self._drops[reason] += num
        self._counts["dropped"] += num

    def is_settled(self, partition: int, offset: int) -> bool:
        return offset in self._frontiers[partition]

    def counts(self) -> Counts:
        return Counts(
            **self._counts,
            closed_by_reason=dict(+self._by_reason),
            dropped_by_reason=dict(+self._drops),
        )

    def audit_counts(self) -> dict[str, Any]:
        """The counts, with `open` and `credit_balance` (0 unless something leaked)."""
        counts = msgspec.structs.asdict(self.counts())
        settled = counts["trained"] + counts["closed"]
        balance = counts["granted"] - settled - len(self.open)
        return {**counts, "open": len(self.open), "credit_balance": balance}
