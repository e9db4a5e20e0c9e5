"""The official OpenAI client, unchanged, through the gateway; and that what is recorded of a real
engine's answers is what that engine says it generated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from openai import (
    APIError,
    AsyncOpenAI,
    AuthenticationError,
    BadRequestError,
    InternalServerError,
    NotFoundError,
)

from connectors.engines.client import HttpEngine
from connectors.engines.pool import EnginePool
from connectors.engines.types import Completion, EngineError, GenerateRequest, Sampling
from connectors.records import Version
from connectors.text import Text
from connectors.traffic import Call
from connectors.weights import WeightsSender
from tests.connectors.engine_process import EngineProcess
from tests.connectors.gateway_bench import (
    WEATHER,
    Bench,
    ScriptedPool,
    gateway,
    run,
    until,
    with_tool_template,
)

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
HI: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [WEATHER]


@pytest.fixture(scope="module")
def model(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tool_template(tiny_model_path, tmp_path_factory.mktemp("model") / "tools")


@pytest.fixture(scope="module")
def text(model: Path) -> Text:
    return Text(model)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    process = EngineProcess(tmp_path_factory.mktemp("engine"), model)
    digest = asyncio.run(digest_of(process))
    with closing(WeightsSender(20, "memory")) as sender:
        sender.relabel(Version(0, 5), digest, 1, [process.url])
    yield process
    process.stop()


class WatchedPool(EnginePool):
    """Remembers what it was asked."""

    def __init__(self, engine: EngineProcess) -> None:
        super().__init__(lambda: [engine.url])
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        self.requests.append(request)
        return await super().generate(request)

    async def stream(self, request: GenerateRequest, told: Any) -> tuple[Completion, ...]:
        self.requests.append(request)
        return await super().stream(request, told)


@asynccontextmanager
async def clients(
    text: Text, pool: Any, **settings: Any
) -> AsyncIterator[tuple[Bench, AsyncOpenAI]]:
    async with gateway(text, pool, **settings) as bench:
        client = AsyncOpenAI(base_url=f"{bench.url}/v1", api_key="sk-any", max_retries=2)
        try:
            yield bench, client
        finally:
            await client.close()


async def digest_of(engine: EngineProcess) -> str:
    """Of the weights it started with."""
    direct = HttpEngine(engine.url)
    try:
        return (await direct.state()).digest
    finally:
        await direct.close()


async def generated(engine: EngineProcess, request: GenerateRequest) -> tuple[Completion, ...]:
    """What the engine itself keeps of a request."""
    direct = HttpEngine(engine.url)
    try:
        found = await direct.attach(request.request_id)
    finally:
        await direct.close()
    assert found is not None
    return found


def as_recorded(call: Call) -> list[tuple[Any, ...]]:
    return [(c.token_ids, c.logprobs, c.segments) for c in call.choices]


def as_generated(made: tuple[Completion, ...]) -> list[tuple[Any, ...]]:
    return [(c.token_ids, c.logprobs, c.segments) for c in made]


def test_what_is_recorded_is_what_the_engine_generated(text: Text, engine: EngineProcess) -> None:
    async def main() -> None:
        pool = WatchedPool(engine)
        sampling = Sampling(max_tokens=40, stop_ids=text.stop_ids)
        async with clients(text, pool, sampling=sampling) as (bench, client):
            whole = await client.chat.completions.create(
                model="latest", messages=HI, n=2, logprobs=True, seed=3
            )
            pieces = [
                piece
                async for piece in await client.chat.completions.create(
                    model="latest", messages=HI, logprobs=True, seed=4, stream=True,
                    stream_options={"include_usage": True},
                )
            ]  # fmt: skip
            first, second = bench.calls
            for call, request in zip((first, second), pool.requests, strict=True):
                assert call.prompt_ids == request.token_ids
                assert as_recorded(call) == as_generated(await generated(engine, request))
            for choice, made in zip(whole.choices, first.choices, strict=True):
                assert choice.logprobs is not None
                assert [e.logprob for e in choice.logprobs.content or ()] == list(
                    made.logprobs or ()
                )
                assert choice.message.content == made.message["content"]
            assert whole.usage is not None
            assert whole.usage.completion_tokens == sum(
                len(c.token_ids or ()) for c in first.choices
            )
            told = [p.choices[0] for p in pieces if p.choices]
            entries = [e for c in told if c.logprobs for e in c.logprobs.content or ()]
            assert [e.logprob for e in entries] == list(second.choices[0].logprobs or ())
            shown = "".join(c.delta.content or "" for c in told)
            assert shown == second.choices[0].message["content"]
            assert pieces[-1].usage is not None
            assert pieces[-1].usage.completion_tokens == len(second.choices[0].token_ids or ())
            await pool.close()

    run(main())


def test_turns_of_a_conversation_extend_the_engine_s_own_ids(
    text: Text, engine: EngineProcess
) -> None:
    async def main() -> None:
        pool = WatchedPool(engine)
        sampling = Sampling(max_tokens=12, stop_ids=text.stop_ids)
        async with clients(text, pool, sampling=sampling) as (bench, client):
            messages: Any = list(HI)
            for _ in range(4):
                answer = await client.chat.completions.create(model="latest", messages=messages)
                said = answer.choices[0].message.model_dump()
                messages += [said, {"role": "user", "content": "and?"}]
            for call, following in zip(bench.calls, bench.calls[1:], strict=False):
                whole = (*(call.prompt_ids or ()), *(call.choices[0].token_ids or ()))
                assert (following.prompt_ids or ())[: len(whole)] == whole
            assert len({call.session for call in bench.calls}) == 1
            await pool.close()

    run(main())


def test_the_version_an_engine_holds_can_be_demanded(text: Text, engine: EngineProcess) -> None:
    async def main() -> None:
        pool = WatchedPool(engine)
        async with clients(text, pool) as (bench, client):
            assert "0.5" in [m.id async for m in client.models.list()]
            for stream in (False, True):
                asked: Any = {"model": "0.5", "messages": HI, "max_tokens": 4, "stream": stream}
                answer = await client.chat.completions.create(**asked)
                if stream:
                    async for _ in answer:
                        pass
            assert {call.model for call in bench.calls} == {"0.5"}
            with pytest.raises(NotFoundError, match=r"0\.4.*0\.5"):
                await client.chat.completions.create(model="0.4", messages=HI)
            await pool.close()

    run(main())


def test_tools_whole_and_streamed(text: Text) -> None:
    async def main() -> None:
        pool = ScriptedPool(text, f"So: {CALL}", f"So: {CALL}", f"So: {CALL}", "rain it is")
        async with clients(text, pool) as (bench, client):
            answer = await client.chat.completions.create(
                model="latest", messages=HI, tools=TOOLS, tool_choice="auto"
            )
            async with client.chat.completions.stream(
                model="latest", messages=HI, tools=TOOLS
            ) as stream:
                streamed = await stream.get_final_completion()
            wholes = [answer, streamed]
            for got in wholes:
                (choice,) = got.choices
                assert choice.finish_reason == "tool_calls"
                assert (choice.message.content or "").strip() == "So:"
                (called,) = choice.message.tool_calls or ()
                assert called.type == "function"
                assert called.function.name == "weather"
                assert called.function.arguments == '{"city": "Oslo"}'
            said = streamed.choices[0].message
            assert said.tool_calls is not None
            result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "rain"}
            messages: Any = [*HI, said, result]
            await client.chat.completions.create(model="latest", messages=messages, tools=TOOLS)
            _, before, last = bench.calls
            whole = (*(before.prompt_ids or ()), *(before.choices[0].token_ids or ()))
            assert (last.prompt_ids or ())[: len(whole)] == whole

    run(main())


def test_the_client_s_own_retries_are_one_call(text: Text) -> None:
    async def main() -> None:
        pool = ScriptedPool(text, "fine and well")
        async with clients(text, pool) as (bench, client):
            pool.gate.clear()
            asking = asyncio.create_task(
                client.with_options(timeout=0.3).chat.completions.create(
                    model="latest", messages=HI
                )
            )
            await until(lambda: bench.http is not None and len(pool.requests) == 1)
            for _ in range(400):
                if await bench.metric("retries_joined_total") >= 1:
                    break
                await asyncio.sleep(0.01)
            pool.gate.set()
            answer = await asking
            (call,) = bench.calls
            assert answer.id == call.id
            assert len(pool.requests) == 1

    run(main())


def test_an_engine_that_fails_once_is_asked_again(text: Text) -> None:
    async def main() -> None:
        pool = ScriptedPool(text, "fine")
        async with clients(text, pool) as (bench, client):
            pool.fails = EngineError("broken")
            asking = asyncio.create_task(
                client.chat.completions.create(model="latest", messages=HI)
            )
            await until(lambda: len(pool.requests) == 1)
            pool.fails = None
            assert (await asking).choices[0].message.content == "fine"
            assert len(bench.calls) == 1
            pool.fails = EngineError("broken")
            with pytest.raises(InternalServerError):
                await client.with_options(max_retries=0).chat.completions.create(
                    model="latest", messages=HI
                )
            pool.told_before = 1
            with pytest.raises(APIError, match="the engines failed"):
                async for _ in await client.with_options(max_retries=0).chat.completions.create(
                    model="latest", messages=[{"role": "user", "content": "ho"}], stream=True
                ):
                    pass

    run(main())


def test_refusals_are_the_client_s_exceptions(text: Text, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-ours\n")

    async def main() -> None:
        async with clients(text, ScriptedPool(text), keys_file=keys) as (_, client):
            with pytest.raises(AuthenticationError):
                await client.models.list()
            client.api_key = "sk-ours"
            assert [m.id async for m in client.models.list()] == ["latest", "shop", "0.3"]
            with pytest.raises(NotFoundError, match=r"served are: latest, shop, 0\.3"):
                await client.chat.completions.create(model="gpt-5", messages=HI)
            with pytest.raises(BadRequestError, match="stop is not supported"):
                await client.chat.completions.create(model="latest", messages=HI, stop=["\n"])

    run(main())
