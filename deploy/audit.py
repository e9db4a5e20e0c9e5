"""`headwater audit`: proves from the log alone that nothing was lost, doubled or trained too late.

`audit(History)` is pure. Every granted prompt offset must be exactly one of: trained by one step
of the chain, closed, dropped by a step, or still open; each is counted from its own topic, so a
leak anywhere shows as a balance that is not zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from connectors.records import (
    Announcement,
    StepRecord,
    Version,
    parse_group_id,
)
from deploy.history import Grants, origin_of
from trainer.step_log import Chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """One record of `trajectories`; `oldest` is the oldest version among its trained tokens."""

    group_id: str
    partition: int
    offset: int
    crc: int
    kind: Literal["group", "closed", "corrupt"]
    oldest: Version | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What the log holds. `announcements` without fenced ones; `steps` as (offset, record), all of
    them; `trajectory_starts`: where retention left each partition's start; `bound` None: not
    strict."""

    prompts_topic: str
    announcements: Sequence[Announcement]
    steps: Sequence[tuple[int, StepRecord]]
    terminals: Iterable[Terminal]
    bound: int | None
    trajectory_starts: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A group one of whose trained tokens is older than the bound."""

    group_id: str
    step: int
    staleness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """`lost`: granted groups that can no longer be trained within the bound but never ended, and
    trained ones whose record is not in the log. `settled_twice`: closed and trained as well.
    `ungranted`: trained without a grant. `chain_breaks` says why `digest_chain_ok` is false."""

    groups: Mapping[str, int]
    lost: Sequence[str]
    trained_twice: Sequence[str]
    settled_twice: Sequence[str]
    ungranted: Sequence[str]
    bound_violations: Sequence[Violation]
    credit_balance: int
    chain_breaks: Sequence[str]

    @property
    def digest_chain_ok(self) -> bool:
        return not self.chain_breaks

    @property
    def ok(self) -> bool:
        return not (
            self.lost or self.trained_twice or self.settled_twice or self.ungranted
            or self.bound_violations or self.credit_balance or self.chain_breaks
        )  # fmt: skip


def audit(history: History) -> Audit:
    """Checks every invariant; nothing is taken from the trainer's own counts."""
    grants, chain = Grants(), Chain()
    for announcement in history.announcements:
        grants.observe(announcement)
    for offset, record in history.steps:
        chain.observe(offset, record)
    first: dict[str, Terminal] = {}
    num_duplicates = 0
    for terminal in history.terminals:
        num_duplicates += terminal.group_id in first
        first.setdefault(terminal.group_id, terminal)

    trained = Counter(r.group_id for m in chain.manifests for r in m.records)
    # Foreign records name groups nobody granted: they settle nothing.
    closed = {
        group_id
        for group_id, t in first.items()
        if t.kind == "closed" and _is_granted(group_id, history.prompts_topic, grants)
    }
    # A drop is in the next manifest; until that is written, the announcement that counts it says
    # so.
    dropped = {g for m in chain.manifests for g in m.dropped}
    dropped = dropped.union(*(a.closed for a in history.announcements)) - closed
    still_open = [
        (origin_of(history.prompts_topic, partition, offset), version)
        for partition, offset, version in grants
        if not _is_settled(
            origin_of(history.prompts_topic, partition, offset), trained, closed, dropped
        )
    ]
    counts = {
        "granted": grants.num_granted,
        "trained": len(trained),
        "closed": len(closed),
        "dropped": len(dropped),
        "open": len(still_open),
        "duplicates": num_duplicates,
    }
    return Audit(
        groups=counts,
        lost=[*_overdue(still_open, chain, history.bound), *_missing(chain, first, history)],
        trained_twice=[g for g, times in trained.items() if times > 1],
        settled_twice=sorted((closed | dropped) & trained.keys()),
        ungranted=[g for g in trained if not _is_granted(g, history.prompts_topic, grants)],
        bound_violations=_too_old(chain, first, history.bound),
        credit_balance=counts["granted"]
        - len(trained)
        - len(closed)
        - len(dropped)
        - len(still_open),
        chain_breaks=[*chain.breaks, *_wrong_digests(chain, history.announcements)],
    )


def _is_settled(
    group_id: str, trained: Mapping[str, int], closed: set[str], dropped: set[str]
) -> bool:
    return group_id in trained or group_id in closed or group_id in dropped


def _is_granted(group_id: str, prompts_topic: str, grants: Grants) -> bool:
    try:
        origin = parse_group_id(group_id)
    except ValueError:
        return False
    return origin.topic == prompts_topic and (origin.partition, origin.offset) in grants


def _overdue(
    still_open: Sequence[tuple[str, Version]], chain: Chain, bound: int | None
) -> list[str]:
    """Open groups that the open step can no longer train within the bound: a reservation was
    lost."""
    if bound is None:
        return []
    return [
        group_id for group_id, granted_at in still_open if chain.step - granted_at.number > bound
    ]


def _missing(chain: Chain, first: Mapping[str, Terminal], history: History) -> list[str]:
    """Groups trained from a record that the log does not hold (any more), while it should."""
    lost = []
    for manifest in chain.manifests:
        for record in manifest.records:
            if record.offset < history.trajectory_starts.get(record.partition, 0):
                continue  # retention passed it
            found = first.get(record.group_id)
            there = found is not None and found.kind != "closed"
            if there and (found.partition, found.offset, found.crc) == (  # type: ignore[union-attr]
                record.partition,
                record.offset,
                record.crc,
            ):
                continue
            if found is None or found.kind != "closed":  # else it is settled twice
                lost.append(record.group_id)
    return lost


def _too_old(chain: Chain, first: Mapping[str, Terminal], bound: int | None) -> list[Violation]:
    if bound is None:
        return []
    found = []
    for manifest in chain.manifests:
        for record in manifest.records:
            terminal = first.get(record.group_id)
            if terminal is None or terminal.oldest is None:
                continue
            # The step that makes version n trains at version n - 1.
            staleness = manifest.version.number - 1 - terminal.oldest.number
            if not 0 <= staleness <= bound:
                found.append(
                    Violation(group_id=record.group_id, step=manifest.step, staleness=staleness)
                )
    return found


def _wrong_digests(chain: Chain, announcements: Sequence[Announcement]) -> list[str]:
    """Announced versions that no step made, or with another digest than the step's; limits that
    fell."""
    made = {m.version: m.digest for m in chain.manifests}
    if chain.manifests and chain.manifests[0].step == 1:
        made[Version(0, 0)] = chain.manifests[0].digest_before
    newest = max((a.version for a in announcements), default=Version(0, 0))
    last = chain.manifests[-1].version if chain.manifests else Version(0, 0)
    wrong = _fallen_limits(announcements) | {
        f"version {a.version} was announced with {a.digest}, its step made {made[a.version]}"
        for a in announcements
        if a.version in made and made[a.version] != a.digest
    }
    if newest > last:
        wrong.add(f"version {newest} was announced; the last step makes {last}")
    return sorted(wrong)


def _fallen_limits(announcements: Sequence[Announcement]) -> set[str]:
    """A limit only rises: a grant is kept."""
    return {
        f"a limit fell from {before.limits} to {after.limits} at version {after.version}"
        for before, after in pairwise(announcements)
        if any(b > a for b, a in zip(before.limits, after.limits, strict=False))
    }
