"""The contract every engine keeps about weights, checked on real processes with a real trainer's
side: what is served while they change, after an update that broke, and by engines that come and
go."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from msgspec.structs import replace

from connectors.engines.client import Completions
from connectors.engines.pool import EnginePool
from connectors.engines.types import EngineUnavailable
from connectors.records import Version
from connectors.weights import (
    Ack,
    Adapters,
    EpochRefused,
    FenceRequest,
    JoinRequest,
    LoadRequest,
    MemoryUnreadable,
    Peer,
    RelabelRequest,
    Snapshot,
    Through,
    UpdateRequest,
    WeightsError,
    plan,
)
from connectors.weights.calls import ask
from connectors.weights.memory import segment_bytes
from connectors.weights.wire import DigestMismatch, PlanRefused
from tests.connectors.engine_bench import (
    ADAPTED,
    LONG,
    MAX_RUNNING,
    MEDIA,
    Bench,
    check,
    connect,
)
from tests.connectors.weights_sender import begin_update
from trainer.publish import Publisher

WRONG_DIGEST = "0" * 16
SEEN = tuple(4 + i * 7 % 250 for i in range(600))
"""A prompt that an engine may hold old keys and values of."""

by_medium = pytest.mark.parametrize("through", MEDIA)


# ---------------------------------------------------------------------------------------- an update
@by_medium
@check
async def test_a_publish_is_acknowledged_with_version_and_digest_and_then_served(
    bench: Bench,
    through: Through,
) -> None:
    await bench.one(prompt=SEEN)
    for model in (1, 2, 1):
        version = await bench.publish(model, through=through)
        state = await bench.state()
        digest = bench.models.snapshot(model).digest
        assert (state.version, state.digest, state.epoch) == (version, digest, bench.epoch)
        done = await bench.one(prompt=SEEN, temperature=0.0)
        assert [s.version for s in done.segments] == [version]
        bench.assert_own(done, prompt=SEEN)
        bench.assert_not_of(0, done, 0, 32, prompt=SEEN)


@by_medium
@check
async def test_each_part_of_a_generation_across_an_update_is_its_own_versions(
    bench: Bench,
    through: Through,
) -> None:
    flight = await bench.fly(num_samples=3)
    newer = await bench.publish(1, through=through)
    for done in await bench.cut(flight):
        old, new = done.segments
        assert (old.version, new.version) == (bench.first, newer)
        bench.assert_own(done)
        bench.assert_not_of(1, done, old.start, old.end)
        bench.assert_not_of(0, done, new.start, new.end)


@by_medium
@check
async def test_updates_one_after_another_leave_every_token_with_its_own_version(
    bench: Bench,
    through: Through,
) -> None:
    flights = [await bench.fly(num_samples=2, seed=10 * i) for i in range(3)]
    versions = [bench.first]
    for model in (1, 2, 0, 1):
        versions.append(await bench.publish(model, through=through))
        await bench.tokens(60)
    for flight in flights:
        for done in await bench.cut(flight):
            assert [s.version for s in done.segments] == versions
            bench.assert_own(done)


@by_medium
@check
async def test_adapters_are_added_to_what_the_engine_started_with_whatever_came_between(
    bench: Bench, through: Through
) -> None:
    flight = await bench.fly()
    versions = [bench.first]
    for model in (ADAPTED, 1, ADAPTED, ADAPTED):
        versions.append(await bench.publish(model, through=through))
        state = await bench.state()
        digest = bench.models.snapshot(model).digest
        assert (state.version, state.digest) == (versions[-1], digest)
        await bench.tokens(60)
    (done,) = await bench.cut(flight)
    assert [s.version for s in done.segments] == versions
    bench.assert_own(done)
    last = done.segments[-1]
    for other in (0, 1):
        bench.assert_not_of(other, done, last.start, last.end)


@by_medium
@check
async def test_adapters_of_other_base_weights_are_refused_and_change_nothing(
    bench: Bench, through: Through
) -> None:
    before, own = await bench.state(), bench.models.snapshot(ADAPTED)
    foreign = bench.models.snapshot(1).digest
    layout = replace(own.plan, adapters=Adapters(bench.models.adapted.scale, foreign))
    other = Snapshot.take(bench.models.adapted.named_parameters(), layout)
    answer = await bench.try_publish(other, bench.next_version(), through)
    assert isinstance(answer, PlanRefused)
    base = bench.models.snapshot(0).digest
    assert f"{foreign}, this engine started with {base}" in str(answer)
    assert await bench.state() == before


@check
async def test_requests_that_come_and_go_while_weights_change_get_each_token_right(
    bench: Bench,
) -> None:
    """Long and short prompts, some cancelled, more than fit, both media in turn."""
    dice = random.Random(3)

    async def client(seed: int) -> int:
        done = 0
        while not changed.is_set():
            prompt = SEEN[: dice.randrange(1, len(SEEN))]
            request = bench.request(
                prompt=prompt, seed=seed, num_samples=2, max_tokens=dice.randrange(1, 80)
            )
            running = bench.begin(request)
            if dice.random() < 0.2:
                await asyncio.sleep(dice.random() / 20)
                await bench.client.cancel(request.request_id)
            for sample in await running:
                if sample.token_ids:
                    bench.assert_own(sample, prompt=prompt)
                    done += len(sample.segments) > 1
        return done

    changed = asyncio.Event()
    clients = [asyncio.create_task(client(10 * k)) for k in range(MAX_RUNNING)]
    for number in range(6):
        await bench.tokens(60)
        await bench.publish(number % 3, through=MEDIA[number % 2])
    changed.set()
    assert sum(await asyncio.gather(*clients)) > 0, "none ran across a change"


@check
async def test_a_relabel_names_equal_bytes_only_and_stamps_later_tokens_without_a_pause(
    bench: Bench,
) -> None:
    flight = await bench.fly()
    num_pauses = (await bench.metrics())["pause_seconds_count"]
    version, digest = bench.next_version(), bench.models.snapshot(0).digest
    assert isinstance(await bench.relabel(version, WRONG_DIGEST), DigestMismatch)
    assert (await bench.state()).version == bench.first
    assert await bench.relabel(version, digest) == Ack(version=version, digest=digest)
    assert (await bench.state()).version == version
    bench.held[version] = 0
    assert (await bench.metrics())["pause_seconds_count"] == num_pauses
    (done,) = await bench.cut(flight)
    assert [s.version for s in done.segments] == [bench.first, version]
    bench.assert_own(done)


# ---------------------------------------------------------------------- an update that is not whole
@check
async def test_broadcast_bytes_that_are_not_those_announced_are_not_acknowledged_nor_served(
    bench: Bench,
) -> None:
    flight = await bench.fly()
    assert isinstance(await _publish_torn(bench, "group"), DigestMismatch)
    await _nothing_is_served_until_a_whole_version(bench, flight)


@check
async def test_memory_that_does_not_hold_the_announced_bytes_is_refused_and_changes_nothing(
    bench: Bench,
) -> None:
    flight = await bench.fly()
    before = await bench.state()
    assert isinstance(await _publish_torn(bench, "memory"), DigestMismatch)
    layout = bench.models.snapshot(1).plan
    nowhere = LoadRequest(
        epoch=bench.epoch, version=bench.next_version(), digest=WRONG_DIGEST, plan=layout,
        pid=os.getpid(), fd=9999, num_bytes=segment_bytes(layout), timeout_s=5.0,
    )  # fmt: skip
    with pytest.raises(MemoryUnreadable):
        await asyncio.to_thread(ask, bench.engine.url, "POST", "/weights/load", nowhere, dict, 10.0)
    after = await bench.state()
    assert (after.version, after.digest) == (before.version, before.digest)
    (done,) = await bench.cut(flight)
    assert [s.version for s in done.segments] == [bench.first]
    bench.assert_own(done)


@pytest.mark.parametrize(("how", "model"), [("die", 1), ("stop", ADAPTED)])
@check
async def test_a_trainer_lost_in_mid_update_leaves_no_version_and_serves_nothing(
    bench: Bench, how: str, model: int, tmp_path: Path
) -> None:
    flight = await bench.fly()
    trainer = await asyncio.to_thread(
        begin_update,
        tmp_path, bench.models.snapshot(model), bench.engine.url, bench.epoch, 2.0, how,
    )  # fmt: skip
    try:
        await bench.until(lambda state: state.version is None)
        await _nothing_is_served_until_a_whole_version(bench, flight)
    finally:
        trainer.kill()
        trainer.wait()


@check
async def test_what_is_held_without_a_version_can_be_cancelled(bench: Bench) -> None:
    flight = await bench.fly()
    assert isinstance(await _publish_torn(bench, "group"), DigestMismatch)
    (partial,) = await bench.client.cancel(flight.get_name())
    assert await flight == (partial,)
    bench.assert_own(partial)
    assert (await bench.state()).num_running == 0


async def _publish_torn(bench: Bench, through: Through) -> Ack | WeightsError:
    good = bench.models.snapshot(1)
    torn = Snapshot(good.plan, good.buckets, WRONG_DIGEST, good.segment)
    return await bench.try_publish(torn, bench.next_version(), through)


async def _nothing_is_served_until_a_whole_version(
    bench: Bench, flight: asyncio.Task[Completions]
) -> None:
    late = bench.begin(bench.request())
    await bench.until(lambda state: state.num_queued == 1)
    # The step that was under way may still end; then nothing moves, though much is left to do.
    before, after = None, await bench.state()
    while before != after:
        await asyncio.sleep(0.3)
        before, after = after, await bench.state()
    assert (after.version, after.num_running, after.num_queued) == (None, 1, 1)
    version = await bench.publish(2)
    (done,) = await late
    assert [s.version for s in done.segments] == [version]
    bench.assert_own(done)
    (held,) = await bench.cut(flight)
    assert [s.version for s in held.segments] == [bench.first, version]
    bench.assert_own(held)


@by_medium
@check
async def test_weights_of_another_model_are_refused_and_change_nothing(
    bench: Bench, through: Through
) -> None:
    before = await bench.state()
    shapes = [(slot.name, slot.shape) for slot in bench.models.snapshot(1).plan.slots()][:-1]
    fewer = {name: torch.zeros(shape) for name, shape in shapes}
    other = Snapshot.take(fewer, plan(shapes, torch.float32))
    answer = await bench.try_publish(other, bench.next_version(), through)
    assert isinstance(answer, PlanRefused)
    assert await bench.state() == before


# ------------------------------------------------------------------------------------------- epochs
@check
async def test_a_trainer_of_a_lower_epoch_is_refused_whatever_it_sends(bench: Bench) -> None:
    before = await bench.state()
    old, version = bench.epoch - 1, bench.next_version()
    snapshot = bench.models.snapshot(0)
    bodies: dict[str, Any] = {
        "join": JoinRequest(
            epoch=old, group="g", store_host="127.0.0.1", store_port=1, rank=1, world=2,
            timeout_s=1.0, plan=snapshot.plan,
        ),
        "update": UpdateRequest(
            epoch=old, group="g", serial=1, version=version, digest=snapshot.digest
        ),
        "load": LoadRequest(
            epoch=old, version=version, digest=snapshot.digest, plan=snapshot.plan,
            pid=os.getpid(), fd=snapshot.segment.fd, num_bytes=snapshot.segment.num_bytes,
            timeout_s=5.0,
        ),
        "relabel": RelabelRequest(epoch=old, version=version, digest=snapshot.digest),
        "fence": FenceRequest(epoch=old),
    }  # fmt: skip
    for what, body in bodies.items():
        with pytest.raises(EpochRefused):
            await asyncio.to_thread(
                ask, bench.engine.url, "POST", f"/weights/{what}", body, dict, 10.0
            )
        assert await bench.state() == before


@check
async def test_a_fence_alone_shuts_out_the_trainer_before(bench: Bench) -> None:
    old, url = bench.epoch, bench.engine.url
    bench.epoch += 1
    sender = bench.senders["memory"]
    assert await asyncio.to_thread(sender.fence, bench.epoch, [url]) == {url: None}
    state = await bench.state()
    assert (state.version, state.epoch) == (bench.first, bench.epoch)
    late = await asyncio.to_thread(
        sender.publish, bench.models.snapshot(1), bench.next_version(), old, [Peer(url)]
    )
    assert isinstance(late[url], EpochRefused)
    assert (await bench.state()).version == bench.first


# ------------------------------------------------------------------------------ engines come and go
@asynccontextmanager
async def publisher_of(bench: Bench, urls: list[str]) -> AsyncIterator[Callable[[], Version]]:
    """A Publisher over `urls`, which may change, that has announced model 1; yields what it
    announced."""
    announced: list[Version] = []
    publisher = Publisher(
        lambda: list(urls),
        epoch=bench.epoch,
        timeout_s=10,
        on_published=lambda version, *_: announced.append(version),
        poll_s=0.1,
    )
    version = bench.next_version()
    bench.held[version] = 1
    try:
        publisher.submit(bench.models.snapshot(1), version)
        assert await asyncio.to_thread(publisher.wait_published, version, 30)
        yield lambda: announced[-1]
        assert announced == [version], "announced once"
    finally:
        await asyncio.to_thread(publisher.close)


@check
async def test_an_engine_that_joins_late_generates_nothing_before_the_announced_version(
    bench: Bench,
) -> None:
    urls = [bench.engine.url]
    async with publisher_of(bench, urls) as announced:
        engine = await bench.spare(fresh=True)
        client = connect(engine)
        try:
            assert (await client.state()).version is None
            early = asyncio.create_task(client.generate(bench.request()))
            # Not a wait for a state: a request takes less.
            await asyncio.wait([early], timeout=0.5)
            state = await client.state()
            assert (state.num_queued, state.num_running, state.num_tokens) == (1, 0, 0)
            urls.append(engine.url)
            (done,) = await early
            assert [s.version for s in done.segments] == [announced()]
            bench.assert_own(done)
            assert (await client.state()).digest == bench.models.snapshot(1).digest
        finally:
            await client.close()


@check
async def test_a_killed_engines_requests_are_finished_by_the_one_started_in_its_place(
    bench: Bench,
) -> None:
    """kill -9 in the middle of requests; the new one rejoins at the announced version."""
    first = await bench.spare()
    urls = [first.url]
    async with publisher_of(bench, urls) as announced:
        pool = EnginePool(lambda: list(urls))
        # More than its batch holds: the rest of the first queues there, the second in the pool.
        requests = [bench.request(num_samples=10, seed=10 * i, max_tokens=300) for i in range(2)]
        running = [asyncio.create_task(pool.generate(request)) for request in requests]
        client = connect(first)
        before = (await client.state()).num_tokens
        await bench.until(lambda state: state.num_running > 0 < state.num_tokens - before, client)
        await client.close()
        family = [*psutil.Process(first.process.pid).children(recursive=True)]
        first.kill()
        urls[:] = [(await bench.replace_spare()).url]
        for done in await asyncio.gather(*running):
            assert [len(sample.token_ids) for sample in done] == [300] * 10
            for sample in done:
                assert [s.version for s in sample.segments] == [announced()]
                bench.assert_own(sample)
        assert psutil.wait_procs(family, timeout=10)[1] == [], "a killed engine's processes end"
        await pool.close()


@check
async def test_sigterm_ends_it_with_exit_0_and_its_clients_hear_that_it_is_unavailable(
    bench: Bench,
) -> None:
    engine = await bench.spare()
    client = connect(engine)
    family = psutil.Process(engine.process.pid).children(recursive=True)
    waiting = asyncio.create_task(client.generate(bench.request(min_version=Version(9, 0))))
    await bench.until(lambda state: state.num_queued == 1, client)
    engine.signal(signal.SIGTERM)
    with pytest.raises(EngineUnavailable, match="engine is stopping"):
        await waiting
    await client.close()
    assert await asyncio.to_thread(engine.stop) == 0
    assert "Traceback" not in engine.log.read_text()
    assert psutil.wait_procs(family, timeout=10)[1] == []


@check
async def test_a_decoder_that_dies_takes_its_process_with_it(bench: Bench) -> None:
    engine = await bench.spare()
    client = connect(engine)
    async with publisher_of(bench, [engine.url]):
        running = asyncio.create_task(client.generate(bench.request(max_tokens=LONG)))
        await bench.until(lambda state: state.num_tokens > 0, client)
        engine.signal(signal.SIGUSR1)
        with pytest.raises(EngineUnavailable):
            await running
        await client.close()
        assert await asyncio.to_thread(engine.process.wait, 30) == 1
