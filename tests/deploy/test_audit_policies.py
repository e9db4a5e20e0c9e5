"""What the audit makes of a staleness policy: its bound as the log says it, masks, cancels, and
grants only where they follow from the log."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from connectors.records import Cancel, Version
from deploy.audit import audit
from deploy.audit_text import as_json, audit_lines
from deploy.findings import Violation
from operators.staleness import policy
from operators.staleness.deadline import Deadline
from tests.deploy.history import Log, announcement, closed, group, group_id, manifest
from trainer.overdue import recorded
from trainer.staleness import policy_settings


def two_old() -> Log:
    """Step 3 trains a group whose tokens are of version 0 and 1, and one of version 2: of a token
    that is two steps old, where the bound is 1."""
    log = Log()
    log.policy[3] = announcement(2, (4, 4))
    log.terminals[5:] = [group(1, 2, 0, 1), group(1, 3, 2)]
    log.steps.append((3, manifest(3, group(1, 2, 0, 1), group(1, 3, 2))))
    return log


VIOLATED = [Violation(group_id=group_id(1, 2), step=3, staleness=2)]


def settle(log: Log, **settings: float | str) -> None:
    """The last step says these settings."""
    offset, last = log.steps[-1]
    log.steps[-1] = (offset, msgspec.structs.replace(last, settings=settings))


def test_a_masked_token_was_not_trained_however_old_it_is() -> None:
    log = two_old()
    assert audit(log.history()).bound_violations == VIOLATED
    settle(log, **recorded({Version(0, 0): 0.0}))
    assert audit(log.history()).ok
    settle(log, **recorded({Version(0, 0): 0.5}))
    assert audit(log.history()).bound_violations == VIOLATED, "less weight is no mask"


@pytest.mark.parametrize(
    ("name", "parameters", "violated"),
    [
        ("deadline", {"bound": 2}, False),
        ("deadline", {"bound": 1, "lookahead": 1}, True),
        ("deadline", {"bound": 1, "lookahead": 1, "at_deadline": "reweight"}, False),
        ("slime", {"num_engines": 1, "n_samples_per_prompt": 1}, False),
    ],
)
def test_a_step_is_held_to_the_bound_it_was_trained_under(
    name: str, parameters: dict[str, int | str], violated: bool
) -> None:
    log = two_old()
    settle(log, **policy_settings(policy(name, **parameters)))
    assert audit(log.history()).bound_violations == (VIOLATED if violated else [])


def test_grants_that_hang_on_more_than_the_log_shows_are_not_checked_and_that_is_said() -> None:
    log = Log()
    log.policy[2:] = [announcement(1, (4, 4), closed=(group_id(0, 1),)), announcement(2, (4, 4))]
    assert [o.offset for o in audit(log.history()).overgrants] == [2]
    log.strategy = policy("psrl-roc", staleness=1, staleness_buffer_entries=2)  # type: ignore[assignment]
    found = audit(log.history())
    assert found.ok
    said = as_json(found)
    assert (said["grants_checked"], said["bound_checked"]) == (False, True)
    assert any(line.startswith("grants not checked") for line in audit_lines(said))
    log.strategy = policy("slime", num_engines=1, n_samples_per_prompt=1)  # type: ignore[assignment]
    said = as_json(audit(log.history()))
    assert (said["grants_checked"], said["bound_checked"]) == (False, False)
    assert any(line.startswith("staleness not checked") for line in audit_lines(said))


def test_a_group_that_is_put_back_has_the_bound_of_its_second_start() -> None:
    log = Log()
    log.terminals = [t for t in log.terminals if t.group_id != group_id(0, 1)]
    log.policy[2:] = [announcement(1, (3, 2)), announcement(2, (3, 3))]
    assert list(audit(log.history()).lost) == [group_id(0, 1)]
    again = Cancel(group_id(0, 1), "requeue", "stale")
    log.policy[2] = announcement(1, (3, 2), cancels=(again,))
    assert audit(log.history()).ok
    log.policy[2] = announcement(1, (3, 2), cancels=(Cancel(group_id(0, 1), "close", "stale"),))
    assert list(audit(log.history()).lost) == [group_id(0, 1)], "it never closed"


def test_a_policy_that_drops_what_is_too_old_has_lost_none_of_its_old_groups() -> None:
    log = Log()
    log.terminals = [t for t in log.terminals if t.group_id != group_id(0, 1)]
    log.policy[2:] = [announcement(1, (3, 2)), announcement(2, (3, 3))]
    waits: dict[str, bool] = {"wait": True, "drop": False, "mask": False}
    for at_deadline, is_lost in waits.items():
        log.strategy = Deadline(bound=1, lookahead=1, at_deadline=at_deadline, decay=0.9)  # type: ignore[arg-type, assignment]
        assert bool(audit(log.history()).lost) == is_lost, at_deadline
    log.strategy = policy("verl-drop", max_off_policy_threshold=2)  # type: ignore[assignment]
    assert audit(log.history()).ok


def test_a_cancel_of_what_was_never_granted_is_found() -> None:
    log = Log()
    log.policy[2] = announcement(
        1, (3, 3), closed=(group_id(0, 1),), cancels=(Cancel(group_id(0, 99), "close", "stale"),)
    )
    assert audit(log.history()).ungranted == [group_id(0, 99)]


def test_closed_groups_are_counted_by_what_their_terminals_say() -> None:
    log = Log()
    log.terminals[2] = replace(closed(0, 1), reason="stale")
    log.terminals[4] = replace(closed(0, 2), reason="cancelled")
    log.steps.pop()
    log.policy.pop()
    found = audit(log.history())
    assert found.ok
    assert as_json(found)["closed_by_reason"] == {"stale": 1, "cancelled": 1}
