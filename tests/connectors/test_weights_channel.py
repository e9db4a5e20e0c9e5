"""Weights from a sender to engine processes over gloo, and everything that gets in the way."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from connectors.records import Version
from connectors.weights import Ack, Snapshot, WeightsError, WeightsSender, plan, shapes_of
from connectors.weights.wire import DigestMismatch, EpochRefused, PlanRefused, Unreachable
from tests.connectors.weights_engine import model
from tests.connectors.weights_process import EngineProcess, wait_until

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
    torch.set_num_threads(1)
    engines = [EngineProcess(*SIZE, seed=1), EngineProcess(*SIZE, seed=2)]
    yield engines
    for engine in engines:
        engine.kill9()


@pytest.fixture
def engines(processes: list[EngineProcess]) -> list[EngineProcess]:
    """Two engines that answer; which version they hold is the test before's."""
    for engine in processes:
        if engine.exited:
            engine.restart()
        engine.go_on()
    return processes


@pytest.fixture
def sender() -> Iterator[WeightsSender]:
    sender = WeightsSender(TIMEOUT_S)
    yield sender
    sender.close()


@pytest.fixture
def epoch() -> int:
    """Higher than any before: engines remember."""
    return next(epochs)


def holds(engine: EngineProcess, number: int, snapshot: Snapshot) -> bool:
    state = engine.state()
    return (state.version, state.digest) == (version(number), snapshot.digest)


def test_every_engine_gets_the_bytes_and_says_so(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int
) -> None:
    urls = [engine.url for engine in engines]
    for number in (1, 2):
        snapshot = snapshot_of(seed=10 + number)
        answers = sender.publish(snapshot, version(number), epoch, urls)

        ack = Ack(version=version(number), digest=snapshot.digest)
        assert answers == dict.fromkeys(urls, ack)
        assert all(holds(engine, number, snapshot) for engine in engines)
        assert all(engine.state().epoch == epoch for engine in engines)


@pytest.mark.parametrize("how", ["refuse", "flip", "write", "lie"])
def test_an_engine_that_does_not_take_the_bytes_never_counts_as_served(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int, how: str
) -> None:
    """HTTP errors, a digest that differs, a write that fails, an acknowledgement of another
    version."""
    good, bad = engines
    urls = [engine.url for engine in engines]
    assert sender.publish(snapshot_of(20), version(1), epoch, urls).keys() == set(urls)
    snapshot = snapshot_of(21)
    bad.fail_next(how)

    answers = sender.publish(snapshot, version(2), epoch, urls)

    assert isinstance(answers[good.url], Ack)
    assert holds(good, 2, snapshot)
    assert isinstance(answers[bad.url], WeightsError)
    if how in ("flip", "write"):
        assert bad.state().version is None
    if how == "flip":
        assert isinstance(answers[bad.url], DigestMismatch)
    if how == "write":
        assert bad.state().digest == "", "half-written weights are no version's"
    assert isinstance(sender.publish(snapshot, version(2), epoch, [bad.url])[bad.url], Ack)
    assert holds(bad, 2, snapshot)


@pytest.mark.parametrize("joined", [True, False], ids=["in-the-group", "newcomer"])
def test_a_killed_engine_costs_the_other_nothing(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int, joined: bool
) -> None:
    good, dead = engines
    urls = [engine.url for engine in engines]
    if joined:
        sender.publish(snapshot_of(30), version(1), epoch, urls)
    dead.kill9()

    snapshot = snapshot_of(31)
    answers = sender.publish(snapshot, version(2), epoch, urls)

    assert isinstance(answers[dead.url], Unreachable)
    assert holds(good, 2, snapshot)


@pytest.mark.parametrize("how", ["die", "stop"])
def test_an_engine_lost_during_the_broadcast_costs_the_other_a_second_group(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int, how: str
) -> None:
    good, lost = engines
    urls = [engine.url for engine in engines]
    sender.publish(snapshot_of(40), version(1), epoch, urls)
    lost.fail_next(how)

    snapshot = snapshot_of(41)
    answers = sender.publish(snapshot, version(2), epoch, urls)

    assert isinstance(answers[lost.url], Unreachable)
    assert isinstance(answers[good.url], Ack)
    assert holds(good, 2, snapshot)


