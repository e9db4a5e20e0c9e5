"""What the engine contract is checked with: an engine process, the HTTP client, a trainer, and
plain forward passes of the same weights to compare with."""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch

from connectors.config.lora import Lora
from connectors.engines.client import Completions, HttpEngine
from connectors.engines.types import Completion, EngineState, GenerateRequest, Sampling
from connectors.records import Version
from connectors.weights import (
    Ack,
    Peer,
    Snapshot,
    Through,
    WeightsError,
    WeightsSender,
    plan,
    shapes_of,
)
from tests.connectors.engine_process import EngineProcess
from tests.models import tiny_model
from trainer.lora import add_adapters

PROMPT = tuple(range(40, 72))
CONTEXT_TOKENS = 4096
MAX_RUNNING = 8
NUM_MODELS = 3
ADAPTED = NUM_MODELS  # stands for model 0 with adapters
MEDIA: tuple[Through, ...] = ("memory", "group")
LONG = CONTEXT_TOKENS - 200  # tokens of a request that is there to be running
TOLERANCE = 1e-3  # of log-probs; other weights' differ by more than DIFFERENT at most tokens
DIFFERENT = 0.1
CHECK_S = 200.0


class Models:
    """Tiny models with different weights: their folders, plain float32 copies, what a trainer
    publishes of them. ADAPTED is model 0 with adapters, and they are what it publishes."""

    def __init__(self, root: Path) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.folders = [tiny_model(root / str(seed), seed=seed) for seed in range(NUM_MODELS)]
        self.plain = [
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            for folder in self.folders
        ]
        self.plain.append(copy.deepcopy(self.plain[0]))
        self.adapted = add_adapters(self.plain[ADAPTED], Lora(rank=4), seed=0)
        for number, (_, parameter) in enumerate(self.adapted.named_parameters()):
            if number % 2:  # B: as some training may leave it
                torch.nn.init.normal_(
                    parameter, std=0.1, generator=torch.Generator().manual_seed(number)
                )

    @functools.cache  # noqa: B019 - as long-lived as the test session
    def snapshot(self, model: int) -> Snapshot:
        if model == ADAPTED:
            layout = self.adapted.plan(torch.float32)
            return Snapshot.take(self.adapted.named_parameters(), layout)
        named = dict(self.plain[model].named_parameters())
        return Snapshot.take(named, plan(shapes_of(named), torch.float32))

    def distributions(self, model: int, prompt: tuple[int, ...], done: Completion) -> torch.Tensor:
        """log-softmax [tokens, vocabulary] at temperature 1 at each generated token."""
        with torch.no_grad():
            logits = self.plain[model](torch.tensor([[*prompt, *done.token_ids]])).logits
        return logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)

    def logprobs(
        self, model: int, prompt: tuple[int, ...], done: Completion, temperature: float = 1.0
    ) -> torch.Tensor:
        """log-softmax(logits / temperature) of each generated token."""
        scaled = (self.distributions(model, prompt, done) / temperature).log_softmax(-1)
        return scaled.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]


def connect(engine: EngineProcess) -> HttpEngine:
    """With more patience than a router has: machines that run tests are busy."""
    return HttpEngine(engine.url, state_s=30.0)


