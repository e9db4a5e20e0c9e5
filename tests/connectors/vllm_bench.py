"""A vLLM decoder in this process, on a loop of its own, so that many tests share one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil

from connectors.config import Config, parse
from connectors.engines.sequence import Sequence
from connectors.engines.types import Sampling
from connectors.records import Version

PROMPT = tuple(range(40, 72))
FIRST = Version(0, 1)
WAIT_S = 120.0


def config(model: Path, *, context_tokens: int = 1024, **engine: Any) -> Config:
    engine = {"kind": "vllm", "max_running": 32, **engine}
    return parse(
        {
            "model": {"path": str(model), "context_tokens": context_tokens},
            "engine": engine,
            "tasks": {"t": {"reward": "exact_match"}},
        },
        base_dir="/",
    )


def sequence(prompt: tuple[int, ...] = PROMPT, **changes: Any) -> Sequence:
    """32 tokens after PROMPT with seed 1."""
    count, seed = changes.pop("max_tokens", 32), changes.pop("seed", 1)
    sampling = Sampling(max_tokens=count, **changes)
    return Sequence(prompt_ids=prompt, sampling=sampling, seed=seed, max_tokens=count)


class Decoding:
    """Started when the constructor returns, with FIRST as vLLM's label; ended by `stop`."""

    def __init__(self, settings: Config) -> None:
        from connectors.engines.vllm import build

        self.decoder: Any = build(settings)[0]
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.ended: dict[Sequence, bool] = {}
        """Whether a sequence came to its end, or failed."""
        self.fatal: list[str] = []

        async def start() -> None:
            self.decoder.listen(
                on_finished=lambda sequence: self.ended.update({sequence: True}),
                on_failed=lambda sequence: self.ended.update({sequence: False}),
                on_fatal=self.fatal.append,
            )
            self.decoder.start()

        self.on_loop(start())
        self.label(FIRST)

    def on_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def soon(self, call: Callable[..., None], *arguments: Any) -> None:
        """Calls it on the loop, and returns when it did."""

        async def work() -> None:
            call(*arguments)

        self.on_loop(work())

    def label(self, version: Version | str) -> None:
        self.on_loop(self.decoder.llm.update_weight_version(str(version)))

    def add(self, *sequences: Sequence) -> None:
        def all_at_once() -> None:
            for one in sequences:
                self.decoder.add(one)

        self.soon(all_at_once)

    def decode(self, *sequences: Sequence) -> list[bool]:
        """To their ends; which of them did not fail."""
        self.add(*sequences)
        self.until(lambda: all(one in self.ended for one in sequences))
        return [self.ended[one] for one in sequences]

    def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not true():
            assert not self.fatal, self.fatal
            assert time.monotonic() < deadline, "did not come true in time"
            time.sleep(0.005)

    @property
    def process(self) -> psutil.Process:
        """vLLM's engine."""
        (started,) = self.decoder.llm.engine_core.resources.engine_manager.processes
        return psutil.Process(started.pid)

    def stop(self) -> None:
        self.soon(self.decoder.stop)
        self.loop.call_soon_threadsafe(self.loop.stop)
