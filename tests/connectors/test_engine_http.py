"""The `hf` engine as a process, over HTTP, with weights from a real sender."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM

from connectors.config import ConfigError, parse
from connectors.engines.client import EnginePool, HttpEngine
from connectors.engines.server import serve_engine
from connectors.engines.types import (
    Completion,
    EngineStartError,
    EngineUnavailable,
    GenerateRequest,
    RequestRefused,
    Sampling,
)
from connectors.records import Version
from connectors.run_dir import RunDir
from connectors.weights import Ack, Snapshot, WeightsError, WeightsSender, plan, shapes_of
from tests.connectors.engine_process import EngineProcess
from tests.models import tiny_model

PROMPT = tuple(range(40, 72))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [tiny_model(root / str(seed), seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> list[Any]:
    return [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]


@pytest.fixture(scope="module")
def engine(
    tmp_path_factory: pytest.TempPathFactory, folders: list[Path]
) -> Iterator[EngineProcess]:
    process = EngineProcess(tmp_path_factory.mktemp("run"), folders[0])
    yield process
    process.stop()


class Trainer:
    """Publishes the models' weights under ever higher versions and epochs."""

    def __init__(self) -> None:
        self.sender = WeightsSender(timeout_s=20)
        self.number, self.epoch = 0, int(time.monotonic() * 1000)

    def snapshot(self, model: Any) -> Snapshot:
        named = dict(model.named_parameters())
        return Snapshot.take(named, plan(shapes_of(named), torch.float32))

    def publish(self, model: Any, *urls: str) -> tuple[Version, list[Ack | WeightsError]]:
        self.number += 1
        version = Version(0, self.number)
        answers = self.sender.publish(self.snapshot(model), version, self.epoch, list(urls))
        return version, [answers[url] for url in urls]


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer()


def request(name: str, **changes: Any) -> GenerateRequest:
    sampling = {
        key: changes.pop(key)
        for key in ("max_tokens", "seed", "temperature", "stop_ids")
        if key in changes
    }
    return GenerateRequest(
        request_id=name,
        token_ids=changes.pop("prompt", PROMPT),
        sampling=Sampling(**sampling),
        **changes,
    )


def logits(model: Any, done: Completion) -> torch.Tensor:
    """[tokens, vocabulary] log-softmax of a plain forward pass over prompt and completion."""
    with torch.no_grad():
        ids = torch.tensor([[*PROMPT, *done.token_ids]])
        return model(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)


