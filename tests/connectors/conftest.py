"""What contracts are checked on. Engines: one process of each kind, on one test worker. Brokers:
the embedded one and, if HEADWATER_TEST_KAFKA=HOST:PORT names one, a Kafka that creates no topics by
itself; each through two independent clients."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator

import pytest

from tests.broker_process import BrokerProcess
from tests.connectors.broker_clients import CLIENTS, Client, Rejected
from tests.connectors.engine_bench import Bench, Models
from tests.vllm_gate import requires_vllm

KINDS = [
    pytest.param("hf", marks=pytest.mark.xdist_group("hf")),
    pytest.param("vllm", marks=[pytest.mark.xdist_group("vllm"), requires_vllm]),
]

OTHER_KAFKA = os.environ.get("HEADWATER_TEST_KAFKA")
BROKERS = {"": None} if OTHER_KAFKA is None else {"": None, "-other-kafka": OTHER_KAFKA}


@pytest.fixture(
    params=[
        pytest.param((kind, bootstrap), id=name + suffix)
        for suffix, bootstrap in BROKERS.items()
        for name, kind in CLIENTS.items()
    ]
)
def client(request: pytest.FixtureRequest, broker: BrokerProcess) -> Iterator[Client]:
    """At another Kafka it removes the topics that it has created."""
    kind, bootstrap = request.param
    client = kind(bootstrap or broker.bootstrap)
    yield client
    if bootstrap is not None:
        for topic in client.created:
            with contextlib.suppress(Rejected):
                client.delete(topic)


@pytest.fixture
def topic(client: Client) -> str:
    """A new topic of two partitions."""
    name = f"conformance-{uuid.uuid4().hex[:12]}"
    client.create(name, 2)
    return name


@pytest.fixture
def embedded(client: Client, broker: BrokerProcess) -> BrokerProcess:
    """For tests of what is the embedded broker's own: its files and its limits."""
    if client.bootstrap != broker.bootstrap:
        pytest.skip("looks at files or limits that are the embedded broker's own")
    return broker


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session", params=KINDS)
def bench(
    request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    made = Bench(request.param, tmp_path_factory.mktemp(request.param), models)
    yield made
    made.close()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends the engines once the next test needs none: a vLLM that idles keeps a gigabyte."""
    used = getattr(item, "funcargs", {}).get("bench")
    if used is not None and "bench" not in getattr(nextitem, "fixturenames", ()):
        used.close()
