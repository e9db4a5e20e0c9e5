"""The audit finds each kind of violation in a log that was made wrong on purpose, says whose it is,
and finds nothing in one that is right."""

from __future__ import annotations

from dataclasses import fields, replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.records import Fork, Group, Origin, Prompt, Segment, Trajectory, Version
from deploy.audit import audit
from deploy.audit_log import trained_versions
from deploy.audit_text import as_json, audit_lines, unprovable
from deploy.findings import PAUSE_S, Activity, Audit, Overgrant, Terminal, Violation
from operators.staleness.n_step_off import NStepOff
from tests.deploy.history import (
    Log,
    announcement,
    begin,
    closed,
    digest,
    group,
    group_id,
    manifest,
    rollback,
    rolled_back,
)

VIOLATIONS = (
    "lost", "trained_twice", "settled_twice", "ungranted", "excluded_trained", "wrong_records",
    "bound_violations", "overgrants", "chain_breaks",
)  # fmt: skip


def only(name: str, log: Log) -> Audit:
    """The audit of a log in which exactly one kind of invariant is broken."""
    found = audit(log.history())
    assert [kind for kind in VIOLATIONS if getattr(found, kind)] == [name]
    assert not found.ok
    assert audit_lines(as_json(found))[-1] == "audit FAILED"
    return found


# ------------------------------------------------------------------------------------ a right log
def test_a_right_log_passes_and_counts_add_up() -> None:
    found = audit(Log().history())
    assert found.ok
    assert found.groups == {
        "granted": 7, "trained": 4, "closed": 1, "dropped": 0, "open": 2, "scoring": 0,
        "duplicates": 0,
    }  # fmt: skip
    assert (found.credit_balance, found.digest_chain_ok) == (0, True)
    assert (found.from_step, found.to_step) == (1, 2)
    assert audit_lines(as_json(found))[-1] == "audit ok"


def test_what_a_step_lists_as_dropped_is_counted_by_the_reason_it_says() -> None:
    log = Log()
    said = {"staleness/drops/filtered": 1.0}
    dropping = manifest(2, group(1, 1, 0), group(0, 2, 1), dropped=(group_id(1, 2),), metrics=said)
    log.steps[2] = (2, dropping)
    found = audit(log.history())
    assert found.ok
    assert (found.groups["dropped"], found.groups["open"]) == (1, 1)
    assert found.dropped_by_reason == {"filtered": 1}
    assert "dropped, as the steps list them: filtered 1" in audit_lines(as_json(found))


def test_every_kind_of_finding_is_in_the_answer() -> None:
    said = as_json(Audit())
    assert {f.name for f in fields(Audit)} - said.keys() == {"num_void"}
    assert unprovable("gone").keys() == said.keys()
    assert audit_lines(unprovable("gone")) == ["cannot be proven: gone", "audit FAILED"]


def test_a_run_without_a_step_is_said_to_have_none() -> None:
    began = Log(policy=[begin(epoch=0)], steps=[(0, begin())], terminals=[])
    lines = audit_lines(as_json(audit(began.history())))
    assert (lines[0], lines[-1]) == ("no step yet", "audit ok")


# ------------------------------------------------------------------------------------------- lost
def test_a_granted_group_that_never_ended_is_lost_once_its_bound_has_passed() -> None:
    log = Log()
    log.terminals = [t for t in log.terminals if t.group_id != group_id(0, 1)]
    log.policy[2] = announcement(1, (3, 2))
    log.policy[3] = announcement(2, (3, 3))
    # Granted at version 0 with bound 1; version 2 is announced.
    assert only("lost", log).lost == {
        group_id(0, 1): "granted at version 0.0, 2 steps before 0.2, and never ended; it has no "
        "terminal"
    }
    log.strategy = NStepOff(2)
    assert audit(log.history()).ok
    log.strategy.bound = None
    assert audit(log.history()).ok


def test_a_scored_group_that_the_feed_forgot_is_lost() -> None:
    log = Log()
    log.terminals[2] = group(0, 1, 0)
    log.policy[2] = announcement(1, (3, 2))
    log.policy[3] = announcement(2, (3, 3))
    assert only("lost", log).lost == {
        group_id(0, 1): "arrived with tokens of version 0.0, 2 steps before 0.2, and never ended; "
        "it was not trained"
    }
    log.terminals[2] = group(0, 1, 1)  # granted at 0, but begun at 1: it may be trained now
    assert audit(log.history()).ok


