"""The feeder keeps `prompts` ahead of the grants, exactly once whatever is killed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from connectors.config import Config, ConfigError, parse
from connectors.kafka import feeder as feeder_module
from connectors.kafka.client import Cluster, Producer, Reader, Record, read_all
from connectors.kafka.feeder import HEADER_FEED, Fed, Feeder, choose, feed_prompts
from connectors.kafka.topics import ensure_topics
from connectors.prompt_lines import PromptFile, open_lines
from connectors.records import Announcement, Version, encode

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, threading
from connectors.config import load
from connectors.kafka.client import Cluster
from connectors.kafka.feeder import feed_prompts
cluster = Cluster(bootstrap_servers=sys.argv[1], namespace=sys.argv[2])
feed_prompts(cluster, load(sys.argv[3]), threading.Event())
"""


def jsonl(path: Path, name: str, count: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"{name} {i}"}) + "\n" for i in range(count)))
    return path


def configured(folder: Path, tasks: Mapping[str, Mapping[str, Any]], **trainer: Any) -> Config:
    table = {
        "model": {"path": "model"},
        "trainer": trainer,
        "tasks": {name: {"reward": "exact_match", **task} for name, task in tasks.items()},
    }
    return parse(table, base_dir=str(folder))


def fed(path: Path, name: str, share: float = 1.0, repeat: bool = False) -> Fed:
    return Fed(name=name, lines=PromptFile(path), share=share, repeat=repeat)


def topics(cluster: Cluster, partitions: int = 3) -> None:
    ensure_topics(cluster, {"prompts": partitions, "policy": 1})


def grant(cluster: Cluster, *limits: int) -> None:
    producer = Producer(cluster)
    record = Announcement(epoch=0, version=Version(0, 1), digest="0" * 16, limits=limits)
    producer.append(cluster.topic("policy"), 0, encode(record))
    producer.close()


def in_order(cluster: Cluster, partitions: int = 3) -> list[Record]:
    """All fed records by index; each index must be there once, in its partition."""
    records = read_all(cluster, cluster.topic("prompts"), range(partitions))
    records.sort(key=lambda r: int(r.headers[HEADER_FEED]))
    assert [int(r.headers[HEADER_FEED]) for r in records] == list(range(len(records)))
    assert [r.partition for r in records] == [i % partitions for i in range(len(records))]
    return records


def top_up(cluster: Cluster, tasks: list[Fed], ahead: int) -> bool:
    feeder = Feeder(cluster, tasks, ahead)
    try:
        return feeder.top_up()
    finally:
        feeder.close()


def prompts_of(records: Sequence[Record]) -> list[str]:
    return [json.loads(record.value)["prompt"] for record in records]


def test_the_topic_stays_ahead_of_the_grants(cluster: Cluster, tmp_path: Path) -> None:
    topics(cluster)
    config = configured(
        tmp_path,
        {"sums": {"prompts": jsonl(tmp_path / "p.jsonl", "p", 5).name, "repeat": True}},
        groups_per_step=20,
    )
    stop = threading.Event()
    thread = threading.Thread(target=feed_prompts, args=(cluster, config, stop))
    thread.start()
    reader = Reader(cluster, cluster.topic("prompts"), dict.fromkeys(range(3), 0))
    try:
        wait_for_end(reader, 80)  # 4 * groups_per_step
        grant(cluster, 10, 0, 27)
        wait_for_end(reader, 117)
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive()
    reader.close()
    assert prompts_of(in_order(cluster)) == [f"p {i % 5}" for i in range(117)]


def wait_for_end(reader: Reader, total: int) -> None:
    deadline = time.monotonic() + 20
    while sum(reader.ends().values()) < total:
        assert time.monotonic() < deadline, f"{reader.ends()} and not {total}"
        time.sleep(0.02)
    assert sum(reader.ends().values()) == total


def test_a_line_without_a_task_gets_its_name_and_a_bad_line_goes_out_as_it_is(
    cluster: Cluster, tmp_path: Path
) -> None:
    lines = [
        b'{"prompt": "a", "id": "first"}',
        b'{"prompt": "b", "task": "other"}',
        b"{not json",
        b"[1, 2]",
        b"\xff\xfe",
        b"[" * 5000,
        b'{"id": 7}',
    ]
    (tmp_path / "p.jsonl").write_bytes(b"\n\n".join(lines) + b"\r\n  \n")
    topics(cluster)
    assert top_up(cluster, [fed(tmp_path / "p.jsonl", "sums")], 64) is False
    records = in_order(cluster)
    assert json.loads(records[0].value) == {"task": "sums", "prompt": "a", "id": "first"}
    assert [r.value for r in records[1:6]] == lines[1:6]
    assert json.loads(records[6].value) == {"task": "sums", "id": 7}
    assert [r.key for r in records] == [b"first"] + [None] * 6


def test_a_feeder_starts_where_the_last_one_stopped(cluster: Cluster, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "p.jsonl", "p", 100)
    topics(cluster)
    assert top_up(cluster, [fed(file, "sums")], 10) is True
    producer = Producer(cluster)  # users write to the topic too
    producer.append(cluster.topic("prompts"), 1, b'{"prompt": "by hand", "task": "sums"}')
    producer.close()
    assert top_up(cluster, [fed(file, "sums")], 40) is True
    assert top_up(cluster, [fed(file, "sums")], 1000) is False
    assert top_up(cluster, [fed(file, "sums")], 1000) is False
    records = read_all(cluster, cluster.topic("prompts"), range(3))
    given = sorted(json.loads(r.value)["prompt"] for r in records)
    assert given == sorted([f"p {i}" for i in range(100)] + ["by hand"])


