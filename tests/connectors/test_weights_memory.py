"""Memory that a trainer shares with engines of its host: who may read and write it when, what is
refused, and what a death or a stop leaves."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from connectors.engines.host import this_host
from connectors.records import Version
from connectors.weights import (
    EpochRefused,
    FenceRequest,
    JoinRequest,
    Plan,
    RelabelRequest,
    Snapshot,
    WeightsReceiver,
    plan,
)
from connectors.weights.memory import check, reading, segment_bytes
from connectors.weights.snapshot import CpuCopies
from connectors.weights.wire import DigestMismatch, MemoryUnreadable, PlanRefused, UpdateAborted
from tests.connectors.weights_reader import in_use, reader, request_for, segment_of

pytestmark = pytest.mark.skipif(not this_host(), reason="memory files are Linux's")

SHAPES = [("a", (3, 5)), ("b", (2000,)), ("c", (7,))]
LAYOUT = plan(SHAPES, torch.float32, bucket_bytes=4000)


def named(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(shape) for name, shape in SHAPES}


def snapshot_of(seed: int, into: Snapshot | None = None) -> Snapshot:
    return Snapshot.take(named(seed), LAYOUT, into=into)


# ------------------------------------------------------------------------------------- the segment
def test_a_snapshot_on_the_cpu_lies_where_others_can_read_its_tensors() -> None:
    snapshot = snapshot_of(1)

    with reading(request_for(snapshot)) as buckets:
        found = dict(Snapshot(LAYOUT, buckets, snapshot.digest).named_tensors())

    assert len(LAYOUT.buckets) > 1
    assert all(torch.equal(found[name], tensor) for name, tensor in named(1).items())


def test_what_a_reader_writes_stays_its_own() -> None:
    snapshot = snapshot_of(1)

    with reading(request_for(snapshot)) as buckets:
        buckets[0].zero_()

    with reading(request_for(snapshot)) as buckets:
        check(buckets, request_for(snapshot), lambda: False)


def open_segments() -> set[str]:
    """This process's descriptors of shared weights; those of other tests are closed any time."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            if "headwater-weights" in os.readlink(f"/proc/self/fd/{descriptor}"):
                found.add(descriptor)
    return found


def test_a_segment_leaves_no_descriptor_behind() -> None:
    gc.collect()
    before = open_segments()
    for seed in range(5):
        snapshot = snapshot_of(seed)
        with reading(request_for(snapshot)):
            pass
    del snapshot
    gc.collect()

    assert open_segments() == before


def test_a_segment_that_somebody_maps_cannot_be_cut_short() -> None:
    """Reading past the end of a mapped file ends a process."""
    snapshot = snapshot_of(1)

    with pytest.raises(PermissionError):
        os.ftruncate(segment_of(snapshot).fd, 0)


def test_beyond_a_limit_of_the_system_weights_are_not_shared_but_taken() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (segment_bytes(LAYOUT) - 1, limits[1]))
    try:
        snapshot = snapshot_of(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert snapshot.segment is None
    assert snapshot.digest == snapshot_of(1).digest


# ---------------------------------------------------------------------------- readers and the owner
def test_the_owner_cannot_write_while_one_of_several_processes_reads() -> None:
    snapshot = snapshot_of(1)
    assert not in_use(snapshot)
    with reader(request_for(snapshot)) as first, reader(request_for(snapshot)) as second:
        assert in_use(snapshot)
        assert first.end() == "whole"
        assert in_use(snapshot), "the other still reads"
        assert second.end() == "whole"
        assert not in_use(snapshot)


def test_a_killed_reader_reads_no_more() -> None:
    snapshot = snapshot_of(1)
    with reader(request_for(snapshot)) as killed:
        assert in_use(snapshot)
        killed.kill9()
        assert not in_use(snapshot)


def test_a_stopped_reader_keeps_the_owner_out_until_it_goes_on() -> None:
    snapshot = snapshot_of(1)
    with reader(request_for(snapshot)) as stopped:
        stopped.signal(signal.SIGSTOP)
        assert in_use(snapshot)
        with pytest.raises(RuntimeError, match="being read"):
            snapshot_of(2, into=snapshot)
        stopped.signal(signal.SIGCONT)
        assert stopped.end() == "whole"
    assert snapshot_of(2, into=snapshot).digest == snapshot_of(2).digest


def test_nobody_begins_to_read_what_the_owner_is_about_to_write() -> None:
    snapshot = snapshot_of(1)
    assert segment_of(snapshot).reserve()

    with pytest.raises(UpdateAborted), reading(request_for(snapshot)):
        pass

    newer = snapshot_of(2, into=snapshot)
    with reading(request_for(newer)) as buckets:
        check(buckets, request_for(newer), lambda: False)


def test_a_late_reader_of_bytes_that_were_overwritten_finds_out() -> None:
    snapshot = snapshot_of(1)
    late = request_for(snapshot)
    snapshot_of(2, into=snapshot)

    with reading(late) as buckets, pytest.raises(DigestMismatch):
        check(buckets, late, lambda: False)


# ------------------------------------------------------------------------------- what is not opened
def test_memory_of_a_process_that_is_gone_is_unreadable() -> None:
    request = request_for(snapshot_of(1))
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)

    with pytest.raises(MemoryUnreadable), reading(replace(request, pid=pid)):
        pass


