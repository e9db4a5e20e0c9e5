"""status, audit and prompts load against a real broker with a log written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from connectors.kafka.client import Cluster, read_all
from connectors.records import Coordinate
from connectors.run_dir import RunDir
from deploy import errors
from deploy.audit_log import audit_run
from deploy.audit_text import as_json
from deploy.base import Unprovable
from deploy.cli import main
from deploy.status import RunStatus
from deploy.view import plain_line, status_lines
from tests.deploy.written_log import TOPICS, WrittenLog, write_example

STATUS_KEYS = {
    "run", "step", "version", "policy", "groups", "closed_by_reason", "staleness", "tokens",
    "seconds", "eval", "lag", "roles",
}  # fmt: skip


@pytest.fixture
def log(cluster: Cluster, tmp_path: Path) -> WrittenLog:
    return write_example(cluster, tmp_path)


def test_the_status_is_what_the_log_says(log: WrittenLog) -> None:
    status = RunStatus(log.config, RunDir(log.folder), log.cluster)
    found = status.read()
    status.close()
    assert found.keys() >= STATUS_KEYS
    assert (found["step"], found["version"]) == (2, {"incarnation": 0, "number": 2})
    assert found["policy"] == {"name": "one-step-off", "bound": 1, "lookahead": 1}
    assert found["groups"] == {"granted": 6, "trained": 4, "closed": 1, "dropped": 0, "open": 1}
    assert found["closed_by_reason"] == {"reward_nan": 1}
    assert found["staleness"] == {"mean": 0.375, "p99": 1.0, "max": 1.0}
    assert found["tokens"] == {"generated": 24, "trained": 200, "masked": 0, "dropped": 0}
    assert found["seconds"] == {"wait": 2.0, "logprobs": 0.0, "update": 6.0, "publish": 0.5}
    held_out = found["eval"]
    assert (held_out["first"], held_out["last"], held_out["num_prompts"]) == (0.25, 0.5, 5)
    assert found["lag"] == {"prompts": 4, "rollouts": 1, "trajectories": 0, "trainer": 0}
    assert found["reward"] == {"last": 0.75, "mean": 0.625}
    assert found["tokens_per_s"] == 10.0
    assert found["publish_s"] == 0.25
    assert found["alerts"] == []
    assert found["wait_share"] == 0.1  # one second of the ten from step 1 to step 2
    json.dumps(found, allow_nan=False)
    assert any("4 trained" in line for line in status_lines(found))
    assert plain_line(found).startswith("step 2 · reward 0.75 · eval 0.5")


def test_the_status_shows_what_is_wrong_with_the_last_step_and_only_that(log: WrittenLog) -> None:
    wrong = {"gap/share_above_10pct": 0.5}
    log.score(1, 2, 1)
    log.step(3, (1, 2), reward=1.0, metrics=wrong)
    status = RunStatus(log.config, RunDir(log.folder), log.cluster)
    (alert,) = status.read()["alerts"]
    assert alert.startswith("gap: 50% of the tokens")
    assert f"ALERT      {alert}" in status_lines(status.read())
    log.announce(3, 4, 4)
    log.score(1, 3, 3)
    log.step(4, (1, 3), reward=1.0)
    assert status.read()["alerts"] == []
    status.close()


def test_the_status_of_a_run_that_has_done_nothing_yet(cluster: Cluster, tmp_path: Path) -> None:
    log = WrittenLog(cluster, tmp_path)
    found = RunStatus(log.config, RunDir(tmp_path), cluster).read()
    assert (found["step"], found["version"], found["groups"]["granted"]) == (0, None, 0)
    held_out = found["eval"]
    assert (held_out["first"], held_out["last"], held_out["num_prompts"]) == (None, None, 0)
    assert status_lines(found)
    assert plain_line(found).startswith("starting")


def test_a_status_read_again_equals_one_read_afresh(log: WrittenLog) -> None:
    status = RunStatus(log.config, RunDir(log.folder), log.cluster)
    status.read()
    log.score(1, 2, 1)
    log.close(1, 2, "stale")  # a second terminal of the same group: ignored
    log.announce(2, 4, 4)
    log.step(3, (1, 2), reward=1.0)
    again = status.read()
    fresh = RunStatus(log.config, RunDir(log.folder), log.cluster).read()
    assert again == fresh
    assert again["groups"] == {"granted": 8, "trained": 5, "closed": 1, "dropped": 0, "open": 2}
    assert again["closed_by_reason"] == {"reward_nan": 1}


def test_a_dropped_groups_tokens_are_dropped_whenever_it_arrives(log: WrittenLog) -> None:
    late, given_up = log.group_id(1, 2), log.group_id(0, 2)
    log.rollback(1)
    log.announce(1, 4, 4, closed=(late, given_up))
    status = RunStatus(log.config, RunDir(log.folder), log.cluster)
    assert status.read()["tokens"]["dropped"] == 6
    log.score(1, 2, 1)
    found = status.read()
    status.close()
    assert (found["groups"]["dropped"], found["tokens"]["dropped"]) == (2, 12)
    assert found["tokens"]["generated"] == 30


def audited(log: WrittenLog) -> dict[str, Any]:
    return as_json(audit_run(log.config, RunDir(log.folder), log.cluster))


def test_the_audit_of_a_right_log_passes(log: WrittenLog) -> None:
    found = audited(log)
    assert found["ok"], found
    assert found["groups"] == {
        "granted": 6, "trained": 4, "closed": 1, "dropped": 0, "open": 1, "scoring": 0,
        "duplicates": 0,
    }  # fmt: skip


def test_the_audit_decodes_the_trained_tokens_versions(log: WrittenLog) -> None:
    log.score(1, 2, 0)
    log.step(3, (1, 2), reward=0.0)
    found = audited(log)
    assert found["bound_violations"] == [
        {"group_id": log.group_id(1, 2), "step": 3, "staleness": 2}
    ]
    assert not found["ok"]


def test_records_that_are_none_of_ours_are_named(log: WrittenLog) -> None:
    topic = log.cluster.topic
    log.append("trajectories", 0, b"{}", key="mine", kind="group")
    log.append("trajectories", 1, b"x", key=log.group_id(1, 2), kind="closed", crc32c="00000000")
    found = audited(log)
    assert found["ok"], found
    assert [line.partition(":")[0] for line in found["unreadable"]] == [
        "trajectories/0/3 (mine)",
        f"trajectories/1/2 ({log.group_id(1, 2)})",
    ]
    assert "checksum" in found["unreadable"][1]
    log.append("steps", 0, b"no json")
    log.append("policy", 0, b'{"kind": "other"}')
    found = audited(log)
    assert not found["ok"]
    assert [line.partition(":")[0] for line in found["chain_breaks"]] == [
        f"{topic('steps')}/0/3",
        f"{topic('policy')}/0/4",
    ]


def test_a_step_that_is_none_is_named_by_the_status(log: WrittenLog) -> None:
    log.append("steps", 0, b"no json")
    status = RunStatus(log.config, RunDir(log.folder), log.cluster)
    found = status.read()
    status.close()
    assert found["step"] == 2
    assert "/0/3: " in found["incomplete"]


def test_a_record_that_was_changed_after_it_was_trained_is_named(log: WrittenLog) -> None:
    at, crc = log.end(1, log.group(1, 2, 1))
    log.coordinates[1, 2] = Coordinate(1, at, crc ^ 1, log.group_id(1, 2))
    log.step(3, (1, 2), reward=0.0)
    assert audited(log)["wrong_records"] == {
        log.group_id(1, 2): f"step 3: trajectories/1/{at} with checksum {crc ^ 1:08x} was trained, "
        f"the log holds the group at trajectories/1/{at} with {crc:08x}"
    }


def test_a_topic_with_another_number_of_partitions_proves_nothing(log: WrittenLog) -> None:
    config = log.config
    three = config.model_copy(update={"kafka": config.kafka.model_copy(update={"partitions": 3})})
    with pytest.raises(Unprovable, match=r"prompts has 2 partitions, the run began with 3"):
        audit_run(three, RunDir(log.folder), log.cluster)


def test_a_generated_group_without_a_reward_is_being_scored(log: WrittenLog) -> None:
    log.append("rollouts", 1, b"unscored", key=log.group_id(1, 2))
    found = audited(log)
    assert (found["ok"], found["groups"]["open"], found["groups"]["scoring"]) == (True, 1, 1)


def test_the_status_tells_given_up_work_apart(log: WrittenLog) -> None:
    """Read while a trainer that does not know the rollback is at work, then after its successor
    went on."""
    status = RunStatus(log.config, RunDir(log.folder), log.cluster)
    before = status.read()
    log.rollback(1)
    behind = status.read()
    assert (behind["step"], behind["version"]) == (1, {"incarnation": 1, "number": 1})
    assert behind["tokens"] == {**before["tokens"], "trained": 100}
    assert behind["groups"] == {**before["groups"], "trained": 2, "open": 3}
    assert behind["given_up"] == {"steps": 1, "groups": 2, "tokens": 100}
    assert behind["lag"]["trainer"] == 2
    assert behind["eval"]["last"] == 0.25  # that of version 0.2 is given up
    log.announce(1, 3, 3, closed=(log.group_id(0, 1),))
    log.score(1, 2, 1)
    log.step(2, (0, 2), (1, 2), reward=0.875)
    log.announce(2, 4, 3)
    found = status.read()
    assert (found["step"], found["version"]) == (2, {"incarnation": 1, "number": 2})
    assert found["groups"] == {"granted": 7, "trained": 4, "closed": 1, "dropped": 0, "open": 2}
    assert found["lineage"] == [{"incarnation": 1, "parent": 0, "number": 1, "reason": "rollback"}]
    assert found["tokens"]["trained"] == 200
    assert status.fold.rewards() == [(1, 0.5), (2, 0.875)]
    lines = status_lines(found)
    assert "incarnation 1: goes on from incarnation 0 after step 1" in lines
    assert "given up   1 steps of 2 groups, 100 tokens" in lines
    assert plain_line(found).startswith("step 2 of incarnation 1 · reward 0.875")
    fresh = RunStatus(log.config, RunDir(log.folder), log.cluster)
    assert fresh.read() == found
    fresh.close()
    status.close()


def test_audit_ends_with_4_when_something_was_trained_twice(
    log: WrittenLog, capsys: pytest.CaptureFixture[str]
) -> None:
    _keep_config(log)
    assert main(["audit", str(log.folder), "--json"]) == errors.OK
    assert json.loads(capsys.readouterr().out)["ok"]
    log.step(3, (0, 2), reward=0.0)
    assert main(["audit", str(log.folder), "--json"]) == errors.NOT_VERIFIED
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert json.loads(said)["trained_twice"] == [log.group_id(0, 2)]


def test_prompts_are_loaded_and_wrong_ones_named(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = WrittenLog(cluster, tmp_path)
    _keep_config(log)
    good = [{"prompt": "a", "id": "one"}, {"token_ids": [1]}, {"task": "sums", "messages": []}]
    bad = ["{", "7", '{"prompt": "a", "token_ids": [1]}', '{"prompt": "a", "task": "other"}', "{}"]
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join([*map(json.dumps, good), "", *bad]) + "\n")
    assert main(["prompts", "load", str(file), "--run", str(tmp_path), "--json"]) == errors.OK
    said = capsys.readouterr()
    assert json.loads(said.out) == {"written": 3, "rejected": 5}
    assert "p.jsonl 7: unknown task 'other'; known: sums" in said.err
    records = read_all(cluster, cluster.topic("prompts"), range(TOPICS["prompts"]))
    assert [r.partition for r in records] == [0, 0, 1]
    assert all(json.loads(r.value)["task"] == "sums" for r in records)
    assert {r.key for r in records} == {b"one", None}


def test_loading_nothing_but_wrong_prompts_fails(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _keep_config(WrittenLog(cluster, tmp_path))
    file = tmp_path / "p.jsonl"
    file.write_text("{}\n")
    assert main(["prompts", "load", str(file), "--run", str(tmp_path)]) == errors.FAILED
    for arguments in ([], [str(tmp_path / "none")], [str(file), "--task", "other"]):
        got = main(["prompts", "load", *arguments, "--run", str(tmp_path)])
        assert got == errors.CONFIGURATION
    assert "--task other" in capsys.readouterr().err


def _keep_config(log: WrittenLog) -> None:
    import tomli_w

    table = log.config.model_dump(exclude_none=True)
    RunDir(log.folder).config_file.write_text(tomli_w.dumps(table))
