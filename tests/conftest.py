"""Shared fixtures. Services are real processes on the loopback, started and stopped here."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.kafka.client import Cluster
from tests.broker_process import BrokerProcess
from tests.models import tiny_model
from tests.vllm_gate import need_vllm

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests are the CPU's; a GPU has deploy.gpu_check


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture of the test starts an engine."""
    if item.get_closest_marker("requires_vllm") is not None:
        need_vllm()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One embedded broker for all tests; none of them stops it or counts on other tests' topics."""
    process = BrokerProcess(tmp_path_factory.mktemp("broker") / "data")
    yield process
    process.stop()


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker for one test, which may kill, pause and restart it."""
    process = BrokerProcess(tmp_path / "own-broker")
    yield process
    process.stop()


@pytest.fixture
def cluster(broker: BrokerProcess) -> Cluster:
    """The shared broker under a namespace that no other test uses."""
    return Cluster(bootstrap_servers=broker.bootstrap, namespace=f"test-{uuid.uuid4().hex[:12]}.")


@pytest.fixture
def own_cluster(own_broker: BrokerProcess) -> Cluster:
    """The test's own broker."""
    return Cluster(bootstrap_servers=own_broker.bootstrap)


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model and its tokenizer; read only."""
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")