def with_client(url: str, scenario: Callable[[HttpEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        client = HttpEngine(url)
        try:
            await asyncio.wait_for(scenario(client), 90)
        finally:
            await client.close()

    asyncio.run(main())


async def running_tokens(client: HttpEngine, count: int) -> None:
    """Waits until `count` more tokens than now are generated."""
    target = (await client.state()).num_tokens + count
    deadline = time.monotonic() + 30
    while (await client.state()).num_tokens < target:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


# --------------------------------------------------------------------------------------- weights
def test_a_fresh_engine_holds_no_version_until_its_own_weights_are_named(
    engine: EngineProcess, models: list[Any], trainer: Trainer
) -> None:
    snapshot = trainer.snapshot(models[0])

    async def scenario(client: HttpEngine) -> None:
        state = await client.state()
        assert (state.version, state.digest) == (None, snapshot.digest)
        waiting = asyncio.create_task(client.generate(request("early", max_tokens=4)))
        version = Version(0, 0)
        epoch = trainer.epoch
        answer = await asyncio.to_thread(
            trainer.sender.relabel, version, snapshot.digest, epoch, [engine.url]
        )
        assert answer == {engine.url: Ack(version=version, digest=snapshot.digest)}
        assert (await waiting)[0].segments[0].version == version
        assert (await client.state()).version == version

    with_client(engine.url, scenario)


def test_greedy_output_after_a_publish_is_the_new_weights(
    engine: EngineProcess, models: list[Any], trainer: Trainer
) -> None:
    async def scenario(client: HttpEngine) -> None:
        for model in (models[1], models[2], models[1]):
            version, (ack,) = await asyncio.to_thread(trainer.publish, model, engine.url)
            assert isinstance(ack, Ack), ack
            name = f"greedy-{version}"
            (done,) = await client.generate(request(name, temperature=0.0, max_tokens=24))
            assert list(done.token_ids) == logits(model, done).argmax(-1).tolist()
            assert {s.version for s in done.segments} == {version}
            state = await client.state()
            assert (state.version, state.digest) == (version, ack.digest)

    with_client(engine.url, scenario)


def test_generations_in_flight_across_publishes_carry_all_versions_each_part_its_own(
    engine: EngineProcess, models: list[Any], trainer: Trainer
) -> None:
    async def scenario(client: HttpEngine) -> None:
        held: dict[Version, Any] = {}
        version, (ack,) = await asyncio.to_thread(trainer.publish, models[0], engine.url)
        held[version] = models[0]
        running = asyncio.create_task(
            client.generate(request("flight", max_tokens=600, num_samples=4, seed=3))
        )
        for model in (models[1], models[2]):
            await running_tokens(client, 100)
            version, (ack,) = await asyncio.to_thread(trainer.publish, model, engine.url)
            assert isinstance(ack, Ack), ack
            held[version] = model
        for done in await running:
            assert [s.version for s in done.segments] == list(held)
            ids = torch.tensor(done.token_ids)[:, None]
            for part in done.segments:
                expected = logits(held[part.version], done).gather(1, ids)[:, 0]
                here = slice(part.start, part.end)
                found = torch.tensor(done.logprobs)
                assert torch.allclose(found[here], expected[here], atol=1e-4)

    with_client(engine.url, scenario)


def test_bytes_that_are_not_those_announced_leave_no_version_until_the_next_publish(
    engine: EngineProcess, models: list[Any], trainer: Trainer
) -> None:
    async def scenario(client: HttpEngine) -> None:
        before, (ack,) = await asyncio.to_thread(trainer.publish, models[0], engine.url)
        assert isinstance(ack, Ack), ack
        running = asyncio.create_task(client.generate(request("held", max_tokens=800, seed=1)))
        await running_tokens(client, 20)
        good = trainer.snapshot(models[1])
        torn = Snapshot(good.plan, good.buckets, "0" * 16)
        trainer.number += 1
        answers = await asyncio.to_thread(
            trainer.sender.publish, torn, Version(0, trainer.number), trainer.epoch, [engine.url]
        )
        assert isinstance(answers[engine.url], WeightsError)
        state = await client.state()
        assert (state.version, state.num_running) == (None, 1)
        after, (ack,) = await asyncio.to_thread(trainer.publish, models[1], engine.url)
        assert isinstance(ack, Ack), ack
        (done,) = await running
        assert [s.version for s in done.segments] == [before, after]
        assert len(done.token_ids) == 800

    with_client(engine.url, scenario)


def test_a_fenced_trainer_is_refused_and_wrong_bytes_are_no_relabel(
    engine: EngineProcess, models: list[Any], trainer: Trainer
) -> None:
    old = trainer.epoch
    trainer.epoch += 1
    trainer.sender.fence(trainer.epoch, [engine.url])
    version, (ack,) = trainer.publish(models[2], engine.url)
    assert isinstance(ack, Ack), ack
    late = WeightsSender(timeout_s=5)
    digest = trainer.snapshot(models[2]).digest
    assert isinstance(
        late.relabel(Version(0, 999), digest, old, [engine.url])[engine.url], WeightsError
    )
    wrong = trainer.sender.relabel(Version(0, 999), "0" * 16, trainer.epoch, [engine.url])
    assert isinstance(wrong[engine.url], WeightsError)

    async def scenario(client: HttpEngine) -> None:
        state = await client.state()
        assert (state.version, state.epoch) == (version, trainer.epoch)

    with_client(engine.url, scenario)


# ----------------------------------------------------------------------------------------- HTTP
def test_bad_bodies_and_refused_requests_are_told_apart_from_failures(
    engine: EngineProcess,
) -> None:
    async def scenario(client: HttpEngine) -> None:
        with pytest.raises(RequestRefused, match="too long"):
            await client.generate(request("long", prompt=tuple([5] * 2000)))
        async with aiohttp.ClientSession() as session:
            for path in ("/generate", "/attach", "/cancel", "/weights/update"):
                async with session.post(engine.url + path, data=b'{"no": 1}') as answer:
                    assert answer.status == 400
                    assert (await answer.json())["kind"] == "refused"

    with_client(engine.url, scenario)


def test_health_and_metrics_say_what_the_engine_does(engine: EngineProcess) -> None:
    async def scenario(client: HttpEngine) -> None:
        await client.generate(request("counted", max_tokens=8))
        state = await client.state()
        async with aiohttp.ClientSession() as session:
            async with session.get(engine.url + "/health") as answer:
                assert answer.status == 200
            async with session.get(engine.url + "/metrics") as answer:
                lines = (await answer.text()).splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        assert float(values["headwater_engine_tokens_total"]) == state.num_tokens
        assert state.version is not None
        assert float(values["headwater_engine_version"]) == state.version.number
        assert float(values["headwater_engine_update_seconds_count"]) >= 1
        assert float(values["headwater_engine_pause_seconds_sum"]) > 0
        for name in ("running", "queued", "kv_use"):
            assert float(values[f"headwater_engine_{name}"]) == 0

    with_client(engine.url, scenario)


def test_a_client_that_disconnects_finds_its_work_again(engine: EngineProcess) -> None:
    async def scenario(client: HttpEngine) -> None:
        lost = asyncio.create_task(client.generate(request("lost", max_tokens=300, seed=1)))
        await running_tokens(client, 5)
        lost.cancel()
        before = (await client.state()).num_tokens
        done = await client.attach("lost")
        assert done is not None
        assert len(done[0].token_ids) == 300
        assert (await client.state()).num_tokens - before < 300

    with_client(engine.url, scenario)


def test_cancel_over_http_returns_the_partials(engine: EngineProcess) -> None:
    async def scenario(client: HttpEngine) -> None:
        running = asyncio.create_task(client.generate(request("c", max_tokens=900)))
        await running_tokens(client, 5)
        (partial,) = await client.cancel("c")
        assert partial.finish_reason == "cancelled"
        assert 0 < len(partial.token_ids) < 900
        assert await running == (partial,)
        assert await client.attach("c") is None

    with_client(engine.url, scenario)


# ------------------------------------------------------------------------------- start, end, death
def test_a_decoder_that_dies_takes_the_process_with_it(
    tmp_path: Path, folders: list[Path], models: list[Any]
) -> None:
    process = EngineProcess(tmp_path, folders[0], dying=True)
    trainer = Trainer()
    digest = trainer.snapshot(models[0]).digest
    trainer.sender.relabel(Version(0, 0), digest, trainer.epoch, [process.url])

    async def scenario(client: HttpEngine) -> None:
        with pytest.raises(EngineUnavailable):
            await client.generate(request("w", max_tokens=100))

    with_client(process.url, scenario)
    assert process.process.wait(timeout=30) == 1
    assert "no memory for this step" in process.log.read_text()


def test_a_taken_port_is_one_clear_line(
    tmp_path: Path, folders: list[Path], engine: EngineProcess
) -> None:
    config = parse(
        {"model": {"path": str(folders[0])}, "tasks": {"t": {"reward": "exact_match"}}},
        base_dir=str(tmp_path),
    )
    port = int(engine.url.rsplit(":", 1)[1])
    with pytest.raises(EngineStartError, match=f"port {port}"):
        serve_engine(config, RunDir(tmp_path), "engine-9", port=port)


def test_unknown_engine_options_are_a_configuration_error(tmp_path: Path) -> None:
    config = parse(
        {
            "model": {"path": "nowhere"},
            "engine": {"options": {"num_thread": 2}},
            "tasks": {"t": {"reward": "exact_match"}},
        },
        base_dir=str(tmp_path),
    )
    with pytest.raises(ConfigError, match=r"engine\.options\.num_thread"):
        serve_engine(config, RunDir(tmp_path), "engine-9")


def test_a_killed_engines_request_completes_on_the_one_started_after_it_and_sigterm_ends_that(
    tmp_path: Path, folders: list[Path], models: list[Any]
) -> None:
    trainer = Trainer()
    first = EngineProcess(tmp_path, folders[0])
    started = [first]
    trainer.publish(models[1], first.url)

    async def scenario() -> None:
        pool = EnginePool(lambda: [started[-1].url])
        running = asyncio.create_task(pool.generate(request("r", max_tokens=900, seed=4)))
        await running_tokens(HttpEngine(first.url), 5)
        first.kill()
        started.append(await asyncio.to_thread(EngineProcess, tmp_path, folders[0]))
        version, (ack,) = await asyncio.to_thread(trainer.publish, models[1], started[-1].url)
        assert isinstance(ack, Ack), ack
        (done,) = await asyncio.wait_for(running, 60)
        assert len(done.token_ids) == 900
        assert {s.version for s in done.segments} == {version}
        await pool.close()

    async def ended_in_mid_request(client: HttpEngine) -> None:
        waiting = asyncio.create_task(client.generate(request("w", min_version=Version(9, 0))))
        deadline = time.monotonic() + 20
        while (await client.state()).num_queued == 0:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        started[-1].signal(signal.SIGTERM)
        with pytest.raises(EngineUnavailable, match="engine is stopping"):
            await waiting

    try:
        asyncio.run(scenario())
        with_client(started[-1].url, ended_in_mid_request)
        assert started[-1].stop() == 0
        assert "Traceback" not in started[-1].log.read_text()
    finally:
        for process in started:
            process.stop() if process.process.poll() is None else None
