"""What the announcements of `policy` say, checked: versions, digests, limits and credits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from connectors.records import Announcement, Begin, Fork, Manifest, Version
from deploy.base import Survey
from deploy.credits import Credits
from deploy.findings import Audit, History, Overgrant
from deploy.history import Prompts
from trainer.checkpoint_meta import CheckpointMeta


class Announcements:
    """Grants `prompts` what each announcement grants. Told of every manifest and fork before the
    announcements that come after it."""

    def __init__(
        self,
        history: History,
        lineage: Mapping[int, Fork],
        survey: Survey,
        prompts: Prompts,
        found: Audit,
    ) -> None:
        self._history, self._prompts, self._found = history, prompts, found
        self._rollbacks = [b for b in survey.rollbacks if not _holds(history.base, b)]
        self._credits = Credits(
            history.strategy,
            batch_size=history.batch_size,
            group_size=history.group_size,
            lineage=lineage,
            base=history.base.feed if history.base else None,
            num_rollbacks=len(self._rollbacks),
        )
        self._made: dict[Version, str] = {}
        self._known_from = Version(0, 0)  # of a trimmed log nobody knows what earlier ones were
        self.published: Version | None = None
        if (base := history.base) is not None:
            self._made[base.version] = base.digest
            self._known_from = base.version
            self.published = base.feed.published
        elif survey.first is not None and survey.first.step == 1:
            self._made[Version(0, 0)] = survey.first.digest_before

    def fork(self, begin: Begin) -> None:
        assert begin.fork is not None
        self._credits.fork(begin.fork, begin.incarnation)
        self._made[Version(begin.incarnation, begin.fork.number)] = begin.digest

    def made(self, manifest: Manifest, given_up_by: Begin | None) -> None:
        self._made[manifest.version] = manifest.digest
        until = None if given_up_by is None else self._rollbacks.index(given_up_by)
        self._credits.train(manifest, until)

    def hear(self, offset: int, said: Announcement) -> list[tuple[int, int, int]]:
        """(partition, first, end) of the prompts it grants."""
        judged = offset < self._history.policy_end
        if judged:
            self._check_version(offset, said)
        limits = self._limits(offset, said)
        self._credits.refund(said.closed)
        self._credits.publish(said.version)
        is_first = not self._prompts.limits and self._history.base is None
        is_known = judged and (is_first or self._history.strategy.auditable)
        allowed = self._credits.allowed() if is_known else 0
        if is_first:
            self._begin_at(limits, allowed)
        new = self._prompts.grant(limits)
        num_new = sum(end - first for _, first, end in new)
        if is_known and num_new > max(0, allowed):
            self._found.overgrants.append(
                Overgrant(offset=offset, version=said.version, granted=num_new, allowed=allowed)
            )
        self._credits.grant(
            [
                (self._prompts.id_of((partition, at)), partition, at)
                for partition, first, end in new
                for at in range(first, end)
            ],
            said.version,
        )
        self._credits.cancel(said.cancels, said.version)
        return new

    def _begin_at(self, limits: Sequence[int], allowed: int) -> None:
        """The first grants of a run begin where retention had left `prompts` by then. The log says
        so only in that they are far more than the policy allowed."""
        starts = [self._history.prompt_starts.get(p, 0) for p in range(len(limits))]
        if sum(limits) > allowed and all(
            s <= limit for s, limit in zip(starts, limits, strict=True)
        ):
            self._prompts.begin_at(starts)

    def _check_version(self, offset: int, said: Announcement) -> None:
        breaks, version = self._found.chain_breaks, said.version
        if self.published is not None and version < self.published:
            breaks.append(f"policy/{offset} announces version {version} after {self.published}")
        if version == Version(0, 0):  # before the first step only the announcements say it
            self._made.setdefault(version, said.digest)
        digest = self._made.get(version)
        if digest is None and version > self._known_from:
            breaks.append(f"version {version} was announced; no step made it")
            return
        if digest not in (None, said.digest):
            breaks.append(
                f"version {version} was announced with {said.digest}, its step made {digest}"
            )
        self.published = version
        self._made = {v: d for v, d in self._made.items() if v >= version}

    def _limits(self, offset: int, said: Announcement) -> list[int]:
        """Of the announcement, those that are none left as they were."""
        breaks, before = self._found.chain_breaks, self._prompts.limits
        if len(said.limits) != len(self._history.terminals):
            breaks.append(
                f"policy/{offset} limits {len(said.limits)} partitions of prompts, the run has "
                f"{len(self._history.terminals)}"
            )
            return list(before)
        limits = list(said.limits)
        for partition, limit in enumerate(limits):
            last = before[partition] if before else 0
            end = self._history.prompt_ends.get(partition, limit)
            if limit < last:
                breaks.append(
                    f"a limit fell: prompts/{partition} from {last} to {limit} at policy/{offset}"
                )
            if limit > end:
                breaks.append(
                    f"policy/{offset} grants prompts/{partition} below {limit}, beyond its end "
                    f"{end}"
                )
            limits[partition] = min(max(limit, last), max(end, last))
        return limits


def _holds(base: CheckpointMeta | None, begin: Begin) -> bool:
    return base is not None and base.holds(begin)