@pytest.mark.parametrize(
    "layout",
    [plan(SHAPES[:1], torch.float32), plan(SHAPES, torch.float64)],
    ids=["smaller", "larger"],
)
def test_memory_of_another_size_than_the_plans_is_unreadable(layout: Plan) -> None:
    request = request_for(snapshot_of(1))

    for wrong in (
        replace(request, plan=layout),
        replace(request, plan=layout, num_bytes=segment_bytes(layout)),
    ):
        with pytest.raises(MemoryUnreadable), reading(wrong):
            pass


@pytest.fixture
def other_files(tmp_path: Path) -> Iterator[dict[str, int]]:
    """Descriptors of the announced size, where there is one, that are no segments."""
    size = segment_bytes(LAYOUT)
    (tmp_path / "file").write_bytes(bytes(size))
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, size)
    pipe = os.pipe()
    opened = {
        "file": os.open(tmp_path / "file", os.O_RDONLY),
        "unsealed": unsealed,
        "pipe": pipe[0],
        "folder": os.open(tmp_path, os.O_RDONLY),
    }
    yield opened
    for fd in (*opened.values(), pipe[1]):
        os.close(fd)


@pytest.mark.parametrize("kind", ["file", "unsealed", "pipe", "folder"])
def test_a_descriptor_that_is_something_else_now_is_unreadable(
    other_files: dict[str, int], kind: str
) -> None:
    request = request_for(snapshot_of(1))

    with pytest.raises(MemoryUnreadable), reading(replace(request, fd=other_files[kind])):
        pass


def test_a_snapshot_on_a_gpu_is_copied_once_and_the_copys_memory_reused_when_nobody_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tensors only say that they are on one."""
    copies, first, second, third = CpuCopies(), *(snapshot_of(seed) for seed in (1, 2, 3))
    assert copies.of(first) is first, "it lies on the CPU"
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)

    copy = copies.of(first)
    assert copy.digest == first.digest
    assert all(map(torch.equal, copy.buckets, first.buckets))
    assert copies.of(first) is copy
    segment = segment_of(copy)
    assert segment is not first.segment

    assert copies.of(second).segment is segment
    with reading(request_for(copies.of(second))) as buckets:
        assert copies.of(third).segment is not segment
        assert all(map(torch.equal, buckets, second.buckets))


# -------------------------------------------------------------------------------- the receiver
def receiver() -> WeightsReceiver:
    """Holds version 0 of seed 0."""
    made = WeightsReceiver(named(0))
    made.relabel(RelabelRequest(epoch=1, version=Version(0, 0), digest=made.digest))
    return made


def test_a_load_overtaken_by_another_installs_nothing() -> None:
    engine, older, newer = receiver(), snapshot_of(1), snapshot_of(2)

    with engine.loaded(request_for(older)) as late:
        with engine.loaded(request_for(newer)) as staged:
            ack = engine.apply(staged)
        with pytest.raises(UpdateAborted):
            engine.apply(late)

    assert (ack.digest, engine.digest) == (newer.digest, newer.digest)
    assert engine.version == ack.version


def test_a_load_of_a_trainer_that_was_fenced_meanwhile_installs_nothing() -> None:
    engine, snapshot = receiver(), snapshot_of(1)
    before = engine.digest

    with engine.loaded(request_for(snapshot)) as late:
        engine.fence(FenceRequest(epoch=2))
        with pytest.raises(EpochRefused):
            engine.apply(late)

    assert (engine.version, engine.digest) == (Version(0, 0), before)
    assert not in_use(snapshot)


def test_bytes_that_are_not_those_announced_cost_the_engine_nothing() -> None:
    engine, snapshot = receiver(), snapshot_of(1)
    before = engine.digest
    request = replace(request_for(snapshot), digest="0" * 16)

    with pytest.raises(DigestMismatch), engine.loaded(request):
        pass

    assert (engine.version, engine.digest) == (Version(0, 0), before)
    assert not in_use(snapshot)


def misplaced() -> Plan:
    """LAYOUT, but for one slot: the bytes and their digest stay the same."""
    first, *others = LAYOUT.buckets
    return Plan(dtype="float32", buckets=((replace(first[0], offset=1), *first[1:]), *others))


BAD_PLANS = {
    "misplaced": misplaced(),
    "no dtype": replace(LAYOUT, dtype="junk"),
    "an empty bucket": replace(LAYOUT, buckets=(*LAYOUT.buckets, ())),
}


@pytest.mark.parametrize("layout", BAD_PLANS.values(), ids=BAD_PLANS.keys())
def test_a_plan_that_is_none_costs_neither_version_nor_epoch_nor_a_descriptor(layout: Plan) -> None:
    engine, snapshot = receiver(), snapshot_of(1)
    before = engine.digest
    load = replace(request_for(snapshot), plan=layout, epoch=5)
    join = JoinRequest(
        epoch=5,
        group="g",
        store_host="127.0.0.1",
        store_port=1,
        rank=1,
        world=2,
        timeout_s=0.1,
        plan=layout,
    )
    gc.collect()
    descriptors = open_segments()

    for _ in range(3):
        with pytest.raises(PlanRefused), engine.loaded(load):
            pass
        with pytest.raises(PlanRefused):
            engine.join(join)

    assert open_segments() == descriptors
    assert (engine.version, engine.digest, engine.epoch) == (Version(0, 0), before, 1)
    assert not in_use(snapshot)


@pytest.mark.parametrize("kind", ["no dtype", "an empty bucket"])
def test_memory_of_a_plan_without_a_size_is_not_opened(kind: str) -> None:
    request = replace(request_for(snapshot_of(1)), plan=BAD_PLANS[kind])
    descriptors = open_segments()

    with pytest.raises((ValueError, IndexError)), reading(request):
        pass

    assert open_segments() == descriptors
