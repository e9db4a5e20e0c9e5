"""The near-line job against a real broker: every call and every feedback ends in something, once,
also when the job is killed."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from connectors.branches import BEFORE, BRANCH, CALLS, CORRECTS, LABEL, SERVED, SESSION, USER
from connectors.config import ConfigError, load
from connectors.kafka.client import Cluster, Producer
from connectors.kafka.terminals import terminal
from connectors.kafka.topics import ensure_topics
from connectors.records import Closed, Group, encode
from connectors.run_dir import RunDir
from connectors.text import Text
from connectors.traffic import Call, End, Feedback, partition_of
from pipelines.nearline_job import settings_of
from tests.operators.engine_fake import tokenizer
from tests.operators.live_calls import EOS, call, choice, said
from tests.pipelines.nearline_process import NearlineProcess, recompute
from tests.pipelines.test_dataflow_job import PARTITIONS, wait_for, written

Record = Call | End | Feedback
CONFIG = """
[run]
namespace = "{namespace}"
[kafka]
bootstrap_servers = "{servers}"
partitions = 2
[model]
path = "{model}"
context_tokens = 60
[trainer]
advantage = "spo"
[nearline]
idle_s = 1.0
[tasks.t]
reward = "feedback"
[tasks.t.feedback]
window_s = 5.0
correction_s = 100000.0
[tasks.scored]
reward = "exact_match"
[tasks.scored.feedback]
window_s = 5.0
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path, cluster: Cluster, model: Path) -> RunDir:
    (tmp_path / "config.toml").write_text(
        CONFIG.format(namespace=cluster.namespace, servers=cluster.bootstrap_servers, model=model)
    )
    topics = (
        "prompts", "rollouts", "trajectories", "dead-letters", "evaluations", "agent-traffic",
        "feedback",
    )  # fmt: skip
    ensure_topics(cluster, dict.fromkeys(topics, PARTITIONS) | {"policy": 1, "steps": 1})
    return RunDir(tmp_path)


def produce(cluster: Cluster, *records: Record | tuple[str, int, bytes]) -> None:
    """Each where its session belongs; bytes where they are told."""
    producer = Producer(cluster)
    for record in records:
        if isinstance(record, tuple):
            topic, partition, value = record
        else:
            topic = "feedback" if isinstance(record, Feedback) else "agent-traffic"
            session = record.session
            if isinstance(record, Feedback) and not session and record.call is not None:
                session = record.call.split("/")[0]
            partition, value = partition_of(session, PARTITIONS), encode(record)
        producer.append(cluster.topic(topic), partition, value)
    producer.close()


def ends(cluster: Cluster) -> list[Group | Closed]:
    return [terminal(record) for record in written(cluster, "rollouts")]


def groups(cluster: Cluster, name: str) -> list[Group]:
    """Of a session, in order."""
    found = (end for end in ends(cluster) if isinstance(end, Group))
    return [g for g in found if g.trajectories[0].metadata[SESSION] == name]


def finished(
    cluster: Cluster, run: RunDir, num_ends: int, *, num_letters: int = 0
) -> list[Group | Closed]:
    """What a job that runs until then has written."""
    job = NearlineProcess(run.path)
    try:
        wait_for(lambda: len(written(cluster, "rollouts")) >= num_ends, job)
        wait_for(lambda: len(written(cluster, "dead-letters")) >= num_letters, job)
        assert job.stop() == 0, job.log()
    finally:
        job.stop()
    return ends(cluster)


def session(name: str, at: float, **changes: Any) -> list[Record]:
    """Two turns, a fork, and the end of it."""
    fields = {"session": name, **changes}
    return [
        call(f"{name}/a", [10], [7, EOS], time=at, **fields),
        call(f"{name}/b", [10, 7, EOS, 20], [8, EOS], time=at + 0.1, **fields),
        call(f"{name}/c", [30], [9, EOS], time=at + 0.2, **fields),
        End(session=name, time=at + 0.2),
    ]


