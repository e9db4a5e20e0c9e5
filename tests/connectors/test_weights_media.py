"""Which engine gets its weights through memory and which by the group, and what the death of either
side leaves of a load."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from connectors.engines.host import this_host
from connectors.records import Version
from connectors.weights import Ack, Peer, Snapshot, WeightsSender, plan, shapes_of
from connectors.weights.wire import MemoryUnreadable
from tests.connectors.weights_engine import model
from tests.connectors.weights_process import EngineProcess, answering, two_engines, wait_until
from tests.connectors.weights_reader import in_use
from tests.connectors.weights_sender import begin_update

pytestmark = pytest.mark.skipif(not this_host(), reason="memory files are Linux's")

SIZE = (1024, 4)
epochs = itertools.count(1)


@pytest.fixture(scope="module")
def processes() -> Iterator[list[EngineProcess]]:
    with two_engines(*SIZE) as engines:
        yield engines


@pytest.fixture
def engines(processes: list[EngineProcess]) -> list[EngineProcess]:
    return answering(processes)


@pytest.fixture
def epoch() -> int:
    """Higher than any before: engines remember."""
    return next(epochs)


def of_the_model(seed: int) -> Snapshot:
    parameters = dict(model(*SIZE, seed).named_parameters())
    layout = plan(shapes_of(parameters), torch.float32, bucket_bytes=4 << 20)
    return Snapshot.take(parameters, layout)


def loads_and_updates(engine: EngineProcess) -> tuple[int, int]:
    info = engine.state().info
    return info["num_loads"], info["num_updates"] - info["num_loads"]


def test_an_engine_of_another_host_is_served_by_the_group_in_the_same_publish(
    engines: list[EngineProcess], epoch: int
) -> None:
    sender, snapshot = WeightsSender(5.0), of_the_model(10)
    near, far = engines
    peers = [near.peer, Peer(far.url, host="another")]
    before = loads_and_updates(near), loads_and_updates(far)

    answers = sender.publish(snapshot, Version(0, 1), epoch, peers)
    sender.close()

    ack = Ack(version=Version(0, 1), digest=snapshot.digest)
    assert answers == {near.url: ack, far.url: ack}
    assert loads_and_updates(near) == (before[0][0] + 1, before[0][1])
    assert loads_and_updates(far) == (before[1][0], before[1][1] + 1)


def test_an_engine_that_cannot_open_the_memory_is_served_by_the_group_from_then_on(
    engines: list[EngineProcess], epoch: int
) -> None:
    sender = WeightsSender(5.0)
    peers = [engine.peer for engine in engines]
    num_loads, num_updates = loads_and_updates(engines[1])
    engines[1].fail_next("blind")
    for number in (1, 2):
        snapshot = of_the_model(10 + number)
        answers = sender.publish(snapshot, Version(0, number), epoch, peers)

        ack = Ack(version=Version(0, number), digest=snapshot.digest)
        assert answers == dict.fromkeys((peer.url for peer in peers), ack)
    sender.close()
    assert loads_and_updates(engines[1]) == (num_loads, num_updates + 2)


def test_through_memory_alone_an_engine_that_cannot_open_it_is_not_served(
    engines: list[EngineProcess], epoch: int
) -> None:
    sender, snapshot = WeightsSender(5.0, "memory"), of_the_model(10)
    before = engines[0].state()
    engines[0].fail_next("blind")

    answers = sender.publish(snapshot, Version(0, 1), epoch, [engines[0].peer])

    assert isinstance(answers[engines[0].url], MemoryUnreadable)
    after = engines[0].state()
    assert (after.version, after.digest) == (before.version, before.digest)


def test_an_engine_killed_while_it_reads_gives_the_memory_back(
    engines: list[EngineProcess], epoch: int
) -> None:
    sender, snapshot = WeightsSender(5.0, "memory"), of_the_model(10)
    engines[0].fail_next("die")

    sender.publish(snapshot, Version(0, 1), epoch, [engines[0].peer])

    wait_until(lambda: engines[0].exited, "the engine died")
    assert not in_use(snapshot)


def test_a_trainer_killed_while_an_engine_reads_leaves_it_with_the_whole_version(
    engines: list[EngineProcess], epoch: int, tmp_path: Path
) -> None:
    engine, snapshot = engines[0], of_the_model(10)
    engine.fail_next("stop")
    trainer = begin_update(tmp_path, snapshot, engine.url, epoch, 60.0, "load")
    engine.wait_stopped()
    trainer.kill()
    trainer.wait()
    engine.go_on()

    wait_until(lambda: engine.state().version == Version(0, 7), "the version is in")
    assert engine.state().digest == snapshot.digest
