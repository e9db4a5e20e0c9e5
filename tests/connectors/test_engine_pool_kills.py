"""The pool over real engines, one of which is killed and comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from connectors.engines.client import HttpEngine
from connectors.engines.pool import EnginePool
from connectors.engines.types import EngineState, GenerateRequest, Sampling
from connectors.records import Version
from connectors.weights import Snapshot, plan, shapes_of
from tests.connectors.engine_process import EngineProcess
from tests.models import tiny_model
from trainer.publish import Publisher

NUM_REQUESTS = 200
NUM_TOKENS = 40
MAX_RUNNING = 8
VERSION = Version(0, 3)


def request(i: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{i}",
        token_ids=tuple(range(40, 60 + i % 20)),
        sampling=Sampling(max_tokens=NUM_TOKENS, seed=i),
        session=f"group {i // 4}",
        min_version=VERSION,
    )


async def told(engine: EngineProcess, wanted: str) -> EngineState:
    """The engine's state once `wanted` is true of it."""
    client = HttpEngine(engine.url)
    try:
        async with asyncio.timeout(120):
            while True:
                state = await client.state()
                if wanted == "generated" and state.num_tokens > 0:
                    return state
                if wanted == "holds a version" and state.version is not None:
                    return state
                await asyncio.sleep(0.01)
    finally:
        await client.close()


@pytest.mark.slow
def test_no_request_is_lost_when_one_of_two_engines_is_killed_and_comes_back(
    tmp_path: Path,
) -> None:
    model = tiny_model(tmp_path / "model")
    named = dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())
    weights = Snapshot.take(named, plan(shapes_of(named), torch.float32))
    engines = [
        EngineProcess(tmp_path, model, name=f"engine-{i}", max_running=MAX_RUNNING)
        for i in range(2)
    ]
    roles = engines[0].run_dir

    def urls() -> list[str]:
        return [role.url for role in roles.roles()]

    async def main() -> None:
        pool = EnginePool(urls)
        early = [asyncio.create_task(pool.generate(request(i))) for i in range(120)]
        await asyncio.gather(*(told(engine, "generated") for engine in engines))
        engines[1].kill()
        engines[1] = await asyncio.to_thread(
            EngineProcess, tmp_path, model, name="engine-1", max_running=MAX_RUNNING
        )
        await told(engines[1], "holds a version")
        # More than the other one may have in flight.
        late = [asyncio.create_task(pool.generate(request(i))) for i in range(120, NUM_REQUESTS)]
        done = await asyncio.wait_for(asyncio.gather(*early, *late), 180)
        assert [len(completions) for completions in done] == [1] * NUM_REQUESTS
        for (completion,) in done:
            assert len(completion.token_ids) == NUM_TOKENS
            assert [s.version for s in completion.segments] == [VERSION]
        assert (await told(engines[1], "generated")).num_tokens > 0
        assert (await pool.state()).info["waiting"] == 0
        await pool.close()

    publisher = Publisher(urls, epoch=1, timeout_s=30, on_published=lambda *_: None, poll_s=0.1)
    try:
        publisher.submit(weights, VERSION)
        assert publisher.wait_published(VERSION, 60)
        asyncio.run(main())
    finally:
        publisher.close()
        for engine in engines:
            engine.stop()
