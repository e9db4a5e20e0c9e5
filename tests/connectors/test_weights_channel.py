"""Weights from a sender to engine processes, over gloo and through memory, and everything that gets
in the way."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from connectors.records import Version
from connectors.weights import (
    Ack,
    Peer,
    Snapshot,
    Through,
    WeightsError,
    WeightsSender,
    plan,
    shapes_of,
)
from connectors.weights.wire import DigestMismatch, EpochRefused, PlanRefused, Unreachable
from tests.connectors.weights_engine import model
from tests.connectors.weights_process import EngineProcess, answering, two_engines, wait_until
from tests.connectors.weights_sender import begin_update

SIZE = (1024, 4)  # 17 MB in buckets of 4: more than sockets hold, so a broken update is half sent
TIMEOUT_S = 3.0
epochs = itertools.count(1)


def snapshot_of(seed: int, size: tuple[int, int] = SIZE) -> Snapshot:
    named = dict(model(*size, seed).named_parameters())
    return Snapshot.take(named, plan(shapes_of(named), torch.float32, bucket_bytes=4 << 20))


def version(number: int) -> Version:
    return Version(0, number)


@pytest.fixture(scope="module")
def processes() -> Iterator[list[EngineProcess]]:
    with two_engines(*SIZE) as engines:
        yield engines


@pytest.fixture
def engines(processes: list[EngineProcess]) -> list[EngineProcess]:
    return answering(processes)


@pytest.fixture(params=["group", "memory"])
def medium(request: pytest.FixtureRequest) -> Through:
    return request.param


@pytest.fixture
def sender(medium: Through) -> Iterator[WeightsSender]:
    sender = WeightsSender(TIMEOUT_S, medium)
    yield sender
    sender.close()


over_the_group = pytest.mark.parametrize("medium", ["group"], indirect=True)


@pytest.fixture
def epoch() -> int:
    """Higher than any before: engines remember."""
    return next(epochs)


def peers(engines: list[EngineProcess]) -> list[Peer]:
    return [engine.peer for engine in engines]


def holds(engine: EngineProcess, number: int, snapshot: Snapshot) -> bool:
    state = engine.state()
    return (state.version, state.digest) == (version(number), snapshot.digest)


def test_every_engine_gets_the_bytes_and_says_so(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int
) -> None:
    urls = [engine.url for engine in engines]
    for number in (1, 2):
        snapshot = snapshot_of(seed=10 + number)
        answers = sender.publish(snapshot, version(number), epoch, peers(engines))

        ack = Ack(version=version(number), digest=snapshot.digest)
        assert answers == dict.fromkeys(urls, ack)
        assert all(holds(engine, number, snapshot) for engine in engines)
        assert all(engine.state().epoch == epoch for engine in engines)


@pytest.mark.parametrize("how", ["refuse", "flip", "write", "lie"])
def test_an_engine_that_does_not_take_the_bytes_never_counts_as_served(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int, medium: Through, how: str
) -> None:
    """HTTP errors, a digest that differs, a write that fails, an acknowledgement of another
    version."""
    good, bad = engines
    urls = [engine.url for engine in engines]
    assert sender.publish(snapshot_of(20), version(1), epoch, peers(engines)).keys() == set(urls)
    snapshot = snapshot_of(21)
    bad.fail_next(how)

    answers = sender.publish(snapshot, version(2), epoch, peers(engines))

    assert isinstance(answers[good.url], Ack)
    assert holds(good, 2, snapshot)
    assert isinstance(answers[bad.url], WeightsError)
    if how == "flip":
        assert isinstance(answers[bad.url], DigestMismatch)
        # What lies in memory is verified before anything is touched.
        assert bad.state().version == (None if medium == "group" else version(1))
    if how == "write":
        assert bad.state().version is None
        assert bad.state().digest == "", "half-written weights are no version's"
    assert isinstance(sender.publish(snapshot, version(2), epoch, [bad.peer])[bad.url], Ack)
    assert holds(bad, 2, snapshot)


@pytest.mark.parametrize("joined", [True, False], ids=["in-the-group", "newcomer"])
def test_a_killed_engine_costs_the_other_nothing(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int, joined: bool
) -> None:
    good, dead = engines
    if joined:
        sender.publish(snapshot_of(30), version(1), epoch, peers(engines))
    dead.kill9()

    snapshot = snapshot_of(31)
    answers = sender.publish(snapshot, version(2), epoch, peers(engines))

    assert isinstance(answers[dead.url], Unreachable)
    assert holds(good, 2, snapshot)


@pytest.mark.parametrize("how", ["die", "stop"])
def test_an_engine_lost_in_mid_update_does_not_keep_the_other_from_it(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int, how: str
) -> None:
    good, lost = engines
    sender.publish(snapshot_of(40), version(1), epoch, peers(engines))
    lost.fail_next(how)

    snapshot = snapshot_of(41)
    answers = sender.publish(snapshot, version(2), epoch, peers(engines))

    assert isinstance(answers[lost.url], Unreachable)
    assert isinstance(answers[good.url], Ack)
    assert holds(good, 2, snapshot)


def test_an_engine_stopped_before_the_update_costs_the_other_nothing(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int
) -> None:
    good, stopped = engines
    sender.publish(snapshot_of(50), version(1), epoch, peers(engines))
    stopped.stop()
    snapshot = snapshot_of(51)

    answers = sender.publish(snapshot, version(2), epoch, peers(engines))

    assert isinstance(answers[stopped.url], Unreachable)
    assert holds(good, 2, snapshot)
    stopped.go_on()
    assert isinstance(sender.publish(snapshot, version(2), epoch, peers(engines))[stopped.url], Ack)
    assert holds(stopped, 2, snapshot)


def test_a_restarted_engine_is_served_again(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int
) -> None:
    sender.publish(snapshot_of(60), version(1), epoch, peers(engines))
    engines[1].restart()
    assert engines[1].state().version is None

    snapshot = snapshot_of(61)
    answers = sender.publish(snapshot, version(2), epoch, peers(engines))

    assert all(isinstance(answer, Ack) for answer in answers.values())
    assert all(holds(engine, 2, snapshot) for engine in engines)


def test_a_lower_epoch_is_refused_everywhere(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int, medium: Through
) -> None:
    urls = [engine.url for engine in engines]
    snapshot = snapshot_of(70)
    sender.publish(snapshot, version(1), epoch, peers(engines))

    newer = next(epochs)
    other = WeightsSender(TIMEOUT_S)
    assert other.fence(newer, urls) == dict.fromkeys(urls)

    for answers in (
        sender.publish(snapshot_of(71), version(2), epoch, peers(engines)),
        sender.relabel(version(2), snapshot.digest, epoch, urls),
        sender.fence(epoch, urls),
        WeightsSender(TIMEOUT_S, medium).publish(
            snapshot_of(71), version(2), epoch, peers(engines)
        ),
    ):
        assert all(isinstance(answer, EpochRefused) for answer in answers.values())
    assert all(holds(engine, 1, snapshot) for engine in engines)
    assert all(engine.state().epoch == newer for engine in engines)


def test_a_relabel_is_accepted_for_equal_bytes_only(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int
) -> None:
    url = engines[0].url
    snapshot = snapshot_of(80)
    sender.publish(snapshot, version(1), epoch, [engines[0].peer])

    wrong = sender.relabel(version(2), snapshot_of(81).digest, epoch, [url])[url]
    assert isinstance(wrong, DigestMismatch)
    assert holds(engines[0], 1, snapshot)
    right = sender.relabel(version(2), snapshot.digest, epoch, [url])[url]
    assert right == Ack(version=version(2), digest=snapshot.digest)
    assert holds(engines[0], 2, snapshot)


@over_the_group
def test_a_fresh_engine_is_relabelled_when_it_loaded_those_very_bytes(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int
) -> None:
    engines[0].restart()
    url = engines[0].url
    loaded = snapshot_of(seed=1)
    assert engines[0].state().version is None

    sender.relabel(version(0), loaded.digest, epoch, [url])

    assert holds(engines[0], 0, loaded)


def test_a_model_with_other_parameters_is_refused(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int
) -> None:
    url = engines[0].url
    answers = sender.publish(snapshot_of(90, size=(1024, 3)), version(1), epoch, [engines[0].peer])

    assert isinstance(answers[url], PlanRefused)


@pytest.mark.parametrize("how", ["die", "stop"])
def test_a_sender_lost_in_mid_update_leaves_no_version_until_another_comes(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int, how: str, tmp_path: Path
) -> None:
    engine = engines[0]
    sender.publish(snapshot_of(101), version(1), epoch, [engine.peer])
    process = begin_update(tmp_path, snapshot_of(100), engine.url, epoch, 2.0, how)
    try:
        wait_until(lambda: engine.state().version is None, "the interrupted update is noticed")
        snapshot = snapshot_of(102)
        newer = next(epochs)
        assert isinstance(
            sender.publish(snapshot, version(8), newer, [engine.peer])[engine.url], Ack
        )
        process.send_signal(signal.SIGCONT)
        process.wait(30)
        assert holds(engine, 8, snapshot)
        assert engine.state().epoch == newer
    finally:
        process.kill()
        process.wait()


def test_a_newer_trainer_does_not_wait_for_what_a_stopped_one_was_sending(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int, tmp_path: Path
) -> None:
    engine = engines[0]
    process = begin_update(tmp_path, snapshot_of(100), engine.url, epoch, 600.0, "stop")
    try:
        snapshot = snapshot_of(110)
        answers = sender.publish(snapshot, version(8), next(epochs), [engine.peer])
        assert isinstance(answers[engine.url], Ack)
        assert holds(engine, 8, snapshot)
    finally:
        process.kill()
        process.wait()


def test_the_default_process_group_is_never_touched(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int
) -> None:
    sender.publish(snapshot_of(120), version(1), epoch, [engines[0].peer])

    assert not torch.distributed.is_initialized()
