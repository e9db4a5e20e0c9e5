"""Trimming: what the oldest kept checkpoint needs stays, whatever lies in the store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from connectors.kafka.client import Cluster, KafkaFailure, Producer, Reader
from connectors.kafka.topics import ensure_topics
from connectors.records import Begin, Coordinate, Fork, Manifest, Version, encode
from connectors.settled import Intervals
from tests.small_run import until
from trainer import trim
from trainer.checkpoint import CheckpointStore
from trainer.checkpoint_meta import CheckpointMeta
from trainer.feed_state import (
    FIRST_VERSION,
    Bits,
    Entry,
    FeedState,
    Queued,
    TrafficState,
    Unread,
    fresh,
)
from trainer.step_log import Chain, read_steps
from trainer.trim import Trimmer

ORDER = (3, 0, 5, 1, 2, 4)
"""Prompts of partition 0 in the order of their records in `rollouts`."""


def group_id(cluster: Cluster, offset: int, partition: int = 0) -> str:
    return f"{cluster.topic('prompts')}/{partition}/{offset}"


def manifest(step: int, epoch: int = 0) -> Manifest:
    return Manifest(
        step=step, epoch=epoch, version=Version(0, step), records=(), micro_batches=(), seed=0,
        digest_before=f"d{step - 1}", digest=f"d{step}",
    )  # fmt: skip


class World:
    """Five steps in `steps` (offsets 1 to 5), six groups in `rollouts/0`, and a store."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.store = CheckpointStore(folder, keep=9)
        ensure_topics(cluster, {"steps": 1, "rollouts": 2, "trajectories": 2})
        self._producer = Producer(cluster)
        begin = Begin(epoch=None, writer="w", resumed_step=0, started_at=0.0)
        self.write("steps", [encode(r) for r in (begin, *map(manifest, range(1, 6)))])
        self.write("rollouts", [b""] * 6, [group_id(cluster, offset) for offset in ORDER])
        self.write("trajectories", [b""] * 20)

    def write(self, topic: str, values: list[bytes], keys: list[str] | None = None) -> None:
        for value, key in zip(values, keys or [""] * len(values), strict=True):
            self._producer.send(self.cluster.topic(topic), 0, value, key=key.encode())
        self._producer.flush()

    def save(self, step: int, feed: FeedState, digest: str | None = None) -> None:
        meta = CheckpointMeta(
            step=step, version=Version(0, step), digest=digest or f"d{step}", epoch=0, feed=feed
        )
        self.store.save(step, lambda folder: None, encode(meta))

    def keep(self, count: int) -> None:
        self.store = CheckpointStore(self.store.url, keep=count)

    def starts(self, topic: str) -> int:
        with closing(Reader(self.cluster, self.cluster.topic(topic), {0: 0})) as reader:
            return reader.starts()[0]

    def trim(self, keep: int = 1, **settings: bool) -> dict[str, int]:
        with closing(Trimmer(self.cluster, self.store, keep, **settings)) as trimmer:
            trimmer.wake()  # what was asked for before the end is done before the end
        return {name: self.starts(name) for name in ("steps", "trajectories", "rollouts")}

    def close(self) -> None:
        self._producer.close()


@pytest.fixture
def world(cluster: Cluster, tmp_path: Path) -> Iterator[World]:
    made = World(cluster, tmp_path / "store")
    yield made
    made.close()


def ledger(
    cluster: Cluster, *, read: int, open_at: int | None = None, frontier: int = 0,
    settled: Intervals = (), unread: tuple[int, ...] = (),
) -> FeedState:  # fmt: skip
    """`open_at`: where in `trajectories` the one open group that arrived lies."""
    where = group_id(cluster, 5)
    entries = () if open_at is None else (
        Entry(
            group_id=where, partition=0, offset=5, oldest=FIRST_VERSION, newest=FIRST_VERSION,
            admitted_at=FIRST_VERSION, order=0, coordinate=Coordinate(0, open_at, 0, where),
        ),
    )  # fmt: skip
    return msgspec.structs.replace(
        fresh(2),
        read=(read, 0),
        frontier=(frontier, 0),
        settled=(settled, ()),
        open=entries,
        unread={group_id(cluster, offset): Unread("trained") for offset in unread},
    )


def test_the_fork_that_leads_on_from_the_oldest_checkpoint_is_kept(world: World) -> None:
    fork = Begin(
        epoch=None, writer="f", resumed_step=3, started_at=0.0, incarnation=1, digest="d3",
        fork=Fork(parent=0, number=3, reason="rollback"),
    )  # fmt: skip
    fourth = msgspec.structs.replace(manifest(4, epoch=6), version=Version(1, 4))
    world.write("steps", [encode(fork), encode(fourth)])
    world.save(3, fresh(2))
    assert world.trim()["steps"] == 6
    chain = Chain()
    for offset, record in read_steps(world.cluster):
        chain.observe(offset, record)
    assert (chain.version, chain.breaks) == (Version(1, 4), [])
    assert chain.holds(3, Version(0, 3), "d3")
    assert chain.after(Version(0, 3)) == [chain.forks[0], fourth]


def test_everything_before_the_oldest_kept_checkpoint_goes(world: World) -> None:
    world.save(3, ledger(world.cluster, read=9, frontier=4, settled=((5, 6),)))
    world.save(5, ledger(world.cluster, read=18, frontier=6))
    # `rollouts` holds prompts 3 0 5 1 2 4: all but the last had ended at step 3.
    assert world.trim() == {"steps": 4, "trajectories": 9, "rollouts": 5}


