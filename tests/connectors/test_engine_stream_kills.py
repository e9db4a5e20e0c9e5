"""A stream over real engines, of which the one that tells is killed or stopped."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from connectors.engines.pool import EnginePool
from connectors.engines.types import GenerateRequest, Sampling
from connectors.records import Version
from connectors.weights import Snapshot, plan, shapes_of
from tests.connectors.engine_process import EngineProcess
from tests.connectors.heard import Heard
from tests.models import tiny_model
from trainer.publish import Publisher

NUM_TOKENS = 900
VERSION = Version(0, 3)


def request(name: str) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        token_ids=tuple(range(40, 60)),
        num_samples=2,
        sampling=Sampling(max_tokens=NUM_TOKENS, seed=3),
        min_version=VERSION,
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stream_goes_on_at_the_other_engine_when_its_own_ends(
    tmp_path: Path, number: signal.Signals
) -> None:
    model = tiny_model(tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    named = dict(plain.named_parameters())
    weights = Snapshot.take(named, plan(shapes_of(named), torch.float32))
    engines = [EngineProcess(tmp_path, model, name=f"engine-{i}") for i in range(2)]
    by_url = {engine.url: engine for engine in engines}

    def urls() -> list[str]:
        return [role.url for role in engines[0].run_dir.roles()]

    async def main() -> None:
        pool, heard = EnginePool(urls), Heard()
        streaming = asyncio.create_task(pool.stream(request("r"), heard.append))
        async with asyncio.timeout(120):
            while heard.num_tokens < 100:
                await asyncio.sleep(0.002)
        (told_by,) = [m.url for m in pool._members.all if m.num_sent]
        by_url[told_by].signal(number)
        done = await asyncio.wait_for(streaming, 120)
        assert heard.completions(done) == done
        assert await pool.versions() == [VERSION]
        for completion in done:
            assert [s.version for s in completion.segments] == [VERSION]
            assert len(completion.token_ids) == NUM_TOKENS
            ids = torch.tensor([[*request("r").token_ids, *completion.token_ids]])
            with torch.no_grad():
                own = plain(ids).logits[0, 19:-1].log_softmax(-1)
            own = own.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            assert (torch.tensor(completion.logprobs) - own).abs().max() < 1e-3
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