def test_a_generated_group_that_is_not_scored_while_many_others_are_is_lost() -> None:
    log = Log()
    log.rollouts = {(0, 3): 50.0}  # open, no terminal
    found = audit(log.history())
    assert (found.ok, found.groups["scoring"]) == (True, 1)
    scored = [replace(closed(0, 1), offset=10 + k, written_at=50.0 + 9 * k) for k in range(13)]
    log.terminals += scored  # second ends of a group: the stage was at work all the time
    assert list(only("lost", log).lost) == [group_id(0, 3)]
    log.terminals[-6:] = [replace(t, written_at=t.written_at + 500.0) for t in scored[-6:]]
    assert audit(log.history()).ok  # it stood still in between: nobody knows how long it worked


def test_only_time_at_work_counts() -> None:
    activity = Activity()
    for at in (0.0, 5.0, 10.0, 10.0 + PAUSE_S, 100.0, 104.0):
        activity.add(at)
    assert activity.since(0.0) == 24.0
    assert activity.since(15.0) == 9.0
    assert activity.since(102.0) == 2.0
    assert activity.since(200.0) == 0.0


# ------------------------------------------------------------------------------- trained, settled
def test_a_group_trained_in_two_steps_is_found() -> None:
    log = Log()
    log.steps[2] = (2, manifest(2, group(1, 1, 0), group(0, 0, 0)))
    assert only("trained_twice", log).trained_twice == [group_id(0, 0)]


def test_a_group_trained_twice_in_one_step_is_found() -> None:
    log = Log()
    log.steps[2] = (2, manifest(2, group(1, 1, 0), group(1, 1, 0)))
    assert only("trained_twice", log).trained_twice == [group_id(1, 1)]


def test_a_group_closed_and_trained_breaks_the_balance() -> None:
    log = Log()
    log.steps[2] = (2, manifest(2, group(1, 1, 0), closed(0, 1)))
    found = only("settled_twice", log)
    assert found.settled_twice == [group_id(0, 1)]
    assert found.credit_balance == -1


def test_a_group_that_is_dropped_after_it_was_trained_is_found() -> None:
    log = Log()
    log.steps[2] = (2, manifest(2, group(1, 1, 0), group(0, 2, 1), dropped=(group_id(0, 0),)))
    found = only("settled_twice", log)
    assert (found.settled_twice, found.credit_balance) == ([group_id(0, 0)], -1)


def test_a_group_trained_without_a_grant_breaks_the_balance() -> None:
    log = Log()
    extra = group(1, 9, 1)
    log.steps[2] = (2, manifest(2, group(1, 1, 0), extra))
    found = only("ungranted", log)
    assert (found.ungranted, found.credit_balance) == ([extra.group_id], -1)


def test_a_group_trained_before_it_was_granted_is_found() -> None:
    log = Log()
    log.steps[2] = (2, manifest(2, group(1, 1, 0), group(0, 3, 1)))  # granted with version 2
    assert only("ungranted", log).ungranted == [group_id(0, 3)]


def test_an_end_of_what_nobody_granted_is_found_and_settles_nothing() -> None:
    log = Log()
    before = audit(log.history())
    log.terminals.append(closed(1, 9))
    found = only("ungranted", log)
    assert found.ungranted == [group_id(1, 9)]
    assert found.groups == before.groups


def test_records_that_are_none_of_the_runs_are_named_and_settle_nothing() -> None:
    log = Log()
    foreign = replace(closed(0, 3), group_id="other/0/3", offset=3)
    broken = replace(group(1, 2), kind="corrupt", offset=8, error="no whole group")
    log.terminals += [foreign, broken]
    found = audit(log.history())
    assert found.ok
    assert found.unreadable == [
        "trajectories/0/3: other/0/3 is no group of this run",
        f"trajectories/1/8 ({group_id(1, 2)}): no whole group",
    ]
    assert any("unreadable" in line for line in audit_lines(as_json(found)))