def test_a_session_becomes_a_group_with_its_label(cluster: Cluster, run: RunDir) -> None:
    produce(
        cluster,
        *session("s", 100, user="u"),
        said("1", 1.0, time=103, session="s"),
        said("2", 0.5, time=104, session="s"),
    )
    found = finished(cluster, run, 1)
    assert len(found) == 1
    (group,) = found
    assert isinstance(group, Group)
    first, second = group.trajectories
    topic = cluster.topic("agent-traffic")
    assert group.group_id == f"{topic}/{partition_of('s', PARTITIONS)}/0"
    assert [t.trajectory_id for t in group.trajectories] == [
        f"{group.group_id}/0", f"{group.group_id}/0/1",
    ]  # fmt: skip
    assert first.tokens.tolist() == [10, 7, EOS, 20, 8, EOS]
    assert second.tokens.tolist() == [30, 9, EOS]
    assert (first.reward, second.reward) == (0.75, 0.75)
    assert (first.source, first.behaviour) == ("traffic", "exact")
    assert first.metadata[CALLS] == "s/a s/b"
    assert second.metadata[CALLS] == "s/c"
    assert second.metadata[BRANCH] == "1"
    assert (first.metadata[USER], first.metadata[SERVED]) == ("u", "0.0")
    assert first.metadata[LABEL] == "final"
    assert group.prompt.id == "*"
    assert group.prompt.reward == {"feedback": {"thumb": [1.0, 0.5]}}
    assert group.prompt.messages == [{"role": "user", "content": "[10]"}]


def test_a_task_with_a_scorer_of_its_own_goes_on_unscored(cluster: Cluster, run: RunDir) -> None:
    produce(cluster, said("1", 1.0, session="s"), *session("s", 100, task="scored"))
    (group,) = finished(cluster, run, 1)
    assert isinstance(group, Group)
    assert np.isnan([t.reward for t in group.trajectories]).all()
    assert group.prompt.reward == {"feedback": {"thumb": [1.0]}}
    assert LABEL not in group.trajectories[0].metadata


def test_whatever_comes_ends_in_something_with_its_reason(cluster: Cluster, run: RunDir) -> None:
    long = [call("l", [*range(4, 60)], [7, EOS, EOS, EOS, EOS, EOS], session="long", task="scored")]
    nothing = [call("n", [10], [], session="nothing", task="scored")]
    gone = choice([7, EOS], version=5, logprobs=False)
    kept = choice([7, EOS], version=1, logprobs=False)
    produce(
        cluster,
        *session("silent", 100),
        *long,
        *nothing,
        call("g", [10], gone, session="gone", task="scored"),
        call("k", [10], kept, session="kept", task="scored"),
        call("u", [10], [7], session="unknown", task="other"),
        ("agent-traffic", 0, b"{no json"),
        ("feedback", 1, msgspec.json.encode({"id": "x", "value": 1})),
        said("early", 1.0, time=0, session="never"),
    )
    found = finished(cluster, run, 5, num_letters=4)
    reasons = Counter(end.reason for end in found if isinstance(end, Closed))
    assert reasons == {"no_label": 1, "too_long": 1, "nothing_to_train": 1, "version_gone": 1}
    (group,) = [end for end in found if isinstance(end, Group)]
    (row,) = group.trajectories
    assert row.behaviour == "recomputed"
    assert row.logprobs[1:].tolist() == [-0.5, -0.5]
    letters = written(cluster, "dead-letters")
    assert Counter(letter.headers["code"] for letter in letters) == {
        "unknown_task": 1, "bad_call": 1, "bad_feedback": 2,
    }  # fmt: skip
    assert any("there is no session never" in letter.headers["message"] for letter in letters)


def test_a_late_label_corrects_once_and_a_late_call_is_trained_alone(
    cluster: Cluster, run: RunDir
) -> None:
    produce(cluster, *session("s", 100), said("1", 1.0, time=103, session="s"))
    job = NearlineProcess(run.path)
    try:
        wait_for(lambda: len(ends(cluster)) == 1, job)
        produce(
            cluster,
            said("2", 0.0, time=150, session="s"),
            said("2", 0.0, time=150, session="s"),
            said("3", 0.5, time=151, call="s/a"),
            call("s/d", [10, 7, EOS, 21], [6, EOS], time=160, session="s"),
            call("s/again", [30], [5, EOS], time=161, session="s"),
        )
        wait_for(lambda: len(ends(cluster)) >= 4, job)
        job.kill9()
        produce(cluster, said("2", 0.0, time=150, session="s"), *session("other", 200))
        job = NearlineProcess(run.path)
        wait_for(lambda: len(ends(cluster)) >= 5, job)
        assert job.stop() == 0, job.log()
    finally:
        job.stop()
    found = {end.group_id: end for end in ends(cluster)}
    assert len(found) == len(ends(cluster)) == 5
    first = groups(cluster, "s")[0]
    feedback = cluster.topic("feedback")
    corrections = [end for i, end in found.items() if i.startswith(feedback)]
    assert len(corrections) == 1
    (correction,) = corrections
    assert isinstance(correction, Group)
    assert correction.trajectories[0].reward == 0.5
    assert correction.trajectories[0].metadata[CORRECTS] == first.group_id
    assert correction.trajectories[0].metadata[BEFORE] == "1.0"
    for one, other in zip(first.trajectories, correction.trajectories, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.loss_mask, other.loss_mask)
        assert np.array_equal(one.logprobs, other.logprobs, equal_nan=True)
    (alone,) = [g for g in groups(cluster, "s") if g.trajectories[0].metadata[CALLS] == "s/d"]
    assert alone.trajectories[0].loss_mask.tolist() == [0, 0, 0, 0, 1, 1]
    closed = Counter(end.reason for end in found.values() if isinstance(end, Closed))
    assert closed == {"nothing_to_train": 1, "no_label": 1}


