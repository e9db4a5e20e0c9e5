"""How long an engine keeps what nobody asks for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from msgspec.structs import replace

from connectors.engines.engine import DecodingEngine
from connectors.engines.jobs import FinishedJobs
from connectors.engines.sequence import Sequence
from connectors.engines.types import Completion, GenerateRequest, Part, VersionGone
from connectors.records import Version


class IdleDecoder:
    """Decodes nothing by itself; `added` are the sequences in its batch."""

    kind, vocab_size, context_tokens, device = "idle", 100, 64, torch.device("cpu")
    num_tokens, kv_use = 0, 0.0

    def __init__(self) -> None:
        self.added: list[Sequence] = []

    def listen(self, *, on_finished: Callable[[Sequence], None], **_: Any) -> None:
        self.finished = on_finished

    def add(self, sequence: Sequence) -> None:
        self.added.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        sequence.closed = True

    def refuses(self, _: Any) -> None: ...


class IdleWeights:
    version: Version | None = None
    digest, epoch, num_ranks = "", -1, 1
    update_seconds: ClassVar[dict[str, float]] = {}


def request(name: str) -> GenerateRequest:
    return GenerateRequest(request_id=name, token_ids=(5,))


@pytest.mark.parametrize("streamed", [False, True])
def test_work_nobody_comes_back_for_is_ended(streamed: bool) -> None:
    async def main() -> None:
        engine = DecodingEngine(
            IdleDecoder(),  # type: ignore[arg-type]
            IdleWeights(),  # type: ignore[arg-type]
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


@pytest.mark.parametrize("seen_first", ["the version", "the token", "the end"])
def test_what_gets_its_first_token_from_a_version_it_did_not_ask_for_is_gone(
    seen_first: str,
) -> None:
    async def main() -> None:
        decoder, weights = IdleDecoder(), IdleWeights()
        weights.version = Version(0, 1)
        engine = DecodingEngine(
            decoder,  # type: ignore[arg-type]
            weights,  # type: ignore[arg-type]
            max_running=2,
        )
        engine.start(on_fatal=lambda _: None)
        exact = replace(request("a"), max_version=Version(0, 1), num_samples=2)
        asked = asyncio.create_task(engine.generate(exact))
        await asyncio.sleep(0)
        began, begins = decoder.added
        began.append(7, -0.5, Version(0, 1))
        weights.version = Version(0, 2)
        if seen_first != "the version":
            begins.append(7, -0.5, Version(0, 2))
        if seen_first == "the end":
            decoder.finished(began)
            decoder.finished(begins)
        else:
            weights.on_version()
        with pytest.raises(VersionGone, match=r"holds 0\.2: 0\.1 is past"):
            await asked
        assert await engine.attach("a") is None
        assert engine.state_now().num_running == 0

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