def test_an_engine_stopped_before_the_update_costs_the_other_nothing(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int
) -> None:
    good, stopped = engines
    urls = [engine.url for engine in engines]
    sender.publish(snapshot_of(50), version(1), epoch, urls)
    stopped.stop()
    snapshot = snapshot_of(51)

    answers = sender.publish(snapshot, version(2), epoch, urls)

    assert isinstance(answers[stopped.url], Unreachable)
    assert holds(good, 2, snapshot)
    stopped.go_on()
    assert isinstance(sender.publish(snapshot, version(2), epoch, urls)[stopped.url], Ack)
    assert holds(stopped, 2, snapshot)


def test_a_restarted_engine_is_taken_into_a_fresh_group(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int
) -> None:
    urls = [engine.url for engine in engines]
    sender.publish(snapshot_of(60), version(1), epoch, urls)
    engines[1].restart()
    assert engines[1].state().version is None

    snapshot = snapshot_of(61)
    answers = sender.publish(snapshot, version(2), epoch, urls)

    assert all(isinstance(answer, Ack) for answer in answers.values())
    assert all(holds(engine, 2, snapshot) for engine in engines)


def test_a_lower_epoch_is_refused_everywhere(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int
) -> None:
    urls = [engine.url for engine in engines]
    snapshot = snapshot_of(70)
    sender.publish(snapshot, version(1), epoch, urls)

    newer = next(epochs)
    other = WeightsSender(TIMEOUT_S)
    assert other.fence(newer, urls) == dict.fromkeys(urls)

    for answers in (
        sender.publish(snapshot_of(71), version(2), epoch, urls),
        sender.relabel(version(2), snapshot.digest, epoch, urls),
        sender.fence(epoch, urls),
        WeightsSender(TIMEOUT_S).publish(snapshot_of(71), version(2), epoch, urls),
    ):
        assert all(isinstance(answer, EpochRefused) for answer in answers.values())
    assert all(holds(engine, 1, snapshot) for engine in engines)
    assert all(engine.state().epoch == newer for engine in engines)


def test_a_relabel_is_accepted_for_equal_bytes_only(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int
) -> None:
    url = engines[0].url
    snapshot = snapshot_of(80)
    sender.publish(snapshot, version(1), epoch, [url])

    wrong = sender.relabel(version(2), snapshot_of(81).digest, epoch, [url])[url]
    assert isinstance(wrong, DigestMismatch)
    assert holds(engines[0], 1, snapshot)
    right = sender.relabel(version(2), snapshot.digest, epoch, [url])[url]
    assert right == Ack(version=version(2), digest=snapshot.digest)
    assert holds(engines[0], 2, snapshot)


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
    answers = sender.publish(snapshot_of(90, size=(1024, 3)), version(1), epoch, [url])

    assert isinstance(answers[url], PlanRefused)


def begin_update(engine: EngineProcess, epoch: int, timeout_s: float, how: str) -> subprocess.Popen:
    """A trainer that dies or stops after the first byte."""
    program = Path(__file__).with_name("weights_sender.py")
    arguments = [engine.url, *SIZE, 100, epoch, timeout_s, how]
    process = subprocess.Popen(
        [sys.executable, str(program), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "began"
    return process


@pytest.mark.parametrize("how", ["die", "stop"])
def test_a_sender_lost_in_mid_update_leaves_no_version_until_another_comes(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int, how: str
) -> None:
    engine = engines[0]
    sender.publish(snapshot_of(101), version(1), epoch, [engine.url])
    process = begin_update(engine, epoch, timeout_s=2.0, how=how)
    try:
        wait_until(lambda: engine.state().version is None, "the interrupted update is noticed")
        snapshot = snapshot_of(102)
        newer = next(epochs)
        assert isinstance(
            sender.publish(snapshot, version(8), newer, [engine.url])[engine.url], Ack
        )
        process.send_signal(signal.SIGCONT)
        process.wait(30)
        assert holds(engine, 8, snapshot)
        assert engine.state().epoch == newer
    finally:
        process.kill()
        process.wait()


def test_a_newer_trainer_does_not_wait_for_what_a_stopped_one_was_sending(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int
) -> None:
    engine = engines[0]
    process = begin_update(engine, epoch, timeout_s=600.0, how="stop")
    try:
        snapshot = snapshot_of(110)
        answers = sender.publish(snapshot, version(8), next(epochs), [engine.url])
        assert isinstance(answers[engine.url], Ack)
        assert holds(engine, 8, snapshot)
    finally:
        process.kill()
        process.wait()


def test_the_default_process_group_is_never_touched(
    engines: list[EngineProcess], sender: WeightsSender, epoch: int
) -> None:
    sender.publish(snapshot_of(120), version(1), epoch, [engines[0].url])

    assert not torch.distributed.is_initialized()