def test_every_call_is_trained_once_though_the_job_is_killed(cluster: Cluster, run: RunDir) -> None:
    chance = random.Random(7)
    sessions = [f"s{n}" for n in range(40)]
    calls = {name: session(name, 10.0 * n)[:3] for n, name in enumerate(sessions)}
    labels = {name: chance.choice([0.0, 0.5, 1.0]) for name in sessions}
    records: list[list[Record]] = []
    for n, name in enumerate(sessions):
        about = [
            said(f"{name}/{k}", labels[name], time=10.0 * n + k, session=name) for k in range(2)
        ]
        mixed = [*calls[name], *about]
        chance.shuffle(mixed)
        records.append(mixed)
    job = NearlineProcess(run.path)
    try:
        for start in range(0, len(sessions), 8):
            before = len(written(cluster, "rollouts"))
            produce(cluster, *(r for one in records[start : start + 8] for r in one))
            wait_for(partial(_has_more, cluster, before), job)
            if start % 16:
                assert job.stop() == 0, job.log()
            else:
                job.kill9()
            job = NearlineProcess(run.path)
        wait_for(lambda: _num_calls(cluster) >= 3 * len(sessions), job)
        assert job.stop() == 0, job.log()
    finally:
        job.stop()
    keys = Counter(record.key for record in written(cluster, "rollouts"))
    assert set(keys.values()) == {1}
    trained = Counter(_calls(cluster))
    assert trained == {c.id: 1 for one in calls.values() for c in one if isinstance(c, Call)}
    last: dict[str, float] = {}
    for ended in ends(cluster):
        assert isinstance(ended, Group), ended
        first = ended.trajectories[0]
        last[first.metadata[SESSION]] = first.reward
    assert last == labels
    assert written(cluster, "dead-letters") == []


def _has_more(cluster: Cluster, than: int) -> bool:
    return len(written(cluster, "rollouts")) > than


def _calls(cluster: Cluster) -> list[str]:
    return [
        i
        for end in ends(cluster)
        if isinstance(end, Group)
        for t in end.trajectories
        if CORRECTS not in t.metadata
        for i in t.metadata[CALLS].split()
    ]


def _num_calls(cluster: Cluster) -> int:
    return len(_calls(cluster))


def test_a_configuration_without_the_section_or_with_an_unknown_function_is_refused(
    run: RunDir, model: Path
) -> None:
    text = Text(model)
    file = run.config_file
    with pytest.raises(ConfigError, match=r"tasks.t.feedback.combine: .*known: mean, last"):
        settings_of(load(file, ["tasks.t.feedback.combine=middle"]), text, recompute)
    file.write_text(file.read_text().replace("[nearline]\nidle_s = 1.0\n", ""))
    with pytest.raises(ConfigError, match="no section"):
        settings_of(load(file, ["tasks.t.reward=exact_match"]), text, recompute)


def test_an_imported_log_of_texts_becomes_rows_that_learn_each_answer_once(
    cluster: Cluster, run: RunDir, model: Path
) -> None:
    def turn(id: str, messages: list[dict[str, Any]], answer: str, at: float) -> Call:
        return call(
            id, None, choice(None, text=answer), time=at, session="s", source="import",
            messages=messages, model="gpt-9", temperature=None,
        )  # fmt: skip

    asked = [{"role": "user", "content": "one"}]
    more = [
        *asked,
        {"role": "assistant", "content": "yes", "refusal": None},
        {"role": "user", "content": "two"},
    ]
    produce(cluster, turn("s/b", more, "no", 1e6), turn("s/a", asked, "yes", 0.0))
    produce(cluster, said("1", 0.5, time=1e6, session="s"), *session("live", 2e9, task="scored"))
    finished(cluster, run, 2)
    (group,) = groups(cluster, "s")
    (row,) = group.trajectories
    text = Text(model)
    assert (row.source, row.behaviour, row.segments) == ("import", "text", ())
    assert np.isnan(row.logprobs).all()
    assert row.reward == 0.5
    assert text.decode(row.tokens, special=True) == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n"
    )
    assert text.decode(row.tokens[row.loss_mask == 1]) == "yesno"
    assert row.metadata[CALLS] == "s/a s/b"
