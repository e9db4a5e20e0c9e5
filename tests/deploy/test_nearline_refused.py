"""What does not go together with a run of live traffic, where a command finds out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from connectors.config import Config, ConfigError, parse
from connectors.kafka.client import Cluster, Producer
from connectors.kafka.locate import topics
from connectors.kafka.topics import ensure_topics
from connectors.records import encode
from connectors.run_dir import RunDir
from connectors.traffic import Call, Choice, Feedback
from deploy import run_folder, shadow
from deploy.cli import main
from deploy.simulate.sources import from_config


def config_of(cluster: Cluster, model: Path, folder: Path, share: float = 1.0) -> Config:
    table: dict[str, Any] = {
        "run": {"dir": str(folder), "namespace": cluster.namespace},
        "kafka": {"bootstrap_servers": cluster.bootstrap_servers, "partitions": 2},
        "model": {"path": str(model)},
        "tasks": {"a": {"reward": "feedback"}},
        "trainer": {"advantage": "spo", "groups_per_step": 4},
        "nearline": {"share": share},
    }
    return parse(table, base_dir=str(folder))


def test_the_share_is_fixed_for_a_run_and_the_bound_is_not(
    cluster: Cluster, tiny_model_path: Path, tmp_path: Path
) -> None:
    config = config_of(cluster, tiny_model_path, tmp_path)
    run_folder.prepare(config, RunDir(tmp_path))
    other = config_of(cluster, tiny_model_path, tmp_path, share=0.5)
    with pytest.raises(ConfigError, match=r"nearline.share: cannot change from 1.0 to 0.5"):
        run_folder.prepare(other, RunDir(tmp_path))
    none = config.model_copy(update={"nearline": None})
    with pytest.raises(ConfigError, match=r"nearline.share: cannot change from 1.0 to nothing"):
        run_folder.prepare(none, RunDir(tmp_path))
    assert config.nearline is not None
    lower = config.model_copy(update={"nearline": config.nearline.model_copy(update={"bound": 2})})
    assert run_folder.prepare(lower, RunDir(tmp_path)).changes == ("nearline.bound: 8 -> 2",)


def test_a_run_of_live_traffic_has_no_shadow(
    cluster: Cluster, tiny_model_path: Path, tmp_path: Path
) -> None:
    config = config_of(cluster, tiny_model_path, tmp_path)
    (tmp_path / "config.toml").write_text(tomli_w.dumps(config.model_dump(exclude_none=True)))
    with pytest.raises(ConfigError, match=r"a run with \[nearline\] has no shadow"):
        shadow.make(RunDir(tmp_path), RunDir(tmp_path / "other"), cluster, [], None)


def test_what_grants_no_prompt_is_not_simulated_and_a_share_leaves_it_the_rest(
    cluster: Cluster, tiny_model_path: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="simulate: live traffic has every group of a step"):
        from_config(config_of(cluster, tiny_model_path, tmp_path))
    source = from_config(config_of(cluster, tiny_model_path, tmp_path, share=0.25))
    assert source.workload.batch_size == 3
    assert "left out: live traffic, so a step is 3 groups of 4" in source.notes


def test_the_log_of_calls_and_of_feedback_is_read_like_any_other(
    cluster: Cluster, tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(cluster, tiny_model_path, tmp_path)
    (tmp_path / "config.toml").write_text(tomli_w.dumps(config.model_dump(exclude_none=True)))
    ensure_topics(cluster, topics(2))
    call = Call(
        id="c1", session="s1", task="a", time=1.0, finished_at=2.0, user="u",
        messages=[{"role": "user", "content": "ask"}],
        choices=(Choice(message={"role": "assistant", "content": "x"}),),
    )  # fmt: skip
    said = Feedback(id="f1", name="thumb", value=0.0, time=3.0, session="s1")
    producer = Producer(cluster)
    for topic, record in (("agent-traffic", call), ("feedback", said)):
        producer.append(cluster.topic(topic), 1, encode(record), key=b"s1")
    producer.close()
    shown = []
    for topic, field in (("agent-traffic", "user"), ("feedback", "value")):
        assert main(["log", str(tmp_path), topic, "--where", "session", "=", "s1"]) == 0
        (line,) = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
        shown.append((line["key"], line["partition"], line["value"][field]))
    assert shown == [("s1", 1, "u"), ("s1", 1, 0.0)]
