"""How long an engine keeps what nobody asks for."""

from __future__ import annotations

import asyncio
import time
from typing import Any, ClassVar

import pytest
import torch

from connectors.engines.engine import DecodingEngine
from connectors.engines.jobs import FinishedJobs
from connectors.engines.types import Completion, GenerateRequest, Part


class IdleDecoder:
    kind, vocab_size, context_tokens, device = "idle", 100, 64, torch.device("cpu")
    num_tokens, kv_use = 0, 0.0

    def listen(self, **_: Any) -> None: ...

    def refuses(self, _: Any) -> None: ...


class NoVersion:
    version, digest, epoch, num_ranks = None, "", -1, 1
    update_seconds: ClassVar[dict[str, float]] = {}


def request(name: str) -> GenerateRequest:
    return GenerateRequest(request_id=name, token_ids=(5,))


@pytest.mark.parametrize("streamed", [False, True])
def test_work_nobody_comes_back_for_is_ended(streamed: bool) -> None:
    async def main() -> None:
        engine = DecodingEngine(
            IdleDecoder(),  # type: ignore[arg-type]
            NoVersion(),  # type: ignore[arg-type]
            max_running=1,
            orphan_s=0.05,
        )
        engine.start(on_fatal=lambda _: None)

        async def told(_: Part) -> None: ...

        def ask(name: str) -> asyncio.Task[tuple[Completion, ...]]:
            asked = request(name)
            return asyncio.create_task(
                engine.stream(asked, told) if streamed else engine.generate(asked)
            )

        leaver, stays = ask("a"), ask("b")
        await asyncio.sleep(0)
        assert engine.state_now().num_queued == 2
        leaver.cancel()
        deadline = time.monotonic() + 20
        while engine.state_now().num_queued == 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.002)
        assert await engine.attach("a") is None
        assert not stays.done()
        stays.cancel()

    asyncio.run(main())


def test_finished_results_are_kept_by_count_and_by_age() -> None:
    now = [0.0]
    finished = FinishedJobs(max_count=2, keep_s=10, clock=lambda: now[0])
    for name in ("a", "b", "c"):
        finished.keep(request(name), ())
        now[0] += 4
    assert [finished.find(n) is not None for n in ("a", "b", "c")] == [False, True, True]
    now[0] = 15.0  # b was kept at 4, c at 8
    assert [finished.find(n) is not None for n in ("b", "c")] == [False, True]
