"""One job followed by several clients, without an engine: what each is told, and when."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque

import pytest

from connectors.engines.following import follow
from connectors.engines.jobs import Job
from connectors.engines.sequence import Sequence
from connectors.engines.types import EngineUnavailable, GenerateRequest, Part, Sampling
from connectors.records import Version
from tests.connectors.heard import Heard
from tests.connectors.scripted_engine import run, until

NUM_TOKENS = 2000


def job_of(num_samples: int) -> Job:
    """On the running loop."""
    request = GenerateRequest(request_id="r", token_ids=(1,), num_samples=num_samples)
    samples = [
        Sequence(prompt_ids=(1,), sampling=Sampling(), seed=k, max_tokens=NUM_TOKENS)
        for k in range(num_samples)
    ]
    return Job(request, samples, asyncio.get_running_loop().create_future(), deque())


def write(sequence: Sequence, start: int, end: int) -> None:
    """Another version every 100 tokens."""
    for i in range(start, end):
        sequence.append(i, -0.25 * (i % 7), Version(0, i // 100))


def finish(job: Job) -> None:
    for sample, sequence in enumerate(job.samples):
        job.complete(sample, sequence.complete())
    job.result.set_result(job.ordered())


def test_what_another_thread_appends_is_told_to_each_client_once_and_in_order() -> None:
    async def main() -> None:
        job, clients = job_of(3), [Heard(), Heard()]

        async def hear(heard: Heard) -> None:
            async def told(part: Part) -> None:
                heard.append(part)
                await asyncio.sleep(0)

            assert heard.completions(await follow(job, told)) == job.ordered()

        def decode() -> None:
            for i in range(NUM_TOKENS):
                for sequence in job.samples:
                    write(sequence, i, i + 1)
                time.sleep(0)  # the loop has its turns

        hearing = [asyncio.create_task(hear(heard)) for heard in clients]
        await asyncio.sleep(0)
        thread = threading.Thread(target=decode)
        thread.start()
        await asyncio.to_thread(thread.join)
        finish(job)
        await asyncio.gather(*hearing)
        assert all(len(heard) > 3 for heard in clients)
        assert all(sequence.listeners == () for sequence in job.samples)

    run(main())


def test_what_comes_while_a_part_is_told_comes_as_one() -> None:
    async def main() -> None:
        job, heard, ready = job_of(1), Heard(), asyncio.Event()
        (sequence,) = job.samples

        async def told(part: Part) -> None:
            heard.append(part)
            await ready.wait()

        following = asyncio.create_task(follow(job, told))
        await asyncio.sleep(0)
        write(sequence, 0, 1)
        await until(lambda: len(heard) == 1)
        write(sequence, 1, 500)
        finish(job)
        await asyncio.sleep(0)
        assert len(heard) == 1
        ready.set()
        await following
        assert [len(part.token_ids) for part in heard] == [1, 499]
        assert [(s.start, s.end, s.number) for s in heard[1].segments] == [
            (0, 99, 0),
            (99, 199, 1),
            (199, 299, 2),
            (299, 399, 3),
            (399, 499, 4),
        ]

    run(main())


def test_a_token_appended_at_the_moment_of_the_end_is_not_told() -> None:
    async def main() -> None:
        job, heard = job_of(1), Heard()
        (sequence,) = job.samples
        write(sequence, 0, 3)
        finish(job)
        sequence.closed = False  # as the thread saw it before
        write(sequence, 3, 4)

        async def told(part: Part) -> None:
            heard.append(part)

        (done,) = await follow(job, told)
        assert done.token_ids == (0, 1, 2)
        assert heard.completions((done,)) == (done,)

    run(main())


def test_a_client_that_leaves_leaves_nothing_behind_and_the_job_goes_on() -> None:
    async def main() -> None:
        job, heard = job_of(1), Heard()

        async def told(part: Part) -> None:
            heard.append(part)

        leaver, stays = (asyncio.create_task(follow(job, told)) for _ in range(2))
        await asyncio.sleep(0)
        (sequence,) = job.samples
        assert len(sequence.listeners) == 2
        leaver.cancel()
        await asyncio.wait([leaver])
        assert len(sequence.listeners) == 1
        write(sequence, 0, 2)
        finish(job)
        assert await stays == job.ordered()
        assert heard.num_tokens == 2

    run(main())


def test_a_job_that_fails_fails_its_stream_after_what_there_was() -> None:
    async def main() -> None:
        job, heard = job_of(1), Heard()

        async def told(part: Part) -> None:
            heard.append(part)

        following = asyncio.create_task(follow(job, told))
        await asyncio.sleep(0)
        write(job.samples[0], 0, 5)
        job.result.set_exception(EngineUnavailable("the engine is stopping"))
        with pytest.raises(EngineUnavailable, match="stopping"):
            await following
        assert heard.num_tokens == 5

    run(main())