@pytest.mark.parametrize("kept", [(9, 4, 13), (0, 0, 1), (0, 5, 0), (20, 20, 19), (20, 0, 20)])
def test_a_partition_that_got_less_than_another_is_filled_up(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: tuple[int, ...]
) -> None:
    """A feeder killed between acknowledgements leaves every partition at an index of its own."""
    monkeypatch.setattr(feeder_module, "FLUSH_RECORDS", 2)  # the scan back starts with 4 records
    tasks = [
        fed(jsonl(tmp_path / "a.jsonl", "a", 9), "a", share=2.0),
        fed(jsonl(tmp_path / "b.jsonl", "b", 7), "b", repeat=True),
    ]
    whole, torn = cluster, replace(cluster, namespace=cluster.namespace + "torn.")
    topics(whole)
    topics(torn)
    top_up(whole, tasks, 60)
    expected = in_order(whole)
    producer = Producer(torn)
    for partition, count in enumerate(kept):
        for record in expected[partition::3][:count]:
            producer.send(
                torn.topic("prompts"),
                partition,
                record.value,
                key=record.key,
                headers=record.headers,
            )
    producer.flush()
    producer.close()
    top_up(torn, tasks, 60)
    again = in_order(torn)
    assert [(r.value, r.key, r.headers) for r in again] == [
        (r.value, r.key, r.headers) for r in expected
    ]


def test_a_feeder_killed_at_random_moments_writes_every_line_once(
    cluster: Cluster, tmp_path: Path
) -> None:
    jsonl(tmp_path / "p.jsonl", "p", 3000)
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "m"\n[trainer]\ngroups_per_step = 100000\n'
        '[tasks.sums]\nreward = "exact_match"\nprompts = "p.jsonl"\n'
    )
    topics(cluster)
    command = [sys.executable, "-c", PROGRAM, cluster.bootstrap_servers, cluster.namespace]
    reader = Reader(cluster, cluster.topic("prompts"), dict.fromkeys(range(3), 0))
    rng, total = random.Random(3), 0
    while total < 3000:
        process = subprocess.Popen(
            [*command, str(tmp_path / "run.toml")], env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        goal = min(3000, total + rng.randrange(300, 1200))
        deadline = time.monotonic() + 30
        while total < goal and time.monotonic() < deadline:
            total = sum(reader.ends().values())
        process.kill()
        process.wait()
        total = sum(reader.ends().values())
        assert time.monotonic() < deadline
    reader.close()
    assert prompts_of(in_order(cluster)) == [f"p {i}" for i in range(3000)]


def test_tasks_are_mixed_evenly_by_share(tmp_path: Path) -> None:
    tasks = [
        fed(jsonl(tmp_path / "a.jsonl", "a", 3), "a", share=3.0, repeat=True),
        fed(jsonl(tmp_path / "b.jsonl", "b", 3), "b", share=1.0, repeat=True),
    ]
    chosen = [task.name for i in range(4000) if (task := choose(tasks, {}, i))]
    assert Counter(chosen)["a"] == pytest.approx(3000, abs=10)
    for start in range(0, 4000, 40):  # no clumps: any 40 in a row hold about 30
        assert Counter(chosen[start : start + 40])["a"] == pytest.approx(30, abs=3)


def test_a_task_without_lines_left_leaves_its_place_to_the_others(tmp_path: Path) -> None:
    tasks = [
        fed(jsonl(tmp_path / "a.jsonl", "a", 3), "a"),
        fed(jsonl(tmp_path / "b.jsonl", "b", 3), "b"),
    ]
    names = {task.name for i in range(100) if (task := choose(tasks, {"a": 3}, i))}
    assert names == {"b"}
    assert choose(tasks, {"a": 3, "b": 3}, 0) is None


def test_a_missing_or_empty_file_is_a_configuration_error(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n \n")
    for name, why in (("empty.jsonl", "holds no prompts"), ("none.jsonl", "cannot be read")):
        config = configured(tmp_path, {"sums": {"prompts": name}})
        with pytest.raises(ConfigError, match=why):
            feed_prompts(cluster, config, threading.Event())


def test_a_prompt_larger_than_a_message_is_a_configuration_error(
    cluster: Cluster, tmp_path: Path
) -> None:
    small = replace(cluster, max_message_bytes=1 << 16)
    topics(small)
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "x" * (1 << 17)}) + "\n")
    with pytest.raises(ConfigError, match=r"tasks\.sums\.prompts: prompt 0 has 131\d\d\d bytes"):
        top_up(small, [fed(tmp_path / "p.jsonl", "sums")], 64)


def test_nothing_is_fed_where_no_task_names_prompts(cluster: Cluster, tmp_path: Path) -> None:
    feed_prompts(cluster, configured(tmp_path, {"sums": {}}), threading.Event())


def test_a_generator_that_is_not_installed_or_unknown_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="reasoning-gym:no_such_generator"):
        open_lines("reasoning-gym:no_such_generator", base_dir=".", seed=0)
