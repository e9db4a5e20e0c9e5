"""A real model behind HTTP, two turns a trajectory: the recorded log-probs are those of one forward
pass over the recorded ids, and a killed job's requests are taken up again."""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path

import msgspec
import numpy as np
import pytest

from connectors.arrow import decode_group
from connectors.engines.client import HttpEngine
from connectors.kafka.client import Cluster, read_all
from connectors.kafka.topics import ensure_topics
from connectors.records import HEADER_KIND, Group, Version
from connectors.run_dir import RunDir
from connectors.weights.wire import RelabelRequest
from tests.connectors.engine_process import EngineProcess
from tests.models import tiny_model
from tests.pipelines.dataflow_process import DataflowProcess
from tests.pipelines.test_dataflow_job import PARTITIONS, asked, count, grant, produce, wait_for

USER_CODE = """
async def agent(prompt, llm, tools):
    first = await llm.chat(prompt.messages)
    again = {"role": "user", "content": "again"}
    await llm.chat([*prompt.messages, first, again])

async def score(sample, prompt):
    return float(len(sample.messages))
"""


def relabel(url: str, version: Version) -> None:
    """What a trainer does first: says which version the loaded weights are."""

    async def digest() -> str:
        engine = HttpEngine(url)
        try:
            return (await engine.state()).digest
        finally:
            await engine.close()

    body = RelabelRequest(epoch=0, version=version, digest=asyncio.run(digest()))
    request = urllib.request.Request(f"{url}/weights/relabel", msgspec.json.encode(body))
    urllib.request.urlopen(request, timeout=30).read()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def trajectories(cluster: Cluster) -> list[Group]:
    records = read_all(cluster, cluster.topic("trajectories"), range(PARTITIONS))
    assert {record.headers[HEADER_KIND] for record in records} == {"group"}
    return [decode_group(record.value) for record in records]


def test_recorded_logprobs_are_those_of_the_recorded_ids(
    cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    topics = ("prompts", "rollouts", "trajectories", "dead-letters", "evaluations")
    ensure_topics(cluster, dict.fromkeys(topics, PARTITIONS) | {"policy": 1, "steps": 1})
    run = RunDir(tmp_path)
    (tmp_path / "code.py").write_text(USER_CODE)
    engine = EngineProcess(tmp_path / "engine", model)
    run.config_file.write_text(f"""
[run]
namespace = "{cluster.namespace}"
[kafka]
bootstrap_servers = "{cluster.bootstrap_servers}"
partitions = {PARTITIONS}
[model]
path = "{model}"
context_tokens = 512
[engine]
urls = ["{engine.url}"]
[sampling]
max_tokens = 40
temperature = 0.8
[tasks.t]
agent = "code.py:agent"
reward = "code.py:score"
group_size = 2
""")
    produce(cluster, [asked() for _ in range(8)])
    grant(cluster, 4, 4, number=5)
    job = DataflowProcess(tmp_path, "real")
    try:
        wait_for(lambda: any(role.name == "dataflow" for role in run.roles()), job)
        assert count(cluster) == 0  # the engine has no version yet, so nothing may start
        relabel(engine.url, Version(0, 5))
        wait_for(lambda: count(cluster) >= 1, job)
        job.kill9()
        job = DataflowProcess(tmp_path, "real")
        wait_for(lambda: count(cluster) >= 8, job)
        assert job.stop() == 0, job.log()
    finally:
        job.stop()
        engine.stop()
    groups = trajectories(cluster)
    assert len({group.group_id for group in groups}) == len(groups) == 8
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for row in (row for group in groups for row in group.trajectories):
        assert row.oldest == Version(0, 5)
        generated = row.loss_mask == 1
        if row.turns == 2:  # the model may write what does not survive as text: then it forked
            assert row.reward == 4.0
        with torch.no_grad():
            logits = reference(torch.tensor(row.tokens[None].astype(np.int64))).logits[0] / 0.8
        logprobs = torch.log_softmax(logits, -1)[:-1].gather(
            -1, torch.tensor(row.tokens[1:, None].astype(np.int64))
        )
        expected = np.concatenate([[np.nan], logprobs[:, 0].numpy()])
        assert np.array_equal(np.isnan(row.logprobs), ~generated)
        np.testing.assert_allclose(row.logprobs[generated], expected[generated], atol=1e-4)
