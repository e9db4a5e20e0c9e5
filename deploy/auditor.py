"""The audit as a fold: what each record of `policy`, `steps` and `trajectories` changes.

announcement ──▶ granted, refunded ─┐
manifest ─────▶ trained, dropped ───┼──▶ one byte a prompt (`Prompts`), the open ones in full
terminal ─────▶ arrived, closed ────┘
"""

from __future__ import annotations

from collections import Counter

from connectors.records import Announcement, Begin, Cancel, Coordinate, Manifest, Version
from deploy.announced import Announcements
from deploy.audit_traffic import TrafficAudit
from deploy.base import Survey
from deploy.findings import Activity, Audit, History, Terminal, Violation
from deploy.history import (
    ARRIVED,
    BEFORE,
    CLOSED,
    DROPPED,
    REFUNDED,
    TRAINED,
    Line,
    Place,
    Prompts,
    lineage_of,
)
from operators.staleness.lineage import lag, stalest
from trainer.actions import drop_reasons
from trainer.feed_state import FeedState
from trainer.overdue import masked_versions
from trainer.staleness import bound_of, reserves
from trainer.traffic import bound_of as traffic_bound_of


class Auditor:
    """The audit between two records: told of forks, manifests and announcements in the order in
    which the feed folds them, it reads `trajectories` as far as it must."""

    def __init__(self, history: History, survey: Survey) -> None:
        self._history, self._survey = history, survey
        base = history.base.feed if history.base else None
        self._lineage = {**(base.lineage if base else {}), **survey.chain.lineage}
        self._prompts = Prompts(history.prompts_topic, base)
        self.found = Audit(
            chain_breaks=[*survey.chain.breaks, *survey.breaks],
            num_void=survey.num_void,
            from_step=history.base.step + 1 if history.base else 1,
            to_step=survey.chain.step,
            grants_checked=history.strategy.auditable,
            bound_checked=history.strategy.bound is not None,
            closed_by_reason=_closed(base) if base else Counter(),
            dropped_by_reason=_listed_drops(base) if base else Counter(),
            lineage=lineage_of(self._lineage),
        )
        self._announcements = Announcements(
            history, self._lineage, survey, self._prompts, self.found
        )
        self._traffic = TrafficAudit(
            history.traffic_topics, self.found, base.traffic if base else None, history.arrived
        )
        self._terminals = {p: iter(terminals) for p, terminals in history.terminals.items()}
        self._read = dict.fromkeys(history.terminals, 0)
        self._activity = {p: Activity() for p in history.terminals}
        self._open: dict[Place, tuple[Version, float]] = {}  # version and time of the grant
        self._arrived: dict[Place, Terminal] = {}  # of open ones, and of those not granted yet
        self._ungranted: dict[Place, Terminal] = {}
        self._excluded: set[str] = set()
        self._num_trained = self._num_duplicates = 0
        for begin in survey.chain.forks:
            if history.base is not None and history.base.holds(begin):
                self._excluded.update(begin.excluded)
        self._take_over()

    def _take_over(self) -> None:
        """What the checkpoint knew where the kept log begins."""
        if self._history.base is None:
            return
        feed = self._history.base.feed
        for entry in feed.open:
            self._open[entry.partition, entry.offset] = (entry.admitted_at, 0.0)
        for terminal in self._history.arrived:
            if (place := self._prompts.place(terminal.group_id)) is not None:
                self._arrived[place] = terminal
        self._read = dict(enumerate(feed.read))

    # -------------------------------------------------------------------------------- the events
    def fork(self, begin: Begin) -> None:
        self._announcements.fork(begin)
        self._excluded.update(begin.excluded)

    def announce(self, offset: int, said: Announcement) -> None:
        for partition, first, end in self._announcements.hear(offset, said):
            for at in range(first, end):
                place = (partition, at)
                self._ungranted.pop(place, None)
                if not self._prompts.has_ended(place):
                    self._open[place] = (said.version, said.announced_at)
        for group_id in said.closed:
            self._settle(group_id, REFUNDED)
        for cancel in said.cancels:
            self._cancel(cancel, said)

    def _cancel(self, cancel: Cancel, said: Announcement) -> None:
        """A group that is put back starts no earlier than the announced version."""
        place = self._prompts.place(cancel.group_id)
        if place is None or not self._prompts.granted(place):
            self.found.ungranted.append(cancel.group_id)
        elif cancel.then == "requeue" and place in self._open:
            self._open[place] = (said.version, said.announced_at)

    def step(self, manifest: Manifest) -> None:
        given_up_by = self._survey.given_up_by(manifest)
        self._announcements.made(manifest, given_up_by)
        if given_up_by is not None:
            self.found.given_up["steps"] += 1
            self.found.given_up["groups"] += len(manifest.records)
            return
        for record in manifest.records:
            self._train(record, manifest)
        for group_id, reason in drop_reasons(manifest).items():
            self._settle(group_id, DROPPED)
            self.found.dropped_by_reason[reason] += 1
        self._traffic.step_ends(manifest.step)

    def _settle(self, group_id: str, how: int) -> None:
        """An announcement refunds a group, or a step lists it as dropped."""
        if how == DROPPED and self._traffic.owns(group_id):
            self._traffic.drop(group_id)
            return
        place = self._prompts.place(group_id)
        if place is None or not self._prompts.granted(place):
            self.found.ungranted.append(group_id)
            return
        arrived = self._arrived.pop(place, None)
        if arrived is not None and arrived.kind == "corrupt":
            how |= CLOSED
            self.found.closed_by_reason[arrived.reason] += 1
        if self._prompts.mark(place, how) & TRAINED:
            self.found.settled_twice.append(group_id)
        self._open.pop(place, None)

    def _train(self, record: Coordinate, manifest: Manifest) -> None:
        self._read_to(record.partition, record.offset)
        group_id = record.group_id
        if group_id in self._excluded:
            self.found.excluded_trained.append(group_id)
        if self._traffic.owns(group_id):
            is_first, arrived = self._traffic.train(record)
            if is_first:
                self._check(record, arrived, manifest, traffic_bound_of(manifest.settings))
            return
        self._num_trained += 1
        place = self._prompts.place(group_id)
        if place is None or not self._prompts.granted(place):
            self.found.ungranted.append(group_id)
            return
        before = self._prompts.mark(place, TRAINED)
        self._open.pop(place, None)
        arrived = self._arrived.pop(place, None)
        if before & TRAINED:
            self.found.trained_twice.append(group_id)
        elif before & (CLOSED | REFUNDED | DROPPED | BEFORE):
            self.found.settled_twice.append(group_id)
        else:
            bound = bound_of(manifest.settings, self._history.strategy)
            self._check(record, arrived, manifest, bound)

    def _check(
        self, record: Coordinate, arrived: Terminal | None, manifest: Manifest, bound: int | None
    ) -> None:
        """A trained record against the log, its tokens against the bound the step was trained
        under. A masked token was not trained."""
        if (wrong := _difference(record, arrived)) is not None or arrived is None:
            self.found.wrong_records[record.group_id] = f"step {manifest.step}: {wrong}"
            return
        # The step that makes version n trains at version n - 1.
        at = Version(manifest.version.incarnation, manifest.version.number - 1)
        trained = arrived.versions - masked_versions(manifest.settings)
        ages = [lag(at, version, self._lineage) for version in trained]
        beyond = [age for age in ages if age < 0 or (bound is not None and age > bound)]
        if beyond:
            self.found.bound_violations.append(
                Violation(
                    group_id=arrived.group_id, step=manifest.step, staleness=max(beyond, key=abs)
                )
            )

    # --------------------------------------------------------------------------------- terminals
    def _read_to(self, partition: int, offset: int) -> None:
        """Of one partition of `trajectories`, up to and with `offset`."""
        terminals = self._terminals.get(partition, iter(()))
        while self._read.get(partition, 0) <= offset:
            terminal = next(terminals, None)
            if terminal is None:
                return
            self._read[partition] = terminal.offset + 1
            self._activity[partition].add(terminal.written_at)
            self._take_in(terminal)

    def _take_in(self, terminal: Terminal) -> None:
        where = f"trajectories/{terminal.partition}/{terminal.offset}"
        place = self._prompts.place(terminal.group_id)
        of_traffic = self._traffic.owns(terminal.group_id)
        if terminal.kind == "corrupt":
            self.found.unreadable.append(f"{where} ({terminal.group_id}): {terminal.error}")
        elif place is None and not of_traffic:
            self.found.unreadable.append(f"{where}: {terminal.group_id} is no group of this run")
        if of_traffic:
            self._traffic.take_in(terminal)
        if place is None:
            return
        if place in self._prompts.unread:
            if self._prompts.read_again(place, closed=terminal.kind != "group"):
                self.found.closed_by_reason[terminal.reason] += 1
            return
        fate = self._prompts.fate(place)
        if fate & (ARRIVED | BEFORE):
            self._num_duplicates += 1
            return
        refunded = bool(fate & (REFUNDED | DROPPED))
        closed = terminal.kind == "closed" or (terminal.kind == "corrupt" and refunded)
        self._prompts.mark(place, ARRIVED | CLOSED if closed else ARRIVED)
        if closed:
            self.found.closed_by_reason[terminal.reason] += 1
        if not self._prompts.granted(place):
            self._ungranted[place] = terminal
        if self._prompts.has_ended(place):
            self._open.pop(place, None)
        else:
            self._arrived[place] = terminal

    # ---------------------------------------------------------------------------------- the end
    def finish(self) -> Audit:
        for partition in self._terminals:
            self._read_to(partition, 1 << 62)
        found, prompts = self.found, self._prompts
        found.ungranted += [
            t.group_id
            for t in self._ungranted.values()
            if t.offset < self._history.terminal_ends.get(t.partition, 1 << 62)
        ]
        self._overdue()
        self._traffic.finish(self._unscored_sessions())
        scoring = self._unscored()
        base = self._history.base
        num_trained = self._num_trained + (base.feed.counts.trained if base else 0)
        found.groups = {
            "granted": prompts.num_granted,
            "trained": num_trained,
            "closed": prompts.closed,
            "dropped": prompts.dropped,
            "open": prompts.open,
            "scoring": scoring,
            "duplicates": self._num_duplicates,
        }
        ended = sum(found.groups[how] for how in ("trained", "closed", "dropped", "open"))
        found.credit_balance = prompts.num_granted - ended
        return found

    def _overdue(self) -> None:
        """Open groups that can no longer be trained within the bound: a reservation was lost, where
        the policy makes any. What arrived is as old as its tokens, the rest as its grant. Of one
        that started from a version given up since, its bound does not tell."""
        policy, at = self._history.strategy, self._announcements.published
        bound = policy.bound if reserves(policy) else None
        line = Line(self._survey.chain.incarnation, self._lineage)
        if bound is None or at is None or at not in line:
            return
        for place, (version, _) in self._open.items():
            arrived = self._arrived.get(place)
            written = arrived.versions if arrived else ()
            oldest = stalest(written, at, self._lineage) or version
            if oldest in line and (age := lag(at, oldest, self._lineage)) > bound:
                how = "arrived with tokens of" if arrived else "granted at"
                what = "it was not trained" if arrived else "it has no terminal"
                self.found.lost[self._prompts.id_of(place)] = (
                    f"{how} version {oldest}, {age} steps before {at}, and never ended; {what}"
                )

    def _unscored(self) -> int:
        """How many open groups wait for their reward; those the reward stage lost are noted."""
        missing = {p: at for p, (_, at) in self._open.items() if p not in self._arrived}
        if not missing:
            return 0
        count = 0
        for place, written_at in self._history.rollouts(missing, min(missing.values())):
            count += 1
            self._look_at_unscored(self._prompts.id_of(place), place[0], written_at)
        return count

    def _unscored_sessions(self) -> int:
        """The same of live traffic."""
        count = 0
        for group_id, partition, written_at in self._history.sessions():
            if not self._traffic.has_terminal(group_id):
                count += 1
                self._look_at_unscored(group_id, partition, written_at)
        return count

    def _look_at_unscored(self, group_id: str, partition: int, written_at: float) -> None:
        worked_s = self._activity[partition].since(written_at)
        if worked_s > self._history.patience_s:
            self.found.lost.setdefault(
                group_id,
                f"in rollouts, and not scored in {worked_s:.0f} s in which others were",
            )


def _closed(base: FeedState) -> Counter[str]:
    return base.counts.ended_by_reason + Counter(base.traffic.counts.closed_by_reason)


def _listed_drops(base: FeedState) -> Counter[str]:
    """By reason; the others will be listed by a step that is in the log."""
    found = Counter[str]()
    for counts, unlisted in ((base.counts, base.dropped),
                             (base.traffic.counts, base.traffic.dropped)):  # fmt: skip
        found += Counter(counts.dropped_by_reason) - Counter(unlisted.values())
    return found


def _difference(record: Coordinate, found: Terminal | None) -> str | None:
    """Why the terminal of a trained group is not the record its manifest names, or None."""
    named = f"trajectories/{record.partition}/{record.offset} with checksum {record.crc:08x}"
    if found is None:
        return f"{named} is not in the log"
    if (found.partition, found.offset, found.crc) != (record.partition, record.offset, record.crc):
        return (
            f"{named} was trained, the log holds the group at trajectories/{found.partition}/"
            f"{found.offset} with {found.crc:08x}"
        )
    return found.error or None
