"""A run's log as the numbers that `status` shows, folded record by record.

Enter: announcements, the records of `steps` and `trajectories`, evaluations. Leave: counts and
averages of the current line, at a cost that does not grow with the log; what a rollback gave up is
counted apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from connectors.arrow import CorruptRecord, num_sampled
from connectors.kafka.client import Record
from connectors.kafka.terminals import UnknownRecord, terminal
from connectors.records import (
    HEADER_KIND,
    Announcement,
    Begin,
    Closed,
    Evaluation,
    Manifest,
    StepRecord,
    Version,
)
from deploy.history import (
    ARRIVED,
    BEFORE,
    CLOSED,
    DROPPED,
    REFUNDED,
    Line,
    Place,
    Prompts,
    lineage_of,
    slim,
)
from deploy.nearline_sums import Ends, nearline_of
from deploy.step_sums import StepSums
from trainer.checkpoint_meta import CheckpointMeta
from trainer.step_log import Chain

RECENT_STEPS: Final = 10
"""What `reward.mean`, `tokens_per_s` and `publish_s` look back on."""


@dataclass(slots=True)
class Fold:
    """The log so far. Pure: `RunStatus` feeds it.

    prompts   what became of each; None of its trained ones is marked
    traffic   terminals of live traffic
    base      where the kept part of the log begins, None for a whole one
    announced the version that engines were last told of
    given_up  steps that rollbacks gave up, groups and tokens trained in them
    last      metrics of the chain's last step; empty after a rollback, until there is another
    """

    prompts: Prompts
    base: CheckpointMeta | None = None
    traffic: Ends = field(default_factory=Ends)
    chain: Chain = field(default_factory=Chain)
    closed_by_reason: Counter[str] = field(default_factory=Counter)
    evaluations: list[Evaluation] = field(default_factory=list)
    announced: Version | None = None
    given_up: dict[str, int] = field(default_factory=lambda: {"steps": 0, "groups": 0, "tokens": 0})
    last: Mapping[str, float] = field(default_factory=dict)
    _sums: StepSums = field(default_factory=StepSums)
    _ready: set[Place] = field(default_factory=set)  # at the base; their terminals are read again

    def __post_init__(self) -> None:
        if self.base is not None:
            feed = self.base.feed
            self.closed_by_reason.update(feed.counts.ended_by_reason)
            self.announced = feed.published
            self._ready = {(e.partition, e.offset) for e in feed.open if e.coordinate is not None}

    def announce(self, announcement: Announcement) -> None:
        self.prompts.grant(announcement.limits)
        self._mark(announcement.closed, REFUNDED)
        self.announced = announcement.version

    def step(self, offset: int, record: StepRecord) -> None:
        before = self.chain.manifests
        kept = record if isinstance(record, Begin) else slim(record)
        self.chain.observe(offset, kept)
        manifests = self.chain.manifests
        counts = bool(manifests) and manifests[-1] is kept
        if manifests is not before:
            if counts:
                self._sums = StepSums()  # the log is a trimmed one, and the chain began anew
            else:
                self._give_up(before[len(manifests) :])
        if counts and isinstance(record, Manifest):
            self.last = record.metrics
            last = manifests[-2] if len(manifests) > 1 else None
            is_new = self.base is None or not self.base.holds(record)
            if is_new:
                self._sums.add(record, last)
                self._mark(record.dropped, DROPPED)
            else:
                self._sums.add_nothing()  # what comes before the base is in its counts

    def _give_up(self, manifests: Sequence[Manifest]) -> None:
        self.last = {}
        cut = self._sums.cut(len(manifests))
        self.given_up["steps"] += len(manifests)
        self.given_up["groups"] += int(cut["groups"])
        self.given_up["tokens"] += int(cut["tokens/trained"])
        for group_id in (g for m in manifests for g in m.dropped):
            if (place := self.prompts.place(group_id)) is not None:
                self.prompts.unmark(place, DROPPED)

    def _mark(self, group_ids: Sequence[str], how: int) -> None:
        for group_id in group_ids:
            if (place := self.prompts.place(group_id)) is not None:
                self.prompts.mark(place, how)

    def end(self, record: Record) -> None:
        """A record of `trajectories`; the first terminal of a group counts."""
        group_id = (record.key or b"").decode(errors="replace")
        place = self.prompts.place(group_id)
        closed = record.headers.get(HEADER_KIND) == "closed"
        if place is None:
            if self.traffic.owns(group_id):
                self.traffic.add(group_id, lambda: _reason(record) if closed else None)
            return  # of no prompt of this run
        if place in self._ready:
            self._ready.discard(place)
            self.prompts.sampled(place, num_sampled(record.value))
            return
        if place in self.prompts.unread:
            closed = self.prompts.read_again(place, closed=closed)
        elif not self.prompts.fate(place) & (ARRIVED | BEFORE):
            self.prompts.mark(place, ARRIVED | CLOSED if closed else ARRIVED)
        else:
            return
        if closed:
            self.closed_by_reason[_reason(record)] += 1
        else:
            self.prompts.sampled(place, num_sampled(record.value))

    def evaluate(self, evaluation: Evaluation) -> None:
        self.evaluations.append(msgspec.structs.replace(evaluation, samples=()))

    # ------------------------------------------------------------------------------------ answers
    def groups(self) -> dict[str, int]:
        """`open` are those that neither a step on the chain trained nor anything else ended."""
        prompts = self.prompts
        trained = int(self._sums["groups"])
        if self.base is not None:
            trained += self.base.feed.counts.trained
        return {
            "granted": prompts.num_granted,
            "trained": trained,
            "closed": prompts.closed,
            "dropped": prompts.dropped,
            "open": prompts.num_granted - trained - prompts.closed - prompts.dropped,
        }

    def tokens(self) -> dict[str, int]:
        """`generated`: sampled, of the groups that arrived; `dropped`: of those of them that were
        dropped; `trained`: by steps on the chain; `masked`: what those did not train of their
        groups' sampled tokens."""
        trained = int(self._sums["tokens/trained"])
        return {
            "generated": self.prompts.sampled_tokens,
            "trained": trained,
            "masked": max(0, int(self._sums["tokens/generated"]) - trained),
            "dropped": self.prompts.dropped_tokens,
        }

    def num_ready(self) -> int:
        """Groups that have a terminal and wait for the trainer."""
        groups = self.groups()
        ended = groups["trained"] + groups["closed"] + groups["dropped"]
        return max(0, self.prompts.arrived - ended)

    def line(self) -> Line:
        known = self.base.feed.lineage if self.base is not None else {}
        return Line(self.chain.incarnation, {**known, **self.chain.lineage})

    @property
    def version(self) -> Version | None:
        """The announced one; after a rollback, until the next announcement, that it went on as."""
        if self.announced is None or self.announced in self.line():
            return self.announced
        return self.chain.version

    def lineage(self) -> list[dict[str, Any]]:
        return lineage_of(self.line().lineage)

    def total(self, metric: str) -> float:
        """Sum over the chain's steps, of a metric that `StepSums` keeps."""
        return self._sums[metric]

    def staleness(self) -> dict[str, float | None]:
        """Of trained tokens: the mean over all of them; p99 and max are the largest of the steps'
        (theirs cannot be merged)."""
        sums = self._sums
        if not sums["staleness_weight"]:
            return {"mean": None, "p99": None, "max": None}
        return {
            "mean": sums["staleness_sum"] / sums["staleness_weight"],
            "p99": sums["staleness_p99"],
            "max": sums["staleness_max"],
        }

    def staleness_actions(self) -> dict[str, Any]:
        """What the policy did about staleness on the chain, and what the trainer waited for:

        waits    by what for: how many steps waited, and seconds
        holds    ready groups kept back, each once a step
        drops, cancels
                 groups, by reason; cancels by what became of them first
        masked_tokens, reweighted_tokens
        """
        found: dict[str, Any] = {
            "waits": {}, "holds": 0, "drops": {}, "cancels": {"close": {}, "requeue": {}},
            "masked_tokens": 0, "reweighted_tokens": 0,
        }  # fmt: skip
        for name, value in sorted(self._sums.actions().items()):
            match name.split("/"):
                case ["seconds", "wait", reason]:
                    found["waits"].setdefault(reason, {})["seconds"] = round(value, 3)
                case ["staleness", "waits", reason]:
                    found["waits"].setdefault(reason, {})["steps"] = int(value)
                case ["staleness", "holds"]:
                    found["holds"] = int(value)
                case ["staleness", "drops", reason]:
                    found["drops"][reason] = int(value)
                case ["staleness", "cancels", then, reason]:
                    found["cancels"][then][reason] = int(value)
                case ["tokens", how]:
                    found[f"{how}_tokens"] = int(value)
        return found

    def nearline(self) -> dict[str, Any]:
        """What became of live traffic, and how well it was foretold."""
        return nearline_of(self.traffic, self._sums.actions(), self._sums.foretold)

    def rewards(self, last: int | None = None) -> list[tuple[int, float]]:
        """(step, mean training reward) of the chain's steps, or the last of them."""
        return self._sums.rewards(self.chain.step, last)

    def held_out(self) -> list[tuple[int, dict[str, Evaluation]]]:
        """(version's number, its evaluation by task), ascending; the newest of each version."""
        by_version: dict[Version, dict[str, Evaluation]] = {}
        for e in self.line_evaluations():
            by_version.setdefault(e.version, {})[e.task] = e
        return sorted({v.number: tasks for v, tasks in sorted(by_version.items())}.items())

    def line_evaluations(self) -> list[Evaluation]:
        """Of versions that no rollback gave up."""
        line = self.line()
        return [e for e in self.evaluations if e.version in line]

    def tokens_per_s(self) -> float | None:
        """Tokens trained a second of wall time, over the recent steps."""
        recent = [
            m for m in self.chain.manifests[-RECENT_STEPS - 1 :] if m.epoch == self.chain.epoch
        ]  # of one trainer: the time between two of them is not training
        if len(recent) < 2:
            return None
        elapsed_s = recent[-1].finished_at - recent[0].finished_at
        tokens = sum(self._sums.recent("tokens/trained", len(recent) - 1))
        return tokens / elapsed_s if elapsed_s > 0 else None

    def publish_s(self) -> float | None:
        """Of the recent steps that published."""
        return mean([s for s in self._sums.recent("seconds/publish", RECENT_STEPS) if s])

    def wait_share(self) -> float | None:
        """Share of the time from step to step that the trainer waited for groups; a trainer's first
        step and what lies between two trainers do not count."""
        elapsed_s = self._sums["elapsed_s"]
        return self._sums["wait_s"] / elapsed_s if elapsed_s > 0 else None


def mean(values: Sequence[float]) -> float | None:
    """None without values."""
    return sum(values) / len(values) if values else None


def _reason(record: Record) -> str:
    """Of a closed group; a record that cannot be read closes its group as malformed."""
    try:
        ended = terminal(record)
    except (CorruptRecord, UnknownRecord):
        return "malformed"
    return ended.reason if isinstance(ended, Closed) else "malformed"