@pytest.mark.parametrize("is_read_first", [True, False])
def test_an_unreadable_end_that_was_refunded_is_a_closed_group(is_read_first: bool) -> None:
    log = Log()
    log.terminals[2] = replace(closed(0, 1), kind="corrupt", error="cut")
    if is_read_first:  # as far as step 2 was trained
        log.policy[2:] = [
            announcement(1, (3, 3)), announcement(2, (4, 3), closed=(group_id(0, 1),))
        ]  # fmt: skip
    found = audit(log.history())
    assert (found.ok, found.groups["closed"], found.groups["dropped"]) == (True, 1, 0)
    assert found.closed_by_reason == {"malformed": 1}


# ---------------------------------------------------------------------------------------- records
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"crc": 7}, "with checksum 00000001 was trained, the log holds the group at "
                     "trajectories/0/2 with 00000007"),
        ({"offset": 5}, "trajectories/0/5"),
    ],
)  # fmt: skip
def test_a_manifest_whose_record_is_not_in_the_log_as_it_says_is_found(
    change: dict[str, int], says: str
) -> None:
    log = Log()
    log.steps[2] = (2, manifest(2, group(1, 1, 0), replace(group(0, 2, 1), crc=1)))
    log.terminals[4] = replace(log.terminals[4], **{"crc": 1, **change})  # type: ignore[arg-type]
    found = only("wrong_records", log)
    assert list(found.wrong_records) == [group_id(0, 2)]
    assert says in found.wrong_records[group_id(0, 2)]
    assert found.wrong_records[group_id(0, 2)].startswith("step 2: trajectories/0/2")


def test_a_trained_record_that_is_missing_is_found() -> None:
    log = Log()
    del log.terminals[0]
    found = only("wrong_records", log)
    assert (
        "trajectories/0/0 with checksum 00000000 is not in the log"
        in (found.wrong_records[group_id(0, 0)])
    )
    assert found.credit_balance == 0


def test_training_a_second_copy_of_a_group_is_found() -> None:
    log = Log()
    copy = replace(log.terminals[0], offset=90, crc=5)
    log.terminals.append(copy)
    assert audit(log.history()).groups["duplicates"] == 1
    log.steps[1] = (1, manifest(1, copy, group(1, 0, 0)))
    assert list(only("wrong_records", log).wrong_records) == [group_id(0, 0)]


# ------------------------------------------------------------------------------------------ bound
def test_a_token_older_than_the_bound_is_found() -> None:
    log = Log()
    log.terminals[4] = group(0, 2, 0, 1)  # trained by step 2, which trains at version 1
    log.strategy.bound = 0
    assert audit(log.history()).bound_violations == [
        Violation(group_id=group_id(1, 1), step=2, staleness=1),
        Violation(group_id=group_id(0, 2), step=2, staleness=1),
    ]


def test_a_token_from_a_version_that_did_not_exist_yet_is_found() -> None:
    log = Log()
    log.terminals[4] = group(0, 2, 5)
    assert only("bound_violations", log).bound_violations == [
        Violation(group_id=group_id(0, 2), step=2, staleness=-4)
    ]


def test_only_trained_tokens_count_for_the_bound() -> None:
    trajectory = Trajectory(
        trajectory_id="t/0/0/0",
        group_id="t/0/0",
        task="a",
        tokens=np.arange(6, dtype=np.int32),
        loss_mask=np.array([0, 0, 0, 0, 1, 1], np.int8),
        logprobs=np.zeros(6, np.float32),
        segments=(Segment(2, 4, 0, 1), Segment(4, 6, 0, 3)),
        origin=Origin("t", 0, 0),
    )
    made = Group(group_id="t/0/0", prompt=Prompt(task="a", prompt="x"), trajectories=(trajectory,))
    assert trained_versions(made) == {Version(0, 3)}
    masked = replace(trajectory, loss_mask=np.zeros(6, np.int8))
    assert trained_versions(replace(made, trajectories=(masked,))) == set()


# ---------------------------------------------------------------------------------------- credits
def test_a_grant_beyond_what_the_policy_allows_is_found_at_its_announcement() -> None:
    log = Log()
    log.policy[1] = announcement(0, (3, 2))  # one-step-off with two groups a step: four at first
    log.policy[2] = announcement(1, (4, 3), closed=(group_id(0, 1),))
    found = only("overgrants", log)
    assert found.overgrants == [
        Overgrant(offset=1, version=Version(0, 0), granted=5, allowed=4),
    ]
    assert found.credit_balance == 0


