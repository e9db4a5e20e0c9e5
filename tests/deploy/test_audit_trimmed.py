"""Audit and status of a log whose beginning is gone: they go on from the oldest checkpoint that is
kept, say so, and never take what is gone for lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from connectors.kafka.client import Cluster
from connectors.run_dir import RunDir
from deploy import errors
from deploy.audit_log import audit_run
from deploy.audit_text import as_json
from deploy.base import Unprovable
from deploy.cli import main
from deploy.status import RunStatus
from deploy.view import status_lines
from tests.deploy.written_log import WrittenLog, write_example
from trainer import actions


@pytest.fixture
def log(cluster: Cluster, tmp_path: Path) -> WrittenLog:
    """The example with a checkpoint of step 2, and three more steps after it. Of the checkpoint's
    time: one group closed, one scored and waiting."""
    log = write_example(cluster, tmp_path)
    log.score(1, 2, 1)
    log.announce(2, 4, 4, closed=(log.group_id(0, 1),))
    log.checkpoint()
    log.score(0, 3, 2)
    log.step(3, (1, 2), (0, 3), reward=1.0)
    log.announce(3, 5, 5)
    log.score(1, 3, 2)
    log.close(0, 4, "time_cap")
    log.score(1, 4, 3)
    log.step(4, (1, 3), (1, 4), reward=1.0)
    log.announce(4, 5, 5, closed=(log.group_id(0, 4),))
    return log


def trim(log: WrittenLog) -> None:
    """What the checkpoint of step 2 does not need: all before its waiting group (1, 2), whose
    record is the third of its partition, and before the manifest of step 3."""
    log.trim(trajectories={0: 3, 1: 2}, rollouts={0: 3, 1: 3}, steps={0: 3})


def audited(log: WrittenLog) -> dict[str, Any]:
    return as_json(audit_run(log.config, RunDir(log.folder), log.cluster))


def read_status(log: WrittenLog) -> dict[str, Any]:
    status = RunStatus(log.config, RunDir(log.folder), log.cluster)
    try:
        return status.read()
    finally:
        status.close()


def test_the_audit_of_a_trimmed_log_counts_what_the_whole_one_did(log: WrittenLog) -> None:
    whole = audited(log)
    assert whole["ok"], whole
    assert (whole["from_step"], whole["to_step"]) == (1, 4)
    trim(log)
    found = audited(log)
    assert found["ok"], found
    assert (found["from_step"], found["to_step"]) == (3, 4)
    assert found["groups"] == whole["groups"]
    assert found["groups"]["trained"] == 8


def test_the_status_of_a_trimmed_log_counts_what_the_whole_one_did(log: WrittenLog) -> None:
    whole = read_status(log)
    trim(log)
    found = read_status(log)
    for key in ("step", "version", "groups", "closed_by_reason", "lag"):
        assert found[key] == whole[key], key
    assert (whole["from_step"], found["from_step"], found["incomplete"]) == (1, 3, None)
    assert found["tokens"]["trained"] == whole["tokens"]["trained"] - 200
    assert found["tokens"]["generated"] == whole["tokens"]["generated"] - 24  # of steps 1 and 2
    lines = status_lines(found)
    assert [line.split()[0] for line in lines if line.endswith("(from step 3 on)")] == [
        "staleness", "tokens", "seconds", "waiting",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines if line.endswith("(of the whole run)")] == [
        "groups", "closed", "eval",
    ]  # fmt: skip


def test_what_was_dropped_before_the_checkpoint_is_what_it_is_in_the_whole_log(
    cluster: Cluster, tmp_path: Path
) -> None:
    """(0, 3) was dropped ready. Of those that still ran, two close afterwards and one is scored;
    (1, 2) is open before settled ones."""
    log = write_example(cluster, tmp_path)
    log.announce(2, 5, 5)
    log.score(1, 2, 1)
    log.score(0, 3, 2)
    for place in ((0, 4), (1, 3)):
        log.ledger.drop(log.group_id(*place), "filtered")
    ended = [(0, 1), (0, 3), (0, 4), (1, 3), (1, 4)]
    log.announce(2, 5, 5, closed=tuple(log.group_id(*place) for place in ended))
    log.checkpoint()
    state = log.ledger.snapshot()
    assert state.settled == ((), ((3, 5),))
    assert state.counts.dropped_by_reason == {"stale": 1, "filtered": 2}
    assert state.dropped, "no step has listed them yet"
    log.close(1, 3, "cancelled")
    log.close(0, 4, "time_cap")
    log.score(1, 4, 2)
    listed = {"staleness/drops/filtered": 2.0, "staleness/drops/stale": 1.0}
    dropped = actions.listed(state.dropped)
    log.step(3, (1, 2), reward=1.0, dropped=dropped, metrics=listed)
    whole = audited(log), read_status(log)
    trim(log)
    for before, after in zip(whole, (audited(log), read_status(log)), strict=True):
        assert before["closed_by_reason"] == {"reward_nan": 1, "cancelled": 1, "time_cap": 1}
        assert after["closed_by_reason"] == before["closed_by_reason"]
        assert after["groups"] == before["groups"]
        assert before.get("dropped_by_reason") == after.get("dropped_by_reason")
        assert [after["groups"][how] for how in ("closed", "dropped", "open")] == [3, 2, 0]


def test_what_broke_after_the_checkpoint_is_found_in_a_trimmed_log(log: WrittenLog) -> None:
    trim(log)
    log.score(0, 0, 3)  # trained in step 1, whose manifest is gone
    log.step(5, (0, 0), (1, 3), reward=0.0)
    found = audited(log)
    assert found["settled_twice"] == [log.group_id(0, 0)]
    assert found["trained_twice"] == [log.group_id(1, 3)]


def test_tokens_that_waited_in_the_checkpoint_are_bounded_too(
    cluster: Cluster, tmp_path: Path
) -> None:
    log = write_example(cluster, tmp_path)
    log.score(1, 2, 0)  # granted at version 1: its engine broke the promise
    log.announce(2, 4, 4, closed=(log.group_id(0, 1),))
    log.checkpoint()
    log.score(0, 3, 2)
    log.step(3, (1, 2), (0, 3), reward=1.0)
    trim(log)
    assert audited(log)["bound_violations"] == [
        {"group_id": log.group_id(1, 2), "step": 3, "staleness": 2}
    ]


def test_without_a_checkpoint_a_trimmed_log_proves_nothing(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_example(cluster, tmp_path)
    log.trim(trajectories={0: 1})
    file = RunDir(log.folder).config_file
    file.write_text(tomli_w.dumps(log.config.model_dump(exclude_none=True)))
    assert main(["audit", str(log.folder), "--json"]) == errors.NOT_VERIFIED
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["lost"], found["digest_chain_ok"]) == (False, [], False)
    assert "trajectories/0 before 1 any more" in found["unprovable"]
    assert "there is none" in found["unprovable"]
    status = read_status(log)
    assert status["incomplete"] == found["unprovable"]
    assert any("INCOMPLETE" in line for line in status_lines(status))


@pytest.mark.parametrize(
    ("gone", "says"),
    [
        ({"trajectories": {1: 3}}, "step 2: trajectories/1 is needed from 2, it starts at 3"),
        ({"steps": {0: 4}}, "step 2: it is not on the chain, or the steps after it are gone"),
    ],
)
def test_what_the_checkpoint_needs_and_retention_passed_is_named(
    gone: dict[str, dict[int, int]], says: str, log: WrittenLog
) -> None:
    log.trim(**gone)
    with pytest.raises(Unprovable, match=says):
        audited(log)


def test_a_rollback_is_known_to_a_trimmed_log(log: WrittenLog) -> None:
    """Steps 3 and 4 are given up; what they trained is open again, one of it excluded."""
    log.rollback(2, log.group_id(1, 4))
    log.announce(2, 5, 5, closed=(log.group_id(0, 4), log.group_id(1, 4)))
    log.step(3, (1, 2), (0, 3), reward=1.0)
    whole = audited(log)
    assert whole["ok"], whole
    assert whole["given_up"] == {"steps": 2, "groups": 4}
    trim(log)
    found = audited(log)
    assert found["ok"], found
    assert (found["groups"], found["given_up"]) == (whole["groups"], whole["given_up"])
    assert found["groups"] == {
        "granted": 10, "trained": 6, "closed": 2, "dropped": 1, "open": 1, "scoring": 0,
        "duplicates": 0,
    }  # fmt: skip
    log.step(4, (1, 3), (1, 4), reward=1.0)
    assert audited(log)["excluded_trained"] == [log.group_id(1, 4)]
