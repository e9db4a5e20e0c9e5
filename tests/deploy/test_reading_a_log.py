"""status, audit, trace and prompts load against a real broker with a log written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from connectors.config import ConfigError
from connectors.kafka.client import Cluster, read_all
from connectors.run_dir import RunDir
from deploy import errors
from deploy.audit_log import audit_run
from deploy.cli import main
from deploy.status import RunStatus
from deploy.trace import trace_lines, trace_run
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
    assert found["tokens"] == {"generated": 0, "trained": 200, "masked": 0, "dropped": 0}
    assert found["seconds"] == {"wait": 2.0, "logprobs": 0.0, "update": 6.0, "publish": 0.5}
    assert found["eval"] == {"first": 0.25, "last": 0.5, "num_prompts": 5}
    assert found["lag"] == {"prompts": 4, "rollouts": 1, "trajectories": 0, "trainer": 0}
    assert found["reward"] == {"last": 0.75, "mean": 0.625}
    assert found["tokens_per_s"] == 10.0
    assert found["publish_s"] == 0.25
    assert found["wait_share"] == 0.1  # one second of the ten from step 1 to step 2
    json.dumps(found, allow_nan=False)
    assert any("4 trained" in line for line in status_lines(found))
    assert plain_line(found).startswith("step 2 · reward 0.75 · eval 0.5")


def test_the_status_of_a_run_that_has_done_nothing_yet(cluster: Cluster, tmp_path: Path) -> None:
    log = WrittenLog(cluster, tmp_path)
    found = RunStatus(log.config, RunDir(tmp_path), cluster).read()
    assert (found["step"], found["version"], found["groups"]["granted"]) == (0, None, 0)
    assert found["eval"] == {"first": None, "last": None, "num_prompts": 0}
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


def test_the_audit_of_a_right_log_passes(log: WrittenLog) -> None:
    found = audit_run(log.config, log.cluster)
    assert found["ok"], found
    assert found["groups"] == {
        "granted": 6, "trained": 4, "closed": 1, "dropped": 0, "open": 1, "duplicates": 0,
    }  # fmt: skip


def test_the_audit_decodes_the_trained_tokens_versions(log: WrittenLog) -> None:
    log.score(1, 2, 0)
    log.step(3, (1, 2), reward=0.0)
    found = audit_run(log.config, log.cluster)
    assert found["bound_violations"] == [
        {"group_id": log.group_id(1, 2), "step": 3, "staleness": 2}
    ]
    assert not found["ok"]


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


def test_a_trajectory_is_traced_from_its_prompt_to_its_step(log: WrittenLog) -> None:
    found = trace_run(log.config, RunDir(log.folder), log.cluster, log.group_id(0, 2) + "/1")
    assert found["origin"]["prompt"] == {"prompt": "say 2"}
    assert (found["origin"]["partition"], found["origin"]["offset"]) == (0, 2)
    assert [(s["start"], s["end"], s["number"]) for s in found["segments"]] == [(2, 5, 1)]
    assert found["trajectories"][0]["reward"] == 1.0
    assert (found["trained_step"], found["checkpoints"]) == (2, [])
    assert "in step 2" in "\n".join(trace_lines(found))


def test_a_group_is_traced_with_all_its_trajectories(log: WrittenLog) -> None:
    found = trace_run(log.config, RunDir(log.folder), log.cluster, log.group_id(1, 0))
    assert [t["trajectory_id"][-2:] for t in found["trajectories"]] == ["/0", "/1"]
    assert len(found["segments"]) == 2


def test_a_closed_group_is_traced_to_its_reason(log: WrittenLog) -> None:
    found = trace_run(log.config, RunDir(log.folder), log.cluster, log.group_id(0, 1))
    assert found["closed"] == {"reason": "reward_nan", "message": "why"}
    assert found["trained_step"] is None
    assert "reward_nan" in "\n".join(trace_lines(found))


def test_a_group_in_the_making_has_no_terminal_yet(log: WrittenLog) -> None:
    found = trace_run(log.config, RunDir(log.folder), log.cluster, log.group_id(1, 2))
    assert (found["terminal"], found["closed"], found["segments"]) == (None, None, [])
    assert trace_lines(found)


@pytest.mark.parametrize(
    "wanted", ["x", "a/b/c", "other.prompts/0/0", "{}/0/99", "{}/0/0/9", "{}/0/-1"]
)
def test_an_id_that_is_none_is_one_clear_line(wanted: str, log: WrittenLog) -> None:
    wanted = wanted.format(log.cluster.topic("prompts"))
    with pytest.raises(ConfigError, match=r"no id of this run|no such prompt|has 2 trajectories"):
        trace_run(log.config, RunDir(log.folder), log.cluster, wanted)


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
