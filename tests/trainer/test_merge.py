"""Steps from another run's log: in the order of its grants, as a function of the log alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from connectors.arrow import encode_group
from connectors.config import Source
from connectors.kafka.client import Cluster, OffsetGone, read_all
from connectors.kafka.topics import delete_records
from connectors.records import Begin, Fork, Group, Manifest, Version
from tests.trainer.recorded_log import (
    CLOSED,
    DAMAGED,
    PARTITIONS,
    TWICE,
    UNTRAINABLE,
    RecordedLog,
    record_run,
    recorded_group,
)
from trainer.accounts import LedgerBroken
from trainer.actions import drop_reasons, metrics
from trainer.feed_state import FeedState, fresh
from trainer.merge import Merge
from trainer.recovery import Recovered
from trainer.step_input import StepInput
from trainer.step_log import Chain

PASSED_OVER = {CLOSED, DAMAGED, UNTRAINABLE}


def source(log: Cluster, **changes: Any) -> Source:
    return Source(
        **{
            "run": "runs/r", "grants": log.namespace, "namespace": log.namespace,
            "starts": [0] * PARTITIONS, **changes,
        }
    )  # fmt: skip


def recovered(state: FeedState | None = None, *steps: Manifest, **chain: Any) -> Recovered:
    return Recovered(
        epoch=0,
        step=steps[-1].step if steps else 0,
        version=steps[-1].version if steps else (state.version if state else Version(0, 0)),
        digest="",
        state=state or fresh(PARTITIONS),
        chain=Chain(manifests=list(steps), **chain),
    )


def beyond_vocabulary(group: Group) -> str | None:
    return "ids" if max(t.tokens.max() for t in group.trajectories) > 10**5 else None


class Merged:
    """What a merge gave until the log's end."""

    def __init__(
        self,
        log: Cluster,
        at: Recovered | None = None,
        batch_size: int = 2,
        no_signal: Callable[[Group], bool] = lambda group: False,
        untrainable: Callable[[Group], str | None] = beyond_vocabulary,
        **changes: Any,
    ) -> None:
        ended: list[bool] = []
        self.steps: list[StepInput] = []
        with closing(
            Merge(
                log,
                source(log, **changes),
                at or recovered(),
                batch_size=batch_size,
                untrainable=untrainable,
                no_signal=no_signal,
                at_end=lambda: ended.append(True),
            )
        ) as merge:
            while not ended:
                if (step := merge.take(1.0)) is not None:
                    self.steps.append(step)
            self.counts, self.state = merge.counts, merge.state

    @property
    def places(self) -> list[tuple[int, int]]:
        """Of the prompts of all groups, in order."""
        ids = [r.group_id.rsplit("/", 2) for step in self.steps for r in step.records]
        return [(int(partition), int(offset)) for _, partition, offset in ids]


def manifest(step: StepInput, version: Version | None = None) -> Manifest:
    return Manifest(
        step=step.step,
        epoch=0,
        version=version or Version(0, step.step),
        records=step.records,
        micro_batches=(),
        seed=0,
        digest_before="",
        digest="",
    )


def test_groups_are_trained_in_the_order_their_prompts_were_granted(cluster: Cluster) -> None:
    record_run(cluster, 8)
    granted = [(p, o) for first in (0, 4) for p in (0, 1) for o in range(first, first + 4)]
    found = Merged(cluster, batch_size=1)
    assert found.places == [place for place in granted if place not in PASSED_OVER]
    assert [step.step for step in found.steps] == list(range(1, 14))
    assert [step.version.number for step in found.steps] == list(range(13))
    assert all(s.groups[0].group_id == s.records[0].group_id for s in found.steps)
    counts = found.counts
    assert (counts.granted, counts.trained, counts.closed, counts.duplicates) == (16, 13, 3, 1)
    assert counts.closed_by_reason == {"reward_nan": 1, "malformed": 2}
    letters = read_all(cluster, cluster.topic("dead-letters"), range(PARTITIONS))
    assert {(r.partition, r.headers["code"]) for r in letters} == {
        (DAMAGED[0], "corrupt_record"), (UNTRAINABLE[0], "corrupt_record"),
    }  # fmt: skip
    dropped = [group_id for step in found.steps for group_id in step.dropped]
    assert [d.rsplit("/", 2)[1:] for d in dropped] == [["0", "3"]]  # the others' terminals say it
    assert TWICE in found.places


