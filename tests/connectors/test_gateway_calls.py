"""What clients were answered is in the log once, word for word, whatever becomes of the broker."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from connectors.gateway.recorder import Recorder
from connectors.kafka.client import Cluster, read_all
from connectors.kafka.locate import topics
from connectors.kafka.topics import ensure_topics
from connectors.text import Text
from connectors.traffic import Call, decode_traffic, partition_of
from tests.broker_process import BrokerProcess
from tests.connectors.gateway_bench import NUM_PARTITIONS, Bench, ScriptedPool, gateway, run

NUM_CALLS = 300
NUM_CLIENTS = 20
PATIENCE_S = 60.0


@pytest.mark.parametrize("away_s", [0.3, 3.0])  # the client gives a broker up after a second
def test_calls_through_a_broker_s_death_are_each_in_the_log_once(
    tiny_model_path: Path, tmp_path: Path, own_broker: BrokerProcess, own_cluster: Cluster,
    away_s: float,
) -> None:  # fmt: skip
    cluster = dataclasses.replace(own_cluster, unavailable_s=1.0)
    ensure_topics(cluster, topics(NUM_PARTITIONS))
    text = Text(tiny_model_path)
    answered: dict[str, str] = {}
    numbers = iter(range(NUM_CALLS))

    async def client(bench: Bench) -> None:
        for number in numbers:
            headers = {"x-headwater-session": f"session-{number % 40}"}
            status, body = await bench.chat(f"question {number}", headers)
            assert status == 200, body
            answered[body["id"]] = body["choices"][0]["message"]["content"]

    async def outage() -> None:
        while len(answered) < NUM_CALLS // 3:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(own_broker.kill9)
        await asyncio.sleep(away_s)
        await asyncio.to_thread(own_broker.start)

    async def scenario(recorder: Recorder) -> None:
        pool = ScriptedPool(text, *(f"answer {number}" for number in range(NUM_CALLS)))
        async with gateway(text, pool, journal=recorder) as bench:  # type: ignore[arg-type]
            await asyncio.gather(outage(), *(client(bench) for _ in range(NUM_CLIENTS)))

    with closing(Recorder(lambda: cluster, tmp_path / "gateway", writer="gateway")) as recorder:
        run(scenario(recorder))
        assert recorder.wait_empty(PATIENCE_S)
    found = [
        (record.partition, decode_traffic(record.value))
        for record in read_all(cluster, cluster.topic("agent-traffic"), range(NUM_PARTITIONS))
    ]
    calls = [call for _, call in found if isinstance(call, Call)]
    assert Counter(call.id for call in calls) == Counter(answered.keys())
    assert len(answered) == NUM_CALLS
    assert {call.id: call.choices[0].message["content"] for call in calls} == answered
    for partition, call in found:
        assert partition == partition_of(call.session, NUM_PARTITIONS)
