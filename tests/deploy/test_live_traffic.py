"""A whole run whose model is served while it is trained: what applications ask of the gateway is
trained beside the prompts, also when the near-line job is killed in between."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from connectors.branches import CALLS, CORRECTS
from connectors.kafka.client import read_all
from connectors.kafka.terminals import terminal
from connectors.records import Group
from deploy.log import opened
from deploy.run_folder import load_run
from tests.small_run import SmallRun, until

NUM_SESSIONS = 12


def ask(url: str, session: str, messages: list[dict[str, str]], *, last: bool) -> dict[str, str]:
    """The assistant's message."""
    body = {"model": "latest", "messages": messages, "max_tokens": 4}
    headers = {"content-type": "application/json", "x-headwater-session": session}
    if last:
        headers["x-headwater-end"] = "true"
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        message: dict[str, Any] = json.loads(answer.read())["choices"][0]["message"]
    return {"role": "assistant", "content": message["content"] or ""}


def converse(url: str, session: str) -> None:
    messages = [{"role": "user", "content": "a"}]
    messages.append(ask(url, session, messages, last=False))
    messages.append({"role": "user", "content": "b"})
    ask(url, session, messages, last=True)


def num_trained(run: SmallRun) -> int:
    """Groups of live traffic."""
    return int(sum(m.metrics.get("traffic/groups", 0) for m in run.manifests()))


def test_served_sessions_are_trained_once_though_the_near_line_job_is_killed(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    run = SmallRun(
        tmp_path,
        tiny_model_path,
        settings={
            "trainer.num_steps": 1_000_000,
            "trainer.advantage": "opo",
            "nearline.share": 0.25,
            "nearline.bound": 10_000,
            "nearline.idle_s": 1.0,
            "gateway.port": 0,
            "checkpoint.every_steps": 20,
            "sampling.max_tokens": 6,
        },
    )
    with run.running() as process:
        url = until(lambda: run.run_dir.url("gateway"), "the gateway")
        for n in range(NUM_SESSIONS):
            converse(url, f"s{n}")
            if n == NUM_SESSIONS // 2:
                run.kill("nearline")
        until(lambda: process.poll() is None and num_trained(run) >= NUM_SESSIONS, "sessions")
    audit = run.ask("audit")
    assert audit["ok"], audit
    config = load_run(run.run_dir)
    with opened(config, run.run_dir) as cluster:
        partitions = range(config.kafka.partitions)
        traffic = read_all(cluster, cluster.topic("agent-traffic"), partitions)
        ended = list(map(terminal, read_all(cluster, cluster.topic("rollouts"), partitions)))
    records = [json.loads(record.value) for record in traffic]
    calls = sorted(record["id"] for record in records if record["kind"] == "call")
    assert len(calls) == 2 * NUM_SESSIONS
    live = [g for g in ended if isinstance(g, Group) and g.trajectories[0].source == "traffic"]
    rows = [row for group in live for row in group.trajectories]
    assert all(CORRECTS not in row.metadata for row in rows)
    assert sorted(i for row in rows for i in row.metadata[CALLS].split()) == calls
    assert {row.behaviour for row in rows} == {"exact"}