def test_the_state_of_a_checkpoint_depends_on_the_log_alone(cluster: Cluster) -> None:
    """Terminals that arrive while it merges give the states of a log that lay there whole."""
    log = RecordedLog(cluster)
    states, places = [], []
    with closing(
        Merge(cluster, source(cluster), recovered(), batch_size=2, untrainable=beyond_vocabulary)
    ) as merge:
        assert merge.take(0.1) is None
        log.grant(4, 2)
        log.end(1, 1, 0)
        assert merge.take(0.5) is None  # 0/0 is the head; partition 1 is not even read
        log.end(0, 2, 0, 1)
        step = merge.take(5.0)
        log.grant(0, 6)  # a partition that gets no grants starves nobody
        log.end(1, 3, 2, 7, 6)
        log.end(0, 3)
        log.end(1, 5, 4)
        while step is not None:
            states.append(step.snapshot)
            places.append(tuple(r.group_id[-3:] for r in step.records))
            step = merge.take(1.0)
    assert places == [("0/0", "0/2"), ("1/0", "1/1"), ("1/3", "1/4"), ("1/5", "1/6")]
    whole = Merged(cluster)
    assert [step.snapshot for step in whole.steps] == states


def test_it_goes_on_from_any_checkpoint_with_the_same_steps(cluster: Cluster) -> None:
    record_run(cluster, 10)
    whole = Merged(cluster)
    for kept in (0, 2, 5):
        state = whole.steps[kept].snapshot
        later = whole.steps[kept + 1 :]
        manifests = [manifest(step) for step in later[:2]]
        found = Merged(cluster, recovered(state, *manifests))
        assert [(s.step, s.records, s.snapshot) for s in found.steps] == [
            (s.step, s.records, s.snapshot) for s in later[2:]
        ]
        assert found.counts.trained == whole.counts.trained


def test_another_log_than_it_was_merged_from_is_refused(cluster: Cluster) -> None:
    record_run(cluster, 6)
    first, second = Merged(cluster).steps[:2]
    swapped = replace(first, records=second.records)
    with pytest.raises(LedgerBroken, match=r"step 1 trained other records.*log of runs/r"):
        Merged(cluster, recovered(fresh(PARTITIONS), manifest(swapped)))
    beyond = [manifest(replace(first, step=n)) for n in range(1, 9)]
    beyond[1:] = [manifest(replace(s, step=s.step)) for s in Merged(cluster).steps[1:]]
    last = Merged(cluster).steps[-1]
    beyond.append(manifest(replace(last, step=last.step + 1)))
    with pytest.raises(LedgerBroken, match="no records for step"):
        Merged(cluster, recovered(fresh(PARTITIONS), *beyond))


def test_what_is_not_in_a_part_of_a_log_is_passed_over(cluster: Cluster) -> None:
    """As in a namespace into which a range of `rollouts` was scored again."""
    log = RecordedLog(cluster)
    log.grant(6, 6)
    log.end(0, 5, 4)
    log.end(1, 0, 3)
    found = Merged(cluster, ends=[2, 3], limits=[6, 6])
    assert found.places == [(0, 4), (0, 5), (1, 0), (1, 3)]
    assert found.counts.closed_by_reason == {"no_record": 8}
    assert Merged(cluster).places == []  # without that it waits for 0/0


def test_records_that_retention_removed_are_named_with_what_to_do(cluster: Cluster) -> None:
    record_run(cluster, 6)
    kept = Merged(cluster).steps[1].snapshot
    delete_records(cluster, {"trajectories": {0: 6, 1: 7}})
    for at in (recovered(), recovered(kept)):
        with pytest.raises(OffsetGone, match=r"retention passed it; this shadow cannot go on"):
            Merged(cluster, at)
    left = recovered(msgspec.structs.replace(fresh(PARTITIONS), read=(6, 7)))
    assert Merged(cluster, left, ends=[6, 7], limits=[6, 6]).places == []


