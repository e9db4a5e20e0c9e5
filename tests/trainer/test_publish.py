"""The publisher beside real engine processes: who gets what, when it is announced, what never
waits."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from connectors.records import Version
from connectors.weights import EpochRefused, Snapshot, Through, WeightsSender, plan, shapes_of
from tests.connectors.weights_engine import model
from tests.connectors.weights_process import EngineProcess, answering, two_engines, wait_until
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

    def __init__(self, urls: list[str], timeout_s: float, through: Through) -> None:
        self.urls = urls
        self.epoch = next(epochs)
        self.announced: list[tuple[Version, str]] = []
        self.on_published: Callable[[], None] = lambda: None
        self.publisher = Publisher(
            lambda: list(self.urls),
            epoch=self.epoch,
            timeout_s=timeout_s,
            on_published=self._published,
            through=through,
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


def num_loads(engine: EngineProcess) -> int:
    return int(engine.state().info["num_loads"])


@pytest.fixture(scope="module")
def processes() -> Iterator[list[EngineProcess]]:
    with two_engines(*SIZE) as engines:
        yield engines


@pytest.fixture
def engines(processes: list[EngineProcess]) -> list[EngineProcess]:
    return answering(processes)


@pytest.fixture
def start() -> Iterator[Callable[..., Trainer]]:
    trainers: list[Trainer] = []

    def one(*engines: EngineProcess, timeout_s: float = 3.0, through: Through = "auto") -> Trainer:
        trainers.append(Trainer([engine.url for engine in engines], timeout_s, through))
        return trainers[-1]

    yield one
    for trainer in trainers:
        trainer.publisher.close()


Start = Callable[..., Trainer]
both = pytest.mark.parametrize("through", ["memory", "group"])


@both
def test_a_version_is_announced_once_every_engine_holds_it(
    engines: list[EngineProcess], start: Start, through: Through
) -> None:
    trainer = start(*engines, through=through)
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


@pytest.mark.parametrize("held", ["ahead", "behind", "mixed", "equal bytes"])
def test_whatever_engines_hold_when_a_trainer_recovers_they_come_to_its_version(
    engines: list[EngineProcess], start: Start, held: str
) -> None:
    """Step 5, which a rollback left; ahead is what that gave up."""
    forked, snapshot = Version(1, 5), snapshot_of(45)
    before = start(*engines)
    ahead = snapshot_of(49) if held != "equal bytes" else snapshot_of(45)
    before.publish(3 if held == "behind" else 9, ahead)
    for engine in engines:
        wait_until(lambda e=engine: e.state().digest == ahead.digest, "both hold it")
    before.publisher.close()
    if held == "mixed":
        engines[1].restart()
    sent = [num_updates(engine) for engine in engines]

    after = start(*engines)
    after.publisher.submit(snapshot, forked)

    for engine in engines:
        wait_until(
            lambda e=engine: (e.state().version, e.state().digest) == (forked, snapshot.digest),
            f"{engine.url} comes to {forked}",
        )
    if held == "equal bytes":
        assert [num_updates(engine) for engine in engines] == sent, "only the version is told"


def test_without_an_engine_it_waits_and_then_publishes_the_newest_only(
    engines: list[EngineProcess], start: Start
) -> None:
    trainer = start()
    submitted = time.monotonic()
    for number in (1, 2, 3):
        trainer.publisher.submit(
            snapshot_of(50 + number, trainer.publisher.spare()), version(number)
        )
    assert not trainer.publisher.wait_published(version(1), 0.5)
    sent = num_updates(engines[0])

    trainer.urls.append(engines[0].url)

    assert trainer.publisher.wait_published(version(3), WAIT_S)
    assert trainer.announced == [(version(3), snapshot_of(53).digest)]
    waited_s = time.monotonic() - submitted
    assert trainer.publisher.last_seconds < waited_s - 0.2, "waiting for an engine is no publish"
    assert num_updates(engines[0]) == sent + 1


@both
@pytest.mark.parametrize("how", ["refuse", "flip", "write", "lie"])
def test_a_failed_update_is_no_success_and_is_tried_again(
    engines: list[EngineProcess], start: Start, how: str, through: Through
) -> None:
    trainer = start(engines[0], through=through)
    trainer.publish(1, snapshot_of(60))
    failures: list[bool] = []
    snapshot = snapshot_of(61)
    trainer.on_published = lambda: failures.append(holds(engines[0], 2, snapshot))
    engines[0].fail_next(how)

    trainer.publish(2, snapshot)

    assert failures == [True], "announced only after the second attempt"
    assert trainer.publisher.failures == {}


@both
def test_a_killed_engine_does_not_keep_the_other_from_being_announced(
    engines: list[EngineProcess], start: Start, through: Through
) -> None:
    trainer = start(*engines, through=through)
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
    """The engine stops in mid-broadcast; the trainer goes on stepping, reusing buffers, and the
    engine still receives exactly one whole version in the end."""
    trainer = start(engines[0], timeout_s=600.0, through="group")
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


def test_an_engine_stopped_while_it_reads_keeps_its_buffer_and_holds_up_no_other(
    engines: list[EngineProcess], start: Start
) -> None:
    trainer = start(*engines, timeout_s=600.0, through="memory")
    publisher = trainer.publisher
    trainer.publish(1, snapshot_of(140))
    for engine in engines:
        wait_holds(engine, 1, snapshot_of(140))
    loaded = num_loads(engines[1])
    engines[1].fail_next("stop")
    read = snapshot_of(141, publisher.spare())
    publisher.submit(read, version(2))
    assert publisher.wait_published(version(2), WAIT_S), "the other engine holds it"
    assert engines[1].url in publisher.failures

    buffers = set()
    for number in (3, 4, 5, 6):
        snapshot = snapshot_of(140 + number, publisher.spare())
        buffers.add(snapshot.buckets[0].data_ptr())
        trainer.publish(number, snapshot)
        assert holds(engines[0], number, snapshot)

    assert len(buffers) == 2, "one current, one to write to"
    assert read.buckets[0].data_ptr() not in buffers
    engines[1].go_on()
    wait_holds(engines[1], 6, snapshot)
    assert num_loads(engines[1]) == loaded + 2, "the one it was reading, and 6"


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
        snapshot_of(110), version(1), newer.epoch - 1, [engines[0].peer]
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


@both
def test_closing_does_not_wait_for_a_stopped_engine(
    engines: list[EngineProcess], start: Start, through: Through
) -> None:
    trainer = start(engines[0], timeout_s=600.0, through=through)
    trainer.publish(1, snapshot_of(130))
    engines[0].fail_next("stop")
    trainer.publisher.submit(snapshot_of(131), version(2))
    engines[0].wait_stopped()

    trainer.publisher.close()

    assert "publisher" not in [thread.name for thread in threading.enumerate()]