def test_a_refund_is_granted_again_and_not_twice() -> None:
    log = Log()
    log.policy[2] = announcement(1, (4, 3), closed=(group_id(0, 1),))
    log.policy[3] = announcement(2, (5, 4))
    assert audit(log.history()).ok
    log.policy[3] = announcement(2, (5, 5), closed=(group_id(0, 1),))
    assert [o.offset for o in only("overgrants", log).overgrants] == [3]


def test_grants_begin_where_retention_had_left_the_prompts() -> None:
    log = Log()
    log.prompt_starts = {0: 500, 1: 400}
    log.policy = [begin(epoch=0), announcement(0, (502, 402))]
    log.terminals, log.steps = [], [(0, begin())]
    found = audit(log.history())
    assert (found.groups["granted"], found.groups["open"]) == (4, 4)
    assert found.ok
    log.policy.append(announcement(0, (502, 402), digest="x"))
    assert "announced with x" in only("chain_breaks", log).chain_breaks[0]


# ------------------------------------------------------------------------- versions, limits, chain
def test_an_announced_version_that_no_step_made_is_found() -> None:
    log = Log()
    log.policy.append(announcement(3, (4, 3)))
    assert only("chain_breaks", log).chain_breaks == ["version 0.3 was announced; no step made it"]


def test_weights_announced_under_another_digest_are_found() -> None:
    log = Log()
    log.policy[2] = announcement(1, (3, 3), closed=(group_id(0, 1),), digest="x")
    assert "version 0.1 was announced with x" in only("chain_breaks", log).chain_breaks[0]


def test_a_version_that_is_announced_after_a_later_one_is_found() -> None:
    log = Log()
    log.policy.append(announcement(1, (4, 3)))
    assert "announces version 0.1 after 0.2" in only("chain_breaks", log).chain_breaks[0]


def test_a_limit_that_fell_is_found() -> None:
    log = Log()
    log.policy.append(announcement(2, (3, 3)))
    assert only("chain_breaks", log).chain_breaks == [
        "a limit fell: prompts/0 from 4 to 3 at policy/4"
    ]


def test_a_limit_beyond_the_prompts_is_found() -> None:
    log = Log()
    log.prompt_ends = {0: 4, 1: 2}
    found = audit(log.history())
    assert "policy/2 grants prompts/1 below 3, beyond its end 2" in found.chain_breaks


def test_limits_of_another_number_of_partitions_are_found() -> None:
    log = Log()
    log.policy.append(announcement(2, (4, 3, 1)))
    assert only("chain_breaks", log).chain_breaks == [
        "policy/4 limits 3 partitions of prompts, the run has 2"
    ]


def test_a_broken_digest_chain_is_found() -> None:
    log = Log()
    log.steps[2] = (2, manifest(2, group(1, 1, 0), group(0, 2, 1), digest_before="ab"))
    found = only("chain_breaks", log)
    assert not found.digest_chain_ok
    assert "step 2 starts from ab" in found.chain_breaks[0]


def test_a_missing_step_is_found() -> None:
    log = Log()
    del log.steps[1]
    assert "the first step is 2, not 1" in audit(log.history()).chain_breaks


def test_a_skipped_step_that_changed_the_weights_is_found() -> None:
    log = Log()
    log.steps[2] = (2, manifest(2, group(1, 1, 0), group(0, 2, 1), skipped="nan_gradient"))
    assert "changed the weights" in only("chain_breaks", log).chain_breaks[0]


# ----------------------------------------------------------------------------------------- epochs
def test_a_fenced_trainers_records_do_not_count() -> None:
    log = Log()
    zombie = manifest(3, group(1, 2, 1))  # epoch 0, after a newer begin
    successor = manifest(3, group(1, 2, 1), group(0, 3, 2), epoch=3)
    log.terminals.append(group(0, 3, 2))
    log.steps += [(3, begin(2)), (4, zombie), (5, successor)]
    log.policy += [begin(2, epoch=3), announcement(2, (9, 9))]
    found = audit(log.history())
    assert found.ok
    assert (found.groups["trained"], found.groups["granted"], found.num_void) == (6, 7, 2)


