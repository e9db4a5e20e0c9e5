"""The audit finds each kind of violation in a log that was made wrong on purpose, and nothing in
one that is right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.records import Group, Origin, Prompt, Segment, Trajectory, Version
from deploy.audit import Terminal, Violation, audit
from deploy.audit_log import as_json, audit_lines, oldest_trained
from deploy.history import Grants
from tests.deploy.history import Log, announcement, begin, closed, group, group_id, manifest


def test_a_right_log_passes_and_counts_add_up() -> None:
    found = audit(Log().history())
    assert found.ok
    assert found.groups == {
        "granted": 7, "trained": 4, "closed": 1, "dropped": 0, "open": 2, "duplicates": 0,
    }  # fmt: skip
    assert found.credit_balance == 0
    assert found.digest_chain_ok
    assert audit_lines(as_json(found))[-1] == "audit ok"


def test_a_granted_group_that_never_ended_is_lost_once_its_bound_has_passed() -> None:
    log = Log()
    log.terminals = [t for t in log.terminals if t.group_id != group_id(0, 1)]
    # Granted at version 0 with bound 1; the open step trains at version 2.
    assert audit(log.history()).lost == [group_id(0, 1)]
    log.bound = 2
    assert audit(log.history()).ok
    log.bound = None
    assert audit(log.history()).ok


def test_a_group_trained_in_two_steps_is_found() -> None:
    log = Log()
    log.steps[2] = (2, manifest(2, group(1, 1, 0), group(0, 0, 0)))
    found = audit(log.history())
    assert found.trained_twice == [group_id(0, 0)]
    assert not found.ok


def test_a_group_trained_twice_in_one_step_is_found() -> None:
    log = Log()
    log.steps[1] = (1, manifest(1, group(0, 0, 0), group(0, 0, 0)))
    assert audit(log.history()).trained_twice == [group_id(0, 0)]


def test_a_group_closed_and_trained_breaks_the_balance() -> None:
    log = Log()
    log.steps[2] = (2, manifest(2, group(1, 1, 0), group(0, 2, 1), closed(0, 1)))
    found = audit(log.history())
    assert found.settled_twice == [group_id(0, 1)]
    assert found.credit_balance == -1


def test_a_group_trained_without_a_grant_breaks_the_balance() -> None:
    log = Log()
    extra = group(1, 9, 1)
    log.terminals.append(extra)
    log.steps[2] = (2, manifest(2, group(1, 1, 0), group(0, 2, 1), extra))
    found = audit(log.history())
    assert found.ungranted == [extra.group_id]
    assert found.credit_balance == -1


def test_a_record_that_closes_what_nobody_granted_settles_nothing() -> None:
    log = Log()
    before = audit(log.history())
    log.terminals.append(closed(1, 9))
    found = audit(log.history())
    assert found.groups["closed"] == before.groups["closed"]
    assert found.ok


def test_an_announced_version_that_no_step_made_is_found() -> None:
    log = Log()
    log.steps.pop()  # the last manifest
    found = audit(log.history())
    assert any("was announced; the last step makes" in line for line in found.chain_breaks)


def test_a_limit_that_fell_is_found() -> None:
    log = Log()
    log.announcements.append(announcement(2, (3, 3)))
    assert any("a limit fell" in line for line in audit(log.history()).chain_breaks)


@pytest.mark.parametrize("change", [{"crc": 7}, {"offset": 5}, {"partition": 1}])
def test_a_manifest_whose_record_is_not_in_the_log_as_it_says_is_found(
    change: dict[str, int],
) -> None:
    log = Log()
    log.terminals[0] = replace(log.terminals[0], **change)  # type: ignore[arg-type]
    assert audit(log.history()).lost == [group_id(0, 0)]


def test_a_trained_record_that_is_missing_is_lost() -> None:
    log = Log()
    del log.terminals[0]
    found = audit(log.history())
    assert found.lost == [group_id(0, 0)]
    assert found.credit_balance == 0


def test_a_trained_record_that_retention_removed_is_not_lost() -> None:
    log = Log()
    del log.terminals[0]
    assert audit(replace(log.history(), trajectory_starts={0: 1, 1: 0})).ok


def test_training_a_second_copy_of_a_group_is_found() -> None:
    log = Log()
    copy = replace(log.terminals[0], offset=90, crc=5)
    log.terminals.append(copy)
    assert audit(log.history()).groups["duplicates"] == 1
    log.steps[1] = (1, manifest(1, copy, group(1, 0, 0)))
    assert audit(log.history()).lost == [group_id(0, 0)]


def test_a_token_older_than_the_bound_is_found() -> None:
    log = Log()
    log.terminals[4] = group(0, 2, 0)  # trained by step 2, which trains at version 1
    log.bound = 0
    found = audit(log.history())
    assert [(v.group_id, v.step, v.staleness) for v in found.bound_violations] == [
        (group_id(1, 1), 2, 1),
        (group_id(0, 2), 2, 1),
    ]
    assert not found.ok


def test_a_token_from_a_version_that_did_not_exist_yet_is_found() -> None:
    log = Log()
    log.terminals[4] = group(0, 2, 5)
    assert audit(log.history()).bound_violations == [
        Violation(group_id=group_id(0, 2), step=2, staleness=-4)
    ]


def test_a_broken_digest_chain_is_found() -> None:
    log = Log()
    log.steps[2] = (2, manifest(2, group(1, 1, 0), group(0, 2, 1), digest_before="ab"))
    found = audit(log.history())
    assert not found.digest_chain_ok
    assert "step 2 starts from ab" in found.chain_breaks[0]


def test_a_missing_step_is_found() -> None:
    log = Log()
    del log.steps[1]
    assert audit(log.history()).chain_breaks[0].startswith("the first step is 2")


def test_weights_announced_under_another_digest_are_found() -> None:
    log = Log()
    log.announcements[1] = announcement(1, (3, 3), drop_before=None)
    assert audit(log.history()).digest_chain_ok
    wrong = announcement(1, (3, 3))
    log.announcements[1] = type(wrong)(epoch=0, version=Version(0, 1), digest="x", limits=(3, 3))
    assert "announced with x" in audit(log.history()).chain_breaks[0]


def test_a_skipped_step_that_changed_the_weights_is_found() -> None:
    log = Log()
    log.steps[1] = (1, manifest(1, group(0, 0, 0), group(1, 0, 0), skipped="nan_gradient"))
    assert "changed the weights" in audit(log.history()).chain_breaks[0]


def test_a_fenced_trainers_manifest_does_not_count() -> None:
    log = Log()
    zombie = manifest(3, group(1, 2, 1))  # epoch 0, after a newer begin
    successor = manifest(3, group(1, 2, 1), epoch=3)
    log.steps += [(3, begin(2)), (4, zombie), (5, successor)]
    found = audit(log.history())
    assert found.ok
    assert found.groups["trained"] == 5


def test_a_step_written_again_by_a_new_trainer_is_found() -> None:
    log = Log()
    log.steps += [(3, begin(1)), (4, manifest(2, group(1, 2, 1), epoch=3))]
    assert audit(log.history()).chain_breaks[0].startswith("step 2 at offset 4 follows step 2")


def test_a_dropped_group_is_settled_by_the_manifest_that_names_it() -> None:
    log = Log()
    log.steps.append((3, manifest(3, group(1, 2, 1), dropped=(group_id(0, 1),))))
    log.terminals[2] = group(0, 1, 0)
    found = audit(log.history())
    assert found.ok
    assert found.groups["dropped"] == 1


def test_a_dropped_group_is_settled_by_the_announcement_that_counts_its_refund() -> None:
    log = Log()
    log.terminals[2] = group(0, 1, 0)
    assert audit(log.history()).lost == [group_id(0, 1)]
    log.announcements.append(announcement(2, (4, 3), closed=(group_id(0, 1),)))
    found = audit(log.history())
    assert found.ok
    assert found.groups["dropped"] == 1


def test_a_refund_of_a_closed_group_is_not_counted_as_a_drop() -> None:
    log = Log()
    log.announcements.append(announcement(2, (4, 3), closed=(group_id(0, 1),)))
    found = audit(log.history())
    assert (found.ok, found.groups["closed"], found.groups["dropped"]) == (True, 1, 0)


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
    prompt = Prompt(task="a", prompt="x")
    made = Group(group_id="t/0/0", prompt=prompt, trajectories=(trajectory,))
    assert made.oldest == Version(0, 1)
    assert oldest_trained(made) == Version(0, 3)
    masked = replace(trajectory, loss_mask=np.zeros(6, np.int8))
    assert oldest_trained(replace(made, trajectories=(masked,))) is None


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=8))
def test_each_granted_prompt_has_the_version_of_the_first_announcement_above_it(
    raises: list[tuple[int, int]],
) -> None:
    grants, limits = Grants(), (0, 0)
    expected: dict[tuple[int, int], int] = {}
    for number, (a, b) in enumerate(raises):
        limits = (max(limits[0], a), max(limits[1], b))
        grants.observe(announcement(number, limits))
        for partition in (0, 1):
            for offset in range(limits[partition]):
                expected.setdefault((partition, offset), number)
    assert {(p, o): v.number for p, o, v in grants} == expected
    assert grants.num_granted == len(expected)
    assert all((p, o) in grants for p, o in expected)
    assert (0, limits[0]) not in grants


@given(st.data())
def test_removing_any_terminal_or_step_of_a_right_log_never_passes_unseen_when_it_matters(
    data: st.DataObject,
) -> None:
    log = Log(bound=0)
    log.terminals = [group(p, o, o) for o in range(4) for p in (0, 1)]
    log.announcements = [announcement(n, (n + 1, n + 1)) for n in range(5)]
    log.steps = [(0, begin())] + [
        (n + 1, manifest(n + 1, group(0, n, n), group(1, n, n))) for n in range(4)
    ]
    assert audit(log.history()).ok
    terminals: list[Terminal] = list(log.terminals)
    if data.draw(st.booleans()):
        terminals.pop(data.draw(st.integers(0, len(terminals) - 1)))
        log.terminals = terminals
        assert len(audit(log.history()).lost) == 1
    else:
        log.steps.pop(data.draw(st.integers(1, 3)))  # not the last: then the run is just shorter
        assert not audit(log.history()).ok
