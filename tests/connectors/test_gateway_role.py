"""`headwater gateway CONFIG` as a process: a broker, an engine and the official client."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from connectors.config import ConfigError, load
from connectors.gateway.role import checked
from connectors.kafka.client import Cluster, Reader
from connectors.kafka.locate import topics
from connectors.kafka.topics import ensure_topics
from connectors.records import Version
from connectors.run_dir import RunDir
from connectors.traffic import Call, decode_traffic, partition_of
from connectors.weights import WeightsSender
from deploy.run import plan
from tests.broker_process import BrokerProcess
from tests.connectors.engine_process import EngineProcess
from tests.connectors.test_gateway_openai import digest_of
from tests.small_run import headwater_command, until

PARTITIONS = 2
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine(
    tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    process = EngineProcess(tmp_path_factory.mktemp("engine"), tiny_model_path)
    digest = asyncio.run(digest_of(process))
    with closing(WeightsSender(20, "memory")) as sender:
        sender.relabel(Version(0, 5), digest, 1, [process.url])
    yield process
    process.stop()


def configuration(folder: Path, model: Path, more: str = "") -> Path:
    file = folder / "config.toml"
    file.write_text(
        f'[run]\nname = "shop"\n[kafka]\npartitions = {PARTITIONS}\n[model]\npath = "{model}"\n'
        f"context_tokens = 256\n[sampling]\nmax_tokens = 8\n[gateway]\n[tasks.t]\n"
        f'reward = "exact_match"\n{more}'
    )
    return file


class GatewayProcess:
    def __init__(self, file: Path, run_dir: RunDir, broker: BrokerProcess, engine: str) -> None:
        self._run_dir = run_dir
        settings = (f'kafka.bootstrap_servers="{broker.bootstrap}"', f'engine.urls=["{engine}"]')
        arguments = [word for setting in settings for word in ("--set", setting)]
        self.log = file.with_name("gateway.log")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                headwater_command("gateway", file, "--run-dir", run_dir.path, *arguments),
                stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self.url = until(self._registered, "the gateway listens")

    def _registered(self) -> str | None:
        assert self.process.poll() is None, self.log.read_text()
        roles = self._run_dir.roles()
        return next(
            (r.url for r in roles if r.name == "gateway" and r.pid == self.process.pid), None
        )

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


def calls(cluster: Cluster) -> list[Call]:
    found: list[Call] = []
    topic = cluster.topic("agent-traffic")
    with closing(Reader(cluster, topic, dict.fromkeys(range(PARTITIONS), 0))) as reader:
        for record in reader.read_to(reader.ends()):
            call = decode_traffic(record.value)
            assert isinstance(call, Call)
            assert record.partition == partition_of(call.session, PARTITIONS)
            found.append(call)
    return found


def test_a_call_is_in_the_log_once_whatever_is_killed(
    tmp_path: Path, tiny_model_path: Path, engine: EngineProcess, own_broker: BrokerProcess
) -> None:
    cluster = Cluster(bootstrap_servers=own_broker.bootstrap)
    ensure_topics(cluster, topics(PARTITIONS))
    file, run_dir = configuration(tmp_path, tiny_model_path), RunDir(tmp_path / "run")
    gateway = GatewayProcess(file, run_dir, own_broker, engine.url)
    ids = [answered(gateway)]
    until(lambda: len(calls(cluster)) == 1, "the first call is in the log")
    own_broker.kill9()
    ids.append(answered(gateway))  # while the log is away
    gateway.end(signal.SIGKILL)
    again = GatewayProcess(file, run_dir, own_broker, engine.url)
    assert again.url == gateway.url
    ids.append(answered(again))
    own_broker.start()
    until(lambda: len(calls(cluster)) == 3, "all calls are in the log")
    assert again.end(signal.SIGTERM) == 0
    found = calls(cluster)
    assert sorted(call.id for call in found) == sorted(ids)
    assert {call.model for call in found} == {"0.5"}
    assert {call.behaviour for call in found} == {"exact"}


def answered(gateway: GatewayProcess) -> str:
    with gateway.client() as client:
        return client.chat.completions.create(model="shop", messages=HI).id


def test_a_configuration_that_is_none_of_a_gateway_s_is_one_line(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    file = configuration(tmp_path, tiny_model_path)
    assert checked(load(file)).port == 0
    for settings, why in (
        (["gateway.task=other"], "gateway.task: there is no task other; known are t"),
        (['gateway.redact=["("]'], "gateway.redact: '(' is no regular expression"),
        (['gateway.keys_file="none"'], "gateway.keys_file: "),
    ):
        arguments = [word for setting in settings for word in ("--set", setting)]
        done = subprocess.run(
            headwater_command("gateway", file, "--run-dir", tmp_path / "r", *arguments),
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith(f"headwater: {why}")
    file.write_text(file.read_text().replace("[gateway]\n", ""))
    with pytest.raises(ConfigError, match=r"no section \[gateway\]"):
        checked(load(file))


def test_a_run_starts_the_gateway_that_it_configures(tmp_path: Path, tiny_model_path: Path) -> None:
    file = configuration(tmp_path, tiny_model_path)
    names = [gang.name for gang in plan(load(file), RunDir(tmp_path / "run"), 1)]
    assert names == ["broker", "engine-0", "gateway", "dataflow", "trainer"]
    file.write_text(file.read_text().replace("[gateway]\n", ""))
    without = [gang.name for gang in plan(load(file), RunDir(tmp_path / "run"), 1)]
    assert without == ["broker", "engine-0", "dataflow", "trainer"]