def test_a_manifest_and_an_announcement_of_an_epoch_that_never_began_are_found() -> None:
    log = Log()
    log.steps.append((3, manifest(3, group(1, 2, 1), epoch=7)))
    log.policy.append(announcement(2, (4, 3), epoch=9))
    assert only("chain_breaks", log).chain_breaks == [
        "step 3 at offset 3 names epoch 7, which never began",
        "policy/4 announces in epoch 9, which never began",
    ]


def test_a_step_written_again_by_a_new_trainer_is_found() -> None:
    log = Log()
    log.steps += [(3, begin(1)), (4, manifest(2, group(1, 2, 1), epoch=3))]
    assert audit(log.history()).chain_breaks[0].startswith("step 2 at offset 4 follows step 2")


# ------------------------------------------------------------------------------------------ drops
def test_a_dropped_group_is_settled_by_the_manifest_that_names_it() -> None:
    log = Log()
    log.terminals[2] = group(0, 1, 0)
    log.policy[2] = announcement(1, (3, 2))
    log.policy[3] = announcement(2, (3, 3))
    log.steps[2] = (2, manifest(2, group(1, 1, 0), group(0, 2, 1), dropped=(group_id(0, 1),)))
    log.terminals[4] = group(0, 2, 1)
    found = audit(log.history())
    assert found.groups["dropped"] == 1
    assert group_id(0, 1) not in found.lost


def test_a_dropped_group_is_settled_by_the_announcement_that_counts_its_refund() -> None:
    log = Log()
    log.terminals[2] = group(0, 1, 0)
    found = audit(log.history())
    assert (found.ok, found.groups["closed"], found.groups["dropped"]) == (True, 0, 1)


def test_a_closed_group_that_is_also_listed_as_dropped_is_closed() -> None:
    log = Log()
    log.steps[2] = (2, manifest(2, group(1, 1, 0), group(0, 2, 1), dropped=(group_id(0, 1),)))
    found = audit(log.history())
    assert (found.ok, found.groups["closed"], found.groups["dropped"]) == (True, 1, 0)


# ------------------------------------------------------------------------------------------ forks
def test_steps_that_a_rollback_gave_up_settle_nothing() -> None:
    found = audit(rolled_back().history())
    assert found.ok
    assert found.groups["trained"] == 4
    assert found.given_up == {"steps": 1, "groups": 2}
    assert found.lineage == [{"incarnation": 1, "parent": 0, "number": 1, "reason": "rollback"}]
    lines = audit_lines(as_json(found))
    assert "incarnation 1: goes on from incarnation 0 after step 1" in lines
    assert "given up: 1 steps of 2 groups" in lines


def test_what_only_given_up_steps_trained_is_open_again() -> None:
    log = rolled_back()
    del log.steps[-1], log.policy[-1]
    found = audit(log.history())
    assert found.ok
    assert (found.groups["trained"], found.groups["open"], found.to_step) == (2, 4, 1)


def test_a_trainer_that_has_not_seen_the_rollback_yet_has_lost_nothing() -> None:
    log = rolled_back()
    del log.steps[4:], log.policy[4:]
    found = audit(log.history())
    assert found.ok
    assert found.groups["open"] == 4


def test_a_group_trained_before_and_after_a_rollback_is_trained_twice() -> None:
    log = rolled_back()
    again = manifest(2, group(1, 1, 0), group(0, 0, 0), epoch=4, incarnation=1, digest="new")
    log.steps[-1] = (5, again)
    assert only("trained_twice", log).trained_twice == [group_id(0, 0)]


def test_a_token_of_a_given_up_version_is_as_far_as_the_way_back_and_forth() -> None:
    log = rolled_back()
    log.terminals[4] = group(0, 2, 2)  # by version 0.2, one beyond the fork
    assert audit(log.history()).ok  # (1 - 1) + (2 - 1) = 1
    log.terminals[4] = group(0, 2, 3)
    log.steps.insert(3, (2, manifest(3)))
    assert only("bound_violations", log).bound_violations == [
        Violation(group_id=group_id(0, 2), step=2, staleness=2)
    ]


def test_a_group_that_the_fork_excludes_must_not_be_trained_after_it() -> None:
    log = rolled_back()
    excluded = (group_id(0, 2), group_id(0, 0))
    log.steps[3] = (3, rollback(1, excluded=excluded))
    assert only("excluded_trained", log).excluded_trained == [group_id(0, 2)]