class Bench:
    """One engine, its client and its trainer. Each check begins with an epoch of its own and with
    model 0 published as `first`; the engine is left without requests."""

    def __init__(self, kind: str, folder: Path, models: Models) -> None:
        self.kind, self.models = kind, models
        self._folder = folder
        self.engine = self._start("engine")
        self._spare: EngineProcess | None = None
        self._spare_is_fresh = False
        self.epoch = 0
        self.held: dict[Version, int] = {}  # the model published under each version
        self.first = Version(0, 0)
        self._numbers = itertools.count(1)
        self._names = itertools.count()
        self._sent: list[str] = []

    # ------------------------------------------------------------------------------------ engines
    def _start(self, name: str) -> EngineProcess:
        return EngineProcess(
            self._folder / name,
            self.models.folders[0],
            kind=self.kind,
            context_tokens=CONTEXT_TOKENS,
            max_running=MAX_RUNNING,
        )

    async def spare(self, *, fresh: bool = False) -> EngineProcess:
        """A second engine, which a check may end; with `fresh` one that was never sent a thing."""
        if self._spare is None or self._spare.ended or fresh > self._spare_is_fresh:
            await self.replace_spare()
        assert self._spare is not None
        self._spare_is_fresh = False
        return self._spare

    async def replace_spare(self) -> EngineProcess:
        """Another in its place, at another address."""
        if self._spare is not None:
            self._spare.stop()
        self._spare = await asyncio.to_thread(self._start, "spare")
        self._spare_is_fresh = True
        return self._spare

    def close(self) -> None:
        for engine in (self.engine, self._spare):
            if engine is not None and not engine.ended:
                engine.stop()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        if self.engine.ended:
            self.engine = await asyncio.to_thread(self._start, "engine")
        self.epoch += 1
        self.client = connect(self.engine)
        self.senders = {through: WeightsSender(20, through) for through in MEDIA}
        try:
            self.first = await self.publish(0)
            yield
        finally:
            for name in self._sent:
                await self.client.cancel(name)
            self._sent.clear()
            await self.client.close()
            for sender in self.senders.values():
                sender.close()

    # ----------------------------------------------------------------------------------- requests
    def request(self, name: str = "", **changes: Any) -> GenerateRequest:
        """32 tokens after PROMPT, seed 1, under a name that is not used again."""
        fields = {"max_tokens": 32, "seed": 1} | {
            key: changes.pop(key)
            for key in ("max_tokens", "seed", "temperature", "top_p", "stop_ids")
            if key in changes
        }
        name = name or f"{self.epoch}-{next(self._names)}"
        self._sent.append(name)
        return GenerateRequest(
            request_id=name,
            token_ids=changes.pop("prompt", PROMPT),
            sampling=Sampling(**fields),
            **changes,
        )

    async def generate(self, **changes: Any) -> Completions:
        return await self.client.generate(self.request(**changes))

    async def one(self, **changes: Any) -> Completion:
        (done,) = await self.generate(**changes)
        return done

    def begin(self, request: GenerateRequest) -> asyncio.Task[Completions]:
        return asyncio.create_task(self.client.generate(request), name=request.request_id)

    async def fly(self, **changes: Any) -> asyncio.Task[Completions]:
        """Begins a request that lasts until `cut`; returns when some tokens are there."""
        task = self.begin(self.request(max_tokens=LONG, **changes))
        await self.tokens(60)
        return task

    async def cut(self, task: asyncio.Task[Completions]) -> Completions:
        """Cancels a request after some more tokens: its partials."""
        await self.tokens(60)
        await self.client.cancel(task.get_name())
        return await task

    async def state(self) -> EngineState:
        return await self.client.state()

    async def get(self, path: str) -> str:
        url = self.engine.url + path
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            assert answer.status == 200
            return await answer.text()

    async def metrics(self) -> dict[str, float]:
        """Of /metrics, without their prefix."""
        lines = (await self.get("/metrics")).splitlines()
        values = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.removeprefix("headwater_engine_"): float(value) for name, value in values}

    async def tokens(self, count: int) -> None:
        """Waits until the engine generated `count` more tokens than now."""
        target = (await self.state()).num_tokens + count
        await self.until(lambda state: state.num_tokens >= target)

    async def until(
        self, true: Callable[[EngineState], bool], client: HttpEngine | None = None
    ) -> None:
        deadline = time.monotonic() + 60
        while not true(state := await (client or self.client).state()):
            assert time.monotonic() < deadline, f"not within 60 s: {state}"
            await asyncio.sleep(0.005)

    # ------------------------------------------------------------------------------------ weights
    def next_version(self) -> Version:
        return Version(0, next(self._numbers))

    async def try_publish(
        self, snapshot: Snapshot, version: Version, through: Through = "memory"
    ) -> Ack | WeightsError:
        url = self.engine.url
        answers = await asyncio.to_thread(
            self.senders[through].publish, snapshot, version, self.epoch, [Peer(url)]
        )
        return answers[url]

    async def publish(
        self, model: int, version: Version | None = None, through: Through = "memory"
    ) -> Version:
        version, snapshot = version or self.next_version(), self.models.snapshot(model)
        self.held[version] = model  # tokens of it may be there before the answer is
        answer = await self.try_publish(snapshot, version, through)
        assert answer == Ack(version=version, digest=snapshot.digest), answer
        return version

    async def relabel(self, version: Version, digest: str) -> Ack | WeightsError:
        url = self.engine.url
        relabel = self.senders["memory"].relabel
        return (await asyncio.to_thread(relabel, version, digest, self.epoch, [url]))[url]

    # --------------------------------------------------------------------------------- references
    def assert_own(
        self, done: Completion, *, prompt: tuple[int, ...] = PROMPT, temperature: float = 1.0
    ) -> None:
        """Every token is stamped with one version and has the log-prob which that version's own
        model gives it."""
        found = torch.tensor(done.logprobs)
        assert len(found) == len(done.token_ids)
        assert [s.start for s in done.segments] == [0, *(s.end for s in done.segments)][:-1]
        assert done.segments[-1].end == len(done.token_ids)
        for part in done.segments:
            own = self.models.logprobs(self.held[part.version], prompt, done, temperature)
            here = slice(part.start, part.end)
            worst = float((found[here] - own[here]).abs().max())
            assert worst < TOLERANCE, f"{part} is off by {worst}"

    def assert_not_of(
        self,
        model: int,
        done: Completion,
        start: int,
        end: int,
        *,
        prompt: tuple[int, ...] = PROMPT,
    ) -> None:
        """Tokens [start, end) are far from what `model` gives them."""
        other = self.models.logprobs(model, prompt, done)[start:end]
        off = (torch.tensor(done.logprobs)[start:end] - other).abs()
        assert float(off.median()) > DIFFERENT


def check(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A check of the contract: an async function over a bench whose engine holds `bench.first`."""

    @functools.wraps(test)
    def run(bench: Bench, **fixtures: Any) -> None:
        async def main() -> None:
            async with bench.open():
                await asyncio.wait_for(test(bench, **fixtures), CHECK_S)

        asyncio.run(main())

    return run