def test_a_fork_of_the_shadow_leaves_out_what_it_excludes(cluster: Cluster) -> None:
    record_run(cluster, 6)
    first, second, third = Merged(cluster).steps[:3]
    excluded = second.records[0].group_id
    fork = Fork(parent=0, number=1, reason="rollback")
    begin = Begin(
        epoch=5, writer="w", resumed_step=1, started_at=0.0, incarnation=1, fork=fork,
        excluded=(excluded, first.records[0].group_id),
    )  # fmt: skip
    at = recovered(fresh(PARTITIONS), manifest(first), incarnation=1, forks=[begin])
    again = Merged(cluster, replace(at, version=Version(1, 1)))
    assert again.steps[0].records == (second.records[1], third.records[0])
    assert again.steps[0].version == Version(1, 1)
    assert excluded in again.steps[0].dropped
    assert again.steps[0].actions["drops/filtered"] == 1


def test_a_shadow_filters_by_its_own_settings_and_goes_on_so_from_any_checkpoint(
    cluster: Cluster,
) -> None:
    """Every third prompt's group carries no signal, by what the shadow trains."""
    record_run(cluster, 8)

    def third(group: Group) -> bool:
        return int(group.group_id[-1]) % 3 == 0

    whole = Merged(cluster, batch_size=1, no_signal=third)
    granted = [(p, o) for first in (0, 4) for p in (0, 1) for o in range(first, first + 4)]
    assert whole.places == [p for p in granted if p[1] % 3 and p not in PASSED_OVER]
    assert whole.counts.dropped_by_reason == {"malformed": 1, "filtered": 5}
    reasons: dict[str, str] = {}
    for step in whole.steps:
        reasons |= drop_reasons(as_step(step))
    listed = {(int(g.split("/")[-2]), int(g[-1])): why for g, why in reasons.items()}
    filtered = dict.fromkeys([(0, 0), (0, 6), (1, 0), (1, 3), (1, 6)], "filtered")
    assert listed == filtered | {UNTRAINABLE: "malformed"}
    state, later = whole.steps[1].snapshot, whole.steps[2:]
    again = Merged(cluster, recovered(state, as_step(later[0])), batch_size=1, no_signal=third)
    assert [(s.step, s.records, s.snapshot) for s in again.steps] == [
        (s.step, s.records, s.snapshot) for s in later[1:]
    ]


def test_under_other_settings_it_repeats_its_steps_and_then_drops_what_had_arrived(
    cluster: Cluster,
) -> None:
    log = RecordedLog(cluster)
    log.grant(0, 8)
    log.end(1, 7, 6, 5, 4, 3, 1, 0)  # all but the damaged one
    log.end(1, 2)
    steps = Merged(cluster, batch_size=1).steps
    state, repeated = steps[0].snapshot, as_step(steps[1])
    arrived = {entry.group_id for entry in state.open if entry.coordinate is not None}
    assert {group_id[-3:] for group_id in arrived} == {"1/1", "1/3", "1/4", "1/5", "1/6", "1/7"}

    def odd(group: Group) -> bool:
        return int(group.group_id[-1]) % 2 == 1

    again = Merged(
        cluster,
        recovered(state, repeated),
        batch_size=1,
        no_signal=odd,
        untrainable=lambda group: "it is the sixth" if group.group_id[-1] == "6" else None,
    )
    assert again.places == [(1, 4)], "1/1 was trained, 1/3, 1/5 and 1/7 are filtered"
    assert again.counts.dropped_by_reason == {"filtered": 3, "malformed": 1}
    letters = read_all(cluster, cluster.topic("dead-letters"), range(PARTITIONS))
    assert letters[-1].value == encode_group(recorded_group(cluster, 1, 6))


def as_step(step: StepInput) -> Manifest:
    return msgspec.structs.replace(
        manifest(step), dropped=step.dropped, metrics=metrics(step.actions)
    )
