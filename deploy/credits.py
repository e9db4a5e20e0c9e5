"""What the staleness policy allowed to grant at each announcement, folded from the log alone.

The policy object itself is asked, with the events that the log shows: grants, refunds and cancels
by the announcements, commits by the manifests. An auditable one promises the same answer that the
feed had, for the feed refunds nothing it does not announce with the next grants, and what it
committed and had not yet trained leaves as many places fewer as groups fewer. Another's answers
hang on arrivals or engine load: its first one is right, for nothing has arrived then.

A rollback folds the log anew without the steps it gives up. So there is one fold for each rollback
still to come, in which the steps it gives up were never trained; the current one is the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from connectors.records import Cancel, Fork, Manifest, Version
from operators.staleness.types import (
    Announced,
    Closed,
    Committed,
    Event,
    Granted,
    Ledger,
    OpenGroup,
    StalenessPolicy,
)
from trainer.feed_state import FIRST_VERSION, FeedState
from trainer.grants import group_credits


@dataclass(slots=True, kw_only=True)
class Books:
    """One fold. `version`: that the open step trains at, as far as the log shows."""

    state: Any
    version: Version
    open: dict[str, OpenGroup]
    num_granted: int = 0
    num_trained: int = 0
    num_closed: int = 0


class Credits:
    """`batch_size` groups a step; `base`: the ledger where the kept log begins, None for a whole
    one; `num_rollbacks` that follow."""

    def __init__(
        self,
        policy: StalenessPolicy[Any],
        *,
        batch_size: int,
        group_size: int,
        lineage: Mapping[int, Fork],
        base: FeedState | None,
        num_rollbacks: int,
    ) -> None:
        self._policy, self._lineage = policy, lineage
        self._batch_size, self._group_size = batch_size, group_size
        self._books = deque(_books(policy, base) for _ in range(num_rollbacks + 1))
        self._num_rollbacks = 0  # behind us

    def fork(self, fork: Fork, incarnation: int) -> None:
        if fork.reason == "rollback" and len(self._books) > 1:
            self._books.popleft()
            self._num_rollbacks += 1
        for books in list(self._books)[:1]:
            books.version = Version(incarnation, fork.number)

    def train(self, manifest: Manifest, given_up_by: int | None) -> None:
        """`given_up_by`: the how manieth rollback gave the step up, from 0."""
        until = None if given_up_by is None else given_up_by + 1 - self._num_rollbacks
        ids = [record.group_id for record in manifest.records]
        for books in list(self._books)[:until]:
            books.version = manifest.version
            for group_id in ids:
                if books.open.pop(group_id, None) is not None:
                    books.num_trained += 1
                    self._observe(books, Committed(group_id, manifest.step))
            self._close(books, manifest.dropped)

    def refund(self, group_ids: Iterable[str]) -> None:
        for books in self._books:
            self._close(books, group_ids)

    def publish(self, version: Version) -> None:
        for books in self._books:
            self._observe(books, Announced(version))

    def cancel(self, cancels: Iterable[Cancel], version: Version) -> None:
        """Groups that are put back start again under `version`."""
        again = [c.group_id for c in cancels if c.then == "requeue"]
        for books in self._books:
            for group_id in again:
                group = books.open.get(group_id)
                if group is not None and group.oldest < version:
                    books.open[group_id] = replace(group, oldest=version)

    def allowed(self) -> int:
        """Groups that may be granted now."""
        books = self._books[0]
        return group_credits(self._policy, books.state, self._ledger(books))

    def grant(self, group_ids: Sequence[tuple[str, int, int]], version: Version) -> None:
        """(group id, partition, offset) of each."""
        for books in self._books:
            for group_id, partition, offset in group_ids:
                books.open[group_id] = OpenGroup(
                    group_id=group_id, partition=partition, offset=offset, oldest=version,
                    newest=None, admitted_at=version, state="running", order=books.num_granted,
                    num_running=self._group_size,
                )  # fmt: skip
                books.num_granted += 1
                self._observe(books, Granted(group_id, version))

    def _close(self, books: Books, group_ids: Iterable[str]) -> None:
        for group_id in group_ids:
            if books.open.pop(group_id, None) is not None:
                books.num_closed += 1
                self._observe(books, Closed(group_id, ""))

    def _observe(self, books: Books, event: Event) -> None:
        books.state = self._policy.observe(books.state, event)

    def _ledger(self, books: Books) -> Ledger:
        return Ledger(
            version=books.version,
            published=books.version,
            batch_size=self._batch_size,
            free_slots=self._batch_size,
            group_size=self._group_size,
            groups=tuple(books.open.values()),
            num_granted=books.num_granted,
            num_trained=books.num_trained,
            num_closed=books.num_closed,
            num_unpublished=0,
            lineage=self._lineage,
        )


def _books(policy: StalenessPolicy[Any], base: FeedState | None) -> Books:
    state = policy.start()
    if base is None:
        return Books(state=state, version=FIRST_VERSION, open={})
    if base.policy_name == policy.name:
        state = msgspec.convert(base.policy, type=type(state))
    return Books(
        state=state,
        version=base.version,
        open={
            entry.group_id: OpenGroup(
                group_id=entry.group_id, partition=entry.partition, offset=entry.offset,
                oldest=entry.oldest, newest=entry.newest, admitted_at=entry.admitted_at,
                state="running", order=entry.order,
            )
            for entry in base.open
        },
        num_granted=base.counts.granted,
        num_trained=base.counts.trained,
        num_closed=base.counts.closed,
    )  # fmt: skip
