"""What is particular to the `hf` engine: its paged batching and its start. What every engine keeps
is in test_engine_contract.py."""

from __future__ import annotations

import asyncio
import copy
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from connectors.config import Config, ConfigError, parse
from connectors.config.lora import Lora
from connectors.engines.engine import DecodingEngine
from connectors.engines.hf.decoder import Decoder, DecoderOptions, load_model
from connectors.engines.hf.swap import WeightSwap
from connectors.engines.host import this_host
from connectors.engines.server import serve_engine
from connectors.engines.types import Completion, EngineStartError, GenerateRequest, Sampling
from connectors.records import Version
from connectors.run_dir import RunDir
from connectors.weights import RelabelRequest, Snapshot, WeightsReceiver
from tests.connectors.weights_reader import request_for
from tests.models import tiny_model
from trainer.lora import add_adapters

PROMPT = tuple(range(40, 72))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.set_num_threads(1)
    return load_model(tiny_model(tmp_path_factory.mktemp("model")), "float32", "cpu")


def play(
    model: Any,
    scenario: Callable[[DecodingEngine, Decoder], Awaitable[None]],
    *,
    max_running: int = 8,
    context_tokens: int = 512,
    published: Snapshot | None = None,
    **options: Any,
) -> None:
    """Runs the scenario on an engine in this process that holds a version: of what it started with,
    or of what was `published` to it."""
    decoder = Decoder(
        copy.deepcopy(model),
        max_running=max_running,
        context_tokens=context_tokens,
        options=DecoderOptions(**options),
    )
    swap = WeightSwap(decoder, WeightsReceiver(dict(decoder.model.named_parameters())))

    async def main() -> None:
        engine = DecodingEngine(decoder, swap, max_running=max_running)
        fatal: list[str] = []
        engine.start(on_fatal=fatal.append)
        decoder.start()
        try:
            if published is None:
                swap.relabel(RelabelRequest(epoch=0, version=Version(0, 1), digest=swap.digest))
            else:
                await asyncio.to_thread(swap.load, request_for(published))
            await asyncio.wait_for(scenario(engine, decoder), 60)
            assert fatal == []
        finally:
            engine.close()
            decoder.stop()

    asyncio.run(main())


def request(prompt: tuple[int, ...] = PROMPT, **changes: Any) -> GenerateRequest:
    sampling = Sampling(max_tokens=changes.pop("max_tokens", 32), seed=1)
    return GenerateRequest(request_id="r", token_ids=prompt, sampling=sampling, **changes)


def expected(model: Any, prompt: tuple[int, ...], done: Completion) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *done.token_ids]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]


# ---------------------------------------------------------------------------------- the paged batch
def test_a_prompt_longer_than_one_forward_pass_is_prefilled_in_parts(model: Any) -> None:
    prompt = tuple(4 + (i * 7) % 250 for i in range(150))

    async def scenario(engine: DecodingEngine, _: Decoder) -> None:
        for one in await engine.generate(request(prompt, num_samples=4)):
            found = torch.tensor(one.logprobs)
            assert torch.allclose(found, expected(model, prompt, one), atol=1e-4)

    play(model, scenario, max_batch_tokens=40, max_running=4)


def test_a_cache_too_small_for_all_still_gives_every_sample_the_same_tokens(model: Any) -> None:
    """In float64: rounding, which differs with the number of rows in a pass and from machine to
    machine, else tips a draw that is close to the edge between two tokens."""
    model = copy.deepcopy(model).double()
    wide: list[tuple[int, ...]] = []

    async def roomy(engine: DecodingEngine, _: Decoder) -> None:
        done = await engine.generate(request(num_samples=8, max_tokens=64))
        wide.extend(c.token_ids for c in done)

    async def tight(engine: DecodingEngine, decoder: Decoder) -> None:
        assert decoder.kv_tokens < 8 * (32 + 64)
        done = await engine.generate(request(num_samples=8, max_tokens=64))
        assert [c.token_ids for c in done] == wide

    play(model, roomy)
    play(model, tight, kv_bytes=1 << 17, page_tokens=16, context_tokens=112)


def test_logits_that_are_not_finite_end_the_sample_as_an_error(model: Any) -> None:
    async def scenario(engine: DecodingEngine, decoder: Decoder) -> None:
        running = asyncio.create_task(engine.generate(request(max_tokens=400)))
        while decoder.num_tokens < 5:
            await asyncio.sleep(0.002)
        with decoder.paused(), torch.no_grad():
            decoder.model.model.norm.weight.fill_(float("nan"))
        (one,) = await running
        assert one.finish_reason == "error"
        assert 5 <= len(one.token_ids) < 400
        assert all(-1e4 < p <= 0 for p in one.logprobs)
        state = await engine.state()
        assert (state.num_running, state.num_queued) == (0, 0)

    play(model, scenario)


# -------------------------------------------------------------------------------------- the weights
@pytest.mark.skipif(not this_host(), reason="memory files are Linux's")
def test_with_adapters_it_serves_what_the_trainer_computes_with_them(model: Any) -> None:
    """Weights of the usual spread: with ten times that, two float32 forward passes of one model in
    two orders are 2e-5 apart."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter /= 10
    trained = copy.deepcopy(model)
    adapted = add_adapters(trained, Lora(rank=4), seed=0)
    for number, (_, parameter) in enumerate(adapted.named_parameters()):
        if number % 2:  # B: as some training may leave it
            generator = torch.Generator().manual_seed(number)
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    published = Snapshot.take(adapted.named_parameters(), adapted.plan(torch.float32))

    async def scenario(engine: DecodingEngine, _: Decoder) -> None:
        for one in await engine.generate(request(num_samples=4)):
            found = torch.tensor(one.logprobs)
            assert (found - expected(trained, PROMPT, one)).abs().max() < 1e-5
            assert (found - expected(model, PROMPT, one)).abs().max() > 0.1

    play(model, scenario, published=published)


# ---------------------------------------------------------------------------------------- the start
def test_a_folder_without_a_model_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"has no config\.json"):
        load_model(tmp_path / "nowhere", "float32", "cpu")


def test_a_damaged_model_is_one_clear_line(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(EngineStartError, match="cannot be loaded") as caught:
        load_model(folder, "float32", "cpu")
    assert "\n" not in str(caught.value)


def configured(folder: Path, **engine: Any) -> Config:
    return parse(
        {"model": {"path": "."}, "engine": engine, "tasks": {"t": {"reward": "exact_match"}}},
        base_dir=str(folder),
    )


def test_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    config = configured(tiny_model(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineStartError, match=f"port {port}"):
            serve_engine(config, RunDir(tmp_path), "engine-9", port=port)


def test_unknown_engine_options_are_a_configuration_error(tmp_path: Path) -> None:
    config = configured(tmp_path, options={"num_thread": 2})
    with pytest.raises(ConfigError, match=r"engine\.options\.num_thread"):
        serve_engine(config, RunDir(tmp_path), "engine-9")