def test_a_group_that_arrived_and_waits_keeps_its_record(world: World) -> None:
    world.save(3, ledger(world.cluster, read=9, open_at=6, frontier=4))
    assert world.trim() == {"steps": 4, "trajectories": 6, "rollouts": 2}


def test_a_group_whose_end_was_not_read_keeps_its_rollout(world: World) -> None:
    world.save(3, ledger(world.cluster, read=9, frontier=6, unread=(1,)))
    assert world.trim()["rollouts"] == 3


def test_the_next_time_it_reads_on_from_there(world: World) -> None:
    with closing(Trimmer(world.cluster, world.store, 1)) as trimmer:
        world.save(2, ledger(world.cluster, read=5, frontier=4))
        trimmer.trim()
        assert world.starts("rollouts") == 2
        world.write("rollouts", [b""], [group_id(world.cluster, 6)])
        world.keep(1)
        world.save(4, ledger(world.cluster, read=15, frontier=6))
        trimmer.trim()
        assert (world.starts("rollouts"), world.starts("trajectories")) == (6, 15)


def test_the_last_step_keeps_its_manifest_while_none_follows(world: World) -> None:
    world.save(5, ledger(world.cluster, read=9))
    assert world.trim()["steps"] == 5


def test_checkpoints_that_are_not_on_the_chain_move_nothing(world: World) -> None:
    world.save(2, ledger(world.cluster, read=19, frontier=6), digest="of another run")
    assert world.trim() == {"steps": 0, "trajectories": 0, "rollouts": 0}
    world.save(3, ledger(world.cluster, read=4))
    assert world.trim() == {"steps": 4, "trajectories": 4, "rollouts": 0}


def test_a_damaged_checkpoint_does_not_hold_the_log(world: World) -> None:
    world.save(1, ledger(world.cluster, read=2))
    world.save(3, ledger(world.cluster, read=9))
    (Path(world.store.url) / "step-00000001" / "meta").unlink()
    assert world.trim()["trajectories"] == 9


def test_a_checkpoint_of_another_kind_does_not_hold_the_log(world: World) -> None:
    world.store.save(1, lambda folder: None, b'{"something": "else"}')
    world.save(3, ledger(world.cluster, read=9))
    assert world.trim()["trajectories"] == 9


def test_nothing_goes_while_fewer_checkpoints_lead_on_than_are_to_be_kept(world: World) -> None:
    world.save(1, ledger(world.cluster, read=2))
    world.save(3, ledger(world.cluster, read=9))
    (Path(world.store.url) / "step-00000001" / "meta").unlink()
    assert world.trim(keep=2)["trajectories"] == 0
    world.save(5, ledger(world.cluster, read=12))
    assert world.trim(keep=2)["trajectories"] == 9


def test_without_a_checkpoint_nothing_goes(world: World) -> None:
    assert world.trim() == {"steps": 0, "trajectories": 0, "rollouts": 0}


def test_a_shadow_trims_its_own_steps_alone(world: World) -> None:
    world.save(3, ledger(world.cluster, read=9, frontier=6))
    assert world.trim(shadow=True) == {"steps": 4, "trajectories": 0, "rollouts": 0}


def test_a_record_that_names_no_group_goes_with_those_around_it(world: World) -> None:
    world.write("rollouts", [b"", b"", b""], ["foreign", group_id(world.cluster, 6), "foreign"])
    world.save(3, ledger(world.cluster, read=9, frontier=7))
    assert world.trim()["rollouts"] == 8  # not the last: no group behind it had ended


def raises(error: Exception) -> Callable[..., None]:
    def call(*arguments: object) -> None:
        raise error

    return call


def test_a_broker_that_is_away_puts_it_off_and_a_bug_is_raised(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.save(3, ledger(world.cluster, read=9))
    with closing(Trimmer(world.cluster, world.store, 1)) as trimmer:
        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
            patched.setattr(trim, "delete_records", raises(KafkaFailure("it is away")))
            trimmer.wake()
            until(lambda: "not trimmed this time: it is away" in caplog.text, "the warning")
        trimmer.wake()
        until(lambda: world.starts("trajectories") == 9, "trimming")
        monkeypatch.setattr(trim, "delete_records", raises(KeyError("a bug")))
        trimmer.wake()
        until(lambda: trimmer._failure is not None, "the failure")
        with pytest.raises(KeyError):
            trimmer.wake()


def test_live_traffic_goes_once_it_ended_and_what_is_queued_keeps_its_record(world: World) -> None:
    """`rollouts` begins with prompts 3 0 5 1 2 4, all of which ended; then three sessions."""
    calls = [f"{world.cluster.topic('agent-traffic')}/0/{offset}" for offset in (2, 7, 11)]
    world.write("rollouts", [b"", b"", b""], calls)
    feed = ledger(world.cluster, read=9, frontier=6)
    ended = {calls[0].rpartition("/")[0]: Bits(0, bytes([1 << 2]))}
    queue = (Queued(Coordinate(0, 7, 0, calls[1]), None),)
    traffic = TrafficState(ended=ended, queue=queue)
    world.save(3, msgspec.structs.replace(feed, traffic=traffic))
    assert world.trim() == {"steps": 4, "trajectories": 7, "rollouts": 7}
