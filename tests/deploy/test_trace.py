"""Where a trajectory came from and went, read from a real broker with a log written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from connectors.config import ConfigError
from connectors.kafka.client import Cluster
from connectors.run_dir import RunDir
from deploy.trace import trace_lines, trace_run
from tests.deploy.written_log import WrittenLog, write_example
from tests.operators.engine_fake import tokenizer


@pytest.fixture
def log(cluster: Cluster, tmp_path: Path) -> WrittenLog:
    return write_example(cluster, tmp_path)


def traced(log: WrittenLog, wanted: str) -> dict[str, Any]:
    return trace_run(log.config, RunDir(log.folder), log.cluster, wanted)


def test_a_trajectory_is_traced_from_its_prompt_to_its_step(log: WrittenLog) -> None:
    found = traced(log, log.group_id(0, 2) + "/1")
    assert found["origin"]["prompt"] == {"prompt": "say 2"}
    assert (found["origin"]["partition"], found["origin"]["offset"]) == (0, 2)
    assert [(s["start"], s["end"], s["number"]) for s in found["segments"]] == [(2, 5, 1)]
    assert found["trajectories"][0]["reward"] == 1.0
    assert (found["trained_step"], found["checkpoints"]) == (2, [])
    assert "in step 2" in "\n".join(trace_lines(found))


def test_what_the_model_wrote_is_shown_as_text_or_without_a_tokenizer_as_ids(
    log: WrittenLog,
) -> None:
    wanted = log.group_id(0, 2) + "/1"
    found = traced(log, wanted)
    assert found["trajectories"][0]["written"] == [[2, 3, 4]]
    assert "  wrote       [2,3,4]" in trace_lines(found)
    folder = log.folder / "model"
    folder.mkdir()
    text = tokenizer(folder)
    found = traced(log, wanted)
    assert found["trajectories"][0]["written"] == [text.decode([2, 3, 4], special=True)]


def test_a_group_is_traced_with_all_its_trajectories(log: WrittenLog) -> None:
    found = traced(log, log.group_id(1, 0))
    assert [t["trajectory_id"][-2:] for t in found["trajectories"]] == ["/0", "/1"]
    assert len(found["segments"]) == 2


def test_a_closed_group_is_traced_to_its_reason(log: WrittenLog) -> None:
    found = traced(log, log.group_id(0, 1))
    assert found["closed"] == {"reason": "reward_nan", "message": "why"}
    assert found["trained_step"] is None
    assert "reward_nan" in "\n".join(trace_lines(found))


def test_a_group_in_the_making_has_no_terminal_yet(log: WrittenLog) -> None:
    found = traced(log, log.group_id(1, 2))
    assert (found["terminal"], found["closed"], found["segments"]) == (None, None, [])
    assert trace_lines(found)


@pytest.mark.parametrize(
    "wanted", ["x", "a/b/c", "other.prompts/0/0", "{}/0/99", "{}/0/0/9", "{}/0/-1"]
)
def test_an_id_that_is_none_is_one_clear_line(wanted: str, log: WrittenLog) -> None:
    wanted = wanted.format(log.cluster.topic("prompts"))
    with pytest.raises(ConfigError, match=r"no id of this run|no such record|has 2 trajectories"):
        traced(log, wanted)


def test_the_way_is_shown_with_its_rollout_reward_and_checkpoints(log: WrittenLog) -> None:
    log.checkpoint()
    found = traced(log, log.group_id(0, 2))
    assert found["granted"]["version"] == {"incarnation": 0, "number": 1}
    assert found["rollout"] == f"{log.cluster.topic('rollouts')}/0/2"
    assert found["terminal"] == f"{log.cluster.topic('trajectories')}/0/2"
    assert found["trajectories"][0]["reward_parts"] == {"length": 3.0}
    assert (found["trained_step"], found["checkpoints"], found["trimmed"]) == (2, [2], [])
    assert "length 3" in "\n".join(trace_lines(found))


def test_steps_that_were_given_up_are_told_apart(log: WrittenLog) -> None:
    log.checkpoint()
    log.rollback(1, log.group_id(1, 1))
    found = traced(log, log.group_id(0, 2))
    assert (found["trained_step"], found["checkpoints"]) == (None, [])
    given_up = {"step": 2, "version": {"incarnation": 0, "number": 2}}
    assert found["given_up_steps"] == [given_up]
    assert "  given up    step 2 of 0.2 trained it" in trace_lines(found)
    log.announce(1, 3, 3, closed=(log.group_id(0, 1),))
    log.score(1, 2, 1)
    log.step(2, (0, 2), (1, 2), reward=0.0)
    again = traced(log, log.group_id(0, 2))
    assert (again["trained_step"], again["given_up_steps"]) == (2, [given_up])
    assert again["checkpoints"] == []  # that of step 2 holds the weights that were given up
    excluded = traced(log, log.group_id(1, 1))
    assert (excluded["trained_step"], excluded["excluded_by"]) == (None, [1])
    assert "  excluded    by the fork to incarnation 1" in trace_lines(excluded)


def test_a_prompts_own_id_finds_its_groups(log: WrittenLog) -> None:
    at = log.append("prompts", 0, b"x", key="mine")
    log.append("prompts", 1, json.dumps({"prompt": "y", "id": "mine"}).encode())
    found = traced(log, "mine")
    assert found["group_id"] == log.group_id(0, at)
    assert found["same_prompt"] == [log.group_id(1, 5)]
    assert (found["granted"], found["rollout"], found["terminal"]) == (None, None, None)
    assert f"  same prompt {log.group_id(1, 5)}" in trace_lines(found)


def test_a_branch_of_a_trajectory_is_found_by_its_own_id(log: WrittenLog) -> None:
    with pytest.raises(ConfigError, match="has 2 trajectories"):
        traced(log, log.group_id(0, 2) + "/1/0")


def test_what_was_trimmed_is_said(log: WrittenLog) -> None:
    log.trim(prompts={0: 1}, rollouts={0: 2}, trajectories={0: 2}, steps={0: 2})
    found = traced(log, log.group_id(0, 0))
    assert (found["origin"]["prompt"], found["rollout"], found["trained_step"]) == (None,) * 3
    topic = log.cluster.topic
    assert found["trimmed"] == [
        f"the prompt {log.group_id(0, 0)}",
        "steps before 2, one of which may have trained it",
        f"{topic('rollouts')}/0 before 2",
        f"{topic('trajectories')}/0 before 2",
    ]
    assert f"  trimmed     {topic('rollouts')}/0 before 2" in trace_lines(found)
    assert traced(log, log.group_id(0, 2))["trimmed"] == []
    assert found["unknown"] == ["trained_step", "rollout", "terminal"]
    lines = trace_lines(found)
    for name in ("rollout", "terminal", "trained"):
        assert f"  {name:<12}unknown (trimmed)" in lines
