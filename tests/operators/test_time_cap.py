"""What the time cap counts: a group's whole rollout, but not the time an outage holds it up."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from connectors.engines.pool import EnginePool
from connectors.engines.types import Engine, Sampling
from connectors.records import Cancel, Closed, Group, Origin, Version
from connectors.text import Text
from operators import agents
from operators.rollout import AgentTask, Rolled, Rollout, Settings
from operators.user_code import UserCode
from tests.connectors.scripted_engine import ScriptedEngine, pool_of, run, serving, until
from tests.operators.engine_fake import FakeEngine, tokenizer

ORIGIN = Origin("headwater.prompts", 1, 42)
LEAST = Version(0, 2)
ASKED = msgspec.json.encode({"task": "sum", "messages": [{"role": "user", "content": "a"}]})


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return tokenizer(tmp_path_factory.mktemp("plain"))


async def roll(
    engine: Engine,
    text: Text,
    cap_s: float,
    *,
    agent: Callable[..., Awaitable[Any]] = agents.single_turn,
    min_version: Version | None = None,
    orders: Callable[[], Awaitable[tuple[Cancel, Version]]] | None = None,
) -> Group | Closed:
    settings = Settings(
        seed=0, sampling=Sampling(max_tokens=1), context_tokens=200, time_cap_s=cap_s
    )
    tasks = {"sum": AgentTask(agent=agent, group_size=2)}
    rollout = Rollout(settings, tasks, engine, text, UserCode("agents"))
    rolled: Rolled = await rollout(ASKED, ORIGIN, min_version, orders=orders)
    return rolled.terminal


def hangs() -> FakeEngine:
    return FakeEngine(lambda request: None)


def reason(terminal: Group | Closed) -> str:
    assert isinstance(terminal, Closed), terminal
    return terminal.reason


def test_the_time_cap_closes_the_group_and_cancels_what_runs(text: Text) -> None:
    engine = hangs()
    assert reason(asyncio.run(roll(engine, text, 0.3))) == "time_cap"
    assert len(engine.requests) == 2
    assert engine.cancelled == engine.sent


def test_an_agent_that_hangs_is_ended_by_the_time_cap(text: Text) -> None:
    async def agent(prompt: Any, llm: Any, tools: Any) -> None:
        await asyncio.Event().wait()

    assert reason(asyncio.run(roll(hangs(), text, 0.3, agent=agent))) == "time_cap"


def test_a_group_that_is_requeued_again_and_again_has_one_time_cap(text: Text) -> None:
    versions = itertools.count(1)

    async def order() -> tuple[Cancel, Version]:
        await asyncio.sleep(0.05)
        return Cancel(str(ORIGIN), "requeue", "stale"), Version(0, next(versions))

    async def main() -> None:
        assert reason(await roll(hangs(), text, 0.3, orders=order)) == "time_cap"

    run(main())
    assert next(versions) > 2


def test_the_clock_stands_during_an_outage_and_goes_on_after_it(text: Text) -> None:
    async def main() -> None:
        engine = hangs()
        engine.away = True
        rolling = asyncio.create_task(roll(engine, text, 0.1))
        await asyncio.wait({rolling}, timeout=0.5)
        assert not rolling.done()
        engine.away = False
        assert reason(await rolling) == "time_cap"

    run(main())


class Outage:
    """A group under way on a pool of one engine, while an outage lasts longer than the cap."""

    def __init__(self, text: Text, version: int | None) -> None:
        self._text = text
        self.engine = ScriptedEngine(version=version)

    def begins(self, pool: EnginePool) -> None:
        self._rolling = asyncio.create_task(roll(pool, self._text, 1.0, min_version=LEAST))

    async def lasts(self) -> None:
        await asyncio.wait({self._rolling}, timeout=1.5)
        assert not self._rolling.done()

    async def costs_nothing(self) -> None:
        assert isinstance(await self._rolling, Group)


def test_no_engine_for_longer_than_the_time_cap_costs_no_prompt(text: Text) -> None:
    async def main() -> None:
        outage = Outage(text, version=2)
        async with pool_of(outage.engine) as pool:
            outage.begins(pool)
            await outage.lasts()
            async with serving(outage.engine):
                await outage.costs_nothing()

    run(main())


@pytest.mark.parametrize("version", [None, 1])
def test_no_engine_with_the_version_for_longer_than_the_time_cap_costs_no_prompt(
    text: Text, version: int | None
) -> None:
    async def main() -> None:
        outage = Outage(text, version)
        async with serving(outage.engine), pool_of(outage.engine) as pool:
            outage.begins(pool)
            await outage.lasts()
            assert outage.engine.requests == []
            outage.engine.version = LEAST
            await outage.costs_nothing()

    run(main())


def test_an_engine_that_loses_its_version_for_longer_than_the_time_cap_costs_no_prompt(
    text: Text,
) -> None:
    async def main() -> None:
        outage = Outage(text, version=2)
        outage.engine.hold.clear()
        async with serving(outage.engine), pool_of(outage.engine) as pool:
            outage.begins(pool)
            await until(lambda: len(outage.engine.in_flight) == 1)
            outage.engine.version = None
            await outage.lasts()
            outage.engine.version = LEAST
            outage.engine.hold.set()
            await outage.costs_nothing()

    run(main())