def test_a_fork_from_other_weights_than_its_parent_had_is_found() -> None:
    log = rolled_back()
    log.steps[3] = (3, rollback(1, digest="else"))
    log.policy[6] = announcement(1, (4, 3), epoch=4, incarnation=1, digest="else")
    found = only("chain_breaks", log)
    assert found.chain_breaks == [
        f"incarnation 1 was forked after step 1 with else; that step had left {digest(1)}"
    ]


def test_a_step_that_starts_from_other_weights_than_the_fork_is_found() -> None:
    log = rolled_back()
    log.steps[5] = (5, manifest(2, group(1, 1, 0), group(0, 2, 1), epoch=4, incarnation=1,
                                digest_before="x", digest="new"))  # fmt: skip
    assert only("chain_breaks", log).chain_breaks == [
        f"step 2 starts from x, step 1 ended at {digest(1)}"
    ]


def test_a_rebuild_gives_nothing_up_and_goes_on_from_its_own_weights() -> None:
    log = Log()
    fork = Fork(parent=0, number=2, reason="rebuild")
    rebuilt = begin(0, incarnation=1, fork=fork, digest="other")
    log.terminals.append(group(0, 3, 2))
    log.steps += [
        (3, rebuilt),
        (4, manifest(3, group(1, 2, 1), group(0, 3, 2), epoch=3, incarnation=1,
                     digest_before="other")),
    ]  # fmt: skip
    log.policy += [
        msgspec.structs.replace(rebuilt, epoch=3),
        announcement(2, (4, 4), epoch=3, incarnation=1, digest="other"),
        announcement(3, (5, 4), epoch=3, incarnation=1),
    ]
    found = audit(log.history())
    assert found.ok, found
    assert (found.groups["trained"], found.given_up["steps"]) == (6, 0)
    log.policy[-2] = announcement(2, (4, 4), epoch=3, incarnation=1)
    assert "its step made other" in only("chain_breaks", log).chain_breaks[0]


def test_after_two_rollbacks_each_stretch_was_allowed_what_it_granted() -> None:
    """The second goes further back than the first; each trainer granted with the credits of what
    it knew."""
    log = rolled_back()
    log.steps += [
        (6, rollback(0, parent=1)),
        (7, begin(0, incarnation=2)),
        (8, manifest(1, group(0, 0, 0), group(1, 0, 0), epoch=7, incarnation=2, digest="a")),
        (9, manifest(2, group(1, 1, 0), group(0, 2, 1), epoch=7, incarnation=2,
                     digest_before="a", digest="b")),
    ]  # fmt: skip
    log.policy += [
        rollback(0, parent=1, epoch=6),
        begin(0, epoch=7, incarnation=2),
        announcement(0, (4, 4), epoch=7, incarnation=2),
        announcement(1, (4, 4), epoch=7, incarnation=2, digest="a"),
        announcement(2, (4, 5), epoch=7, incarnation=2, digest="b"),
    ]
    found = audit(log.history())
    assert found.overgrants == []
    assert found.given_up == {"steps": 3, "groups": 6}
    assert (found.groups["trained"], found.trained_twice) == (4, [])
    log.policy[-2] = announcement(1, (4, 5), epoch=7, incarnation=2, digest="a")
    assert [(o.granted, o.allowed) for o in audit(log.history()).overgrants] == [(1, 0)]


# ------------------------------------------------------------------------------------- properties
@given(st.data())
def test_removing_any_terminal_or_step_of_a_right_log_never_passes_unseen_when_it_matters(
    data: st.DataObject,
) -> None:
    log = Log(strategy=NStepOff(0))
    log.terminals = [group(p, o, o) for o in range(4) for p in (0, 1)]
    log.policy = [begin(epoch=0), *(announcement(n, (n + 1, n + 1)) for n in range(5))]
    log.steps = [(0, begin())] + [
        (n + 1, manifest(n + 1, group(0, n, n), group(1, n, n))) for n in range(4)
    ]
    assert audit(log.history()).ok
    terminals: list[Terminal] = list(log.terminals)
    if data.draw(st.booleans()):
        terminals.pop(data.draw(st.integers(0, len(terminals) - 1)))
        log.terminals = terminals
        assert len(only("wrong_records", log).wrong_records) == 1
    else:
        log.steps.pop(data.draw(st.integers(1, 4)))
        assert not audit(log.history()).ok
