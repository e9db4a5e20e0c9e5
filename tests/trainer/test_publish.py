"""The publisher beside real engine processes: who gets what, when it is announced, what never
waits."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from connectors.records import Version
from connectors.weights import EpochRefused, Snapshot, WeightsSender, plan, shapes_of
from tests.connectors.weights_engine import model
from tests.connectors.weights_process import EngineProcess, wait_until
from trainer.publish import Publisher, UnchangedWeights

SIZE = (1024, 4)
PLAN = plan(shapes_of(model(*SIZE, 0).named_parameters()), torch.float32, bucket_bytes=4 << 20)
WAIT_S = 30.0
epochs = itertools.count(1)


def snapshot_of(seed: int, into: Snapshot | None = None) -> Snapshot:
    return Snapshot.take(model(*SIZE, seed).named_parameters(), PLAN, into=into)


def version(number: int) -> Version:
    return Version(0, number)


class Trainer:
    """A publisher and what it announced; `urls` is what discovery finds."""

    def __init__(self, urls: list[str], timeout_s: float = 3.0) -> None:
        self.urls = urls
        self.epoch = next(epochs)
        self.announced: list[tuple[Version, str]] = []
        self.on_published: Callable[[], None] = lambda: None
        self.publisher = Publisher(
            lambda: list(self.urls),
            epoch=self.epoch,
            timeout_s=timeout_s,
            on_published=self._published,
            poll_s=0.2,
        )

    def _published(self, version: Version, digest: str, seconds: float) -> None:
        assert seconds > 0
        self.announced.append((version, digest))
        self.on_published()

    def publish(self, number: int, snapshot: Snapshot) -> None:
        self.publisher.submit(snapshot, version(number))
        assert self.publisher.wait_published(version(number), WAIT_S)


def holds(engine: EngineProcess, number: int, snapshot: Snapshot) -> bool:
    state = engine.state()
    return (state.version, state.digest) == (version(number), snapshot.digest)


def wait_holds(engine: EngineProcess, number: int, snapshot: Snapshot) -> None:
    wait_until(lambda: holds(engine, number, snapshot), f"{engine.url} holds {number}")


def num_updates(engine: EngineProcess) -> int:
    return int(engine.state().info["num_updates"])


@pytest.fixture(scope="module")
def processes() -> Iterator[list[EngineProcess]]:
    torch.set_num_threads(1)
    engines = [EngineProcess(*SIZE, seed=1), EngineProcess(*SIZE, seed=2)]
    yield engines
    for engine in engines:
        engine.kill9()


@pytest.fixture
def engines(processes: list[EngineProcess]) -> list[EngineProcess]:
    for engine in processes:
        if engine.exited:
            engine.restart()
        engine.go_on()
    return processes


@pytest.fixture
def start() -> Iterator[Callable[..., Trainer]]:
    trainers: list[Trainer] = []

    def one(*engines: EngineProcess, timeout_s: float = 3.0) -> Trainer:
        trainers.append(Trainer([engine.url for engine in engines], timeout_s))
        return trainers[-1]

    yield one
    for trainer in trainers:
        trainer.publisher.close()


Start = Callable[..., Trainer]


def test_a_version_is_announced_once_every_engine_holds_it(
    engines: list[EngineProcess], start: Start
) -> None:
    trainer = start(*engines)
    held_then: list[bool] = []
    trainer.publish(1, snapshot_of(10))
    for engine in engines:  # at the start they may be found one after the other
        wait_holds(engine, 1, snapshot_of(10))
    snapshot = snapshot_of(11)
    trainer.on_published = lambda: held_then.extend(holds(e, 2, snapshot) for e in engines)
    trainer.publish(2, snapshot)

    assert held_then == [True, True]
    assert trainer.announced == [
        (version(1), snapshot_of(10).digest),
        (version(2), snapshot.digest),
    ]
    assert trainer.publisher.last_seconds == trainer.publisher.latencies[-1] > 0


def test_a_version_with_the_same_bytes_is_relabelled_not_sent(
    engines: list[EngineProcess], start: Start
) -> None:
    """A step that was skipped makes a version, not new weights."""
    trainer = start(engines[0])
    snapshot = snapshot_of(20)
    trainer.publish(1, snapshot)
    sent = num_updates(engines[0])

    trainer.publish(2, snapshot)
    trainer.publish(3, snapshot_of(20, trainer.publisher.spare()))

    assert holds(engines[0], 3, snapshot)
    assert num_updates(engines[0]) == sent
    assert [announced for announced, _ in trainer.announced] == [version(n) for n in (1, 2, 3)]


def test_an_engine_that_comes_later_gets_the_version_without_a_step(
    engines: list[EngineProcess], start: Start
) -> None:
    trainer = start(engines[0])
    snapshot = snapshot_of(30)
    trainer.publish(1, snapshot)

    trainer.urls.append(engines[1].url)

    wait_holds(engines[1], 1, snapshot)
    assert trainer.announced == [(version(1), snapshot.digest)], "announced once"


def test_a_restarted_engine_gets_the_version_without_a_step(
    engines: list[EngineProcess], start: Start
) -> None:
    trainer = start(*engines)
    snapshot = snapshot_of(40)
    trainer.publish(1, snapshot)

    engines[1].restart()

    wait_holds(engines[1], 1, snapshot)


def test_without_an_engine_it_waits_and_then_publishes_the_newest_only(
    engines: list[EngineProcess], start: Start
) -> None:
    trainer = start()
    for number in (1, 2, 3):
        trainer.publisher.submit(
            snapshot_of(50 + number, trainer.publisher.spare()), version(number)
        )
    assert not trainer.publisher.wait_published(version(1), 0.5)
    sent = num_updates(engines[0])

    trainer.urls.append(engines[0].url)

    assert trainer.publisher.wait_published(version(3), WAIT_S)
    assert trainer.announced == [(version(3), snapshot_of(53).digest)]
    assert num_updates(engines[0]) == sent + 1


@pytest.mark.parametrize("how", ["refuse", "flip", "write", "lie"])
def test_a_failed_update_is_no_success_and_is_tried_again(
    engines: list[EngineProcess], start: Start, how: str
) -> None:
    trainer = start(engines[0])
    trainer.publish(1, snapshot_of(60))
    failures: list[bool] = []
    snapshot = snapshot_of(61)
    trainer.on_published = lambda: failures.append(holds(engines[0], 2, snapshot))
    engines[0].fail_next(how)

    trainer.publish(2, snapshot)

    assert failures == [True], "announced only after the second attempt"
    assert trainer.publisher.failures == {}


def test_a_killed_engine_does_not_keep_the_other_from_being_announced(
    engines: list[EngineProcess], start: Start
) -> None:
    trainer = start(*engines)
    trainer.publish(1, snapshot_of(70))
    wait_holds(engines[1], 1, snapshot_of(70))
    engines[1].fail_next("die")

    snapshot = snapshot_of(71)
    trainer.publish(2, snapshot)

    assert holds(engines[0], 2, snapshot)
    assert engines[1].url in trainer.publisher.failures


def test_a_stopped_engine_blocks_no_step_and_its_bytes_are_never_overwritten(
    engines: list[EngineProcess], start: Start
) -> None:
    """The engine stops in mid-update; the trainer goes on stepping, reusing buffers, and the engine
    still receives exactly one whole version in the end."""
    trainer = start(engines[0], timeout_s=600.0)
    publisher = trainer.publisher
    trainer.publish(1, snapshot_of(80))
    engines[0].fail_next("stop")
    sending = snapshot_of(81, publisher.spare())
    publisher.submit(sending, version(2))
    engines[0].wait_stopped()

    snapshots = []
    for number in (3, 4, 5):
        snapshots.append(snapshot_of(80 + number, publisher.spare()))
        publisher.submit(snapshots[-1], version(number))

    buffers = {snapshot.buckets[0].data_ptr() for snapshot in snapshots}
    assert len(buffers) == 1, "waiting snapshots replace each other in one set of buffers"
    assert sending.buckets[0].data_ptr() not in buffers
    assert publisher.published == version(1)
    engines[0].go_on()
    assert publisher.wait_published(version(5), WAIT_S)
    assert [announced for announced, _ in trainer.announced] == [version(n) for n in (1, 2, 5)]
    assert trainer.announced[-1][1] == engines[0].state().digest == snapshot_of(85).digest


def test_unchanged_bytes_after_a_changed_master_are_refused(
    engines: list[EngineProcess], start: Start
) -> None:
    trainer = start(engines[0])
    snapshot = snapshot_of(90)
    trainer.publisher.submit(snapshot, version(1), master_changed=True)
    trainer.publisher.submit(snapshot, version(2), master_changed=False)

    with pytest.raises(UnchangedWeights, match=snapshot.digest):
        trainer.publisher.submit(snapshot_of(90), version(3), master_changed=True)


def test_a_fenced_trainer_is_told_by_its_publisher(
    engines: list[EngineProcess], start: Start
) -> None:
    old = start(engines[0])
    old.publish(1, snapshot_of(100))
    newer = start(engines[0])
    snapshot = snapshot_of(101)
    newer.publish(1, snapshot)

    def fenced() -> bool:
        try:
            old.publisher.check()
        except EpochRefused:
            return True
        return False

    wait_until(fenced, "the older trainer learns that it is fenced")
    with pytest.raises(EpochRefused):
        old.publisher.submit(snapshot_of(102), version(2))
    assert holds(engines[0], 1, snapshot)


def test_a_starting_trainer_fences_the_older_one_before_it_has_weights(
    engines: list[EngineProcess], start: Start
) -> None:
    newer = start(engines[0])
    wait_until(lambda: engines[0].state().epoch == newer.epoch, "the engine knows the new epoch")

    older = WeightsSender(3.0).publish(
        snapshot_of(110), version(1), newer.epoch - 1, [engines[0].url]
    )
    assert isinstance(older[engines[0].url], EpochRefused)


def test_a_failing_callback_surfaces_in_the_owner(
    engines: list[EngineProcess], start: Start
) -> None:
    trainer = start(engines[0])

    def fail() -> None:
        raise RuntimeError("the feed is gone")

    trainer.on_published = fail
    trainer.publisher.submit(snapshot_of(120), version(1))
    with pytest.raises(RuntimeError, match="the feed is gone"):
        trainer.publisher.wait_published(version(1), WAIT_S)
    with pytest.raises(RuntimeError, match="the feed is gone"):
        trainer.publisher.check()


def test_closing_does_not_wait_for_a_stopped_engine(
    engines: list[EngineProcess], start: Start
) -> None:
    trainer = start(engines[0], timeout_s=600.0)
    trainer.publish(1, snapshot_of(130))
    engines[0].fail_next("stop")
    trainer.publisher.submit(snapshot_of(131), version(2))
    engines[0].wait_stopped()

    trainer.publisher.close()

    assert "publisher" not in [thread.name for thread in threading.enumerate()]
