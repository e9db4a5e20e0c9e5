"""One prompt in, exactly one terminal out, whatever the prompt, the agent or the engine does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from connectors.engines.types import EngineError, GenerateRequest, Sampling
from connectors.records import Cancel, Closed, Group, Origin, Version
from connectors.text import Text
from operators import agents
from operators.agents import Outcome
from operators.rollout import AgentTask, Rolled, Rollout, Settings, check_agent
from operators.user_code import UserCode
from tests.operators.engine_fake import END, FakeEngine, completion, in_turn, tokenizer

ORIGIN = Origin("headwater.prompts", 1, 42)
ASKED: dict[str, Any] = {"task": "sum", "messages": [{"role": "user", "content": "a"}]}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return tokenizer(tmp_path_factory.mktemp("plain"))


def always(text: Text, said: str = "yes") -> FakeEngine:
    return FakeEngine(lambda request: [*text.encode(said), END])


def roll(
    engine: FakeEngine,
    text: Text,
    prompt: Any,
    *,
    agent: Callable[..., Awaitable[Outcome | None]] = agents.single_turn,
    group_size: int = 2,
    resubmitted: bool = False,
    min_version: Version | None = None,
    **changes: Any,
) -> Rolled:
    fields: dict[str, Any] = {
        "seed": 0, "sampling": Sampling(max_tokens=16), "context_tokens": 200,
    }  # fmt: skip
    settings = Settings(**(fields | changes))
    task = AgentTask(agent=agent, group_size=group_size)
    value = prompt if prompt is None or isinstance(prompt, bytes) else msgspec.json.encode(prompt)

    async def run() -> Rolled:
        rollout = Rollout(settings, {"sum": task}, engine, text, UserCode("agents"))
        return await rollout(value, ORIGIN, min_version, resubmitted)

    return asyncio.run(run())


def closed(rolled: Rolled) -> Closed:
    assert isinstance(rolled.terminal, Closed), rolled
    return rolled.terminal


def group(rolled: Rolled) -> Group:
    assert isinstance(rolled.terminal, Group), rolled
    assert rolled.dead_letter is None
    return rolled.terminal


def test_a_prompt_becomes_a_group_of_n_trajectories(text: Text) -> None:
    engine = always(text)
    made = group(roll(engine, text, ASKED, group_size=3, min_version=Version(0, 0)))
    assert made.group_id == "headwater.prompts/1/42"
    assert [t.trajectory_id for t in made.trajectories] == [
        f"headwater.prompts/1/42/{k}" for k in range(3)
    ]
    row = made.trajectories[0]
    assert row.tokens.tolist() == text.encode(
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"
    )
    assert row.loss_mask.sum() == len("yes") + 1
    assert np.isnan(row.reward)
    assert row.finish_reason == "stop"
    assert made.oldest == Version(0, 0)
    assert len({r.sampling.seed for r in engine.requests}) == 3
    assert {r.min_version for r in engine.requests} == {Version(0, 0)}
    assert engine.requests[0].sampling.stop_ids == text.stop_ids


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ({"task": "sum", "prompt": "ab"}, [70, 71]),
        ({"task": "sum", "token_ids": [70, 71]}, [70, 71]),
    ],
)
def test_text_and_ids_are_prompts_too(text: Text, prompt: Any, expected: list[int]) -> None:
    wanted = text.encode("ab") if "prompt" in prompt else expected
    row = group(roll(always(text), text, prompt)).trajectories[0]
    assert row.tokens.tolist()[:2] == wanted


@pytest.mark.parametrize(
    ("value", "code", "reason"),
    [
        (b"{no json", "not_json", "malformed"),
        (b"\xff\xfe", "not_json", "malformed"),
        (b'{"x":' * 100_000, "not_json", "malformed"),
        (b"", "not_json", "malformed"),
        (b'"text"', "bad_prompt", "malformed"),
        (b'{"task": "sum"}', "bad_prompt", "malformed"),
        (b'{"task": "sum", "prompt": "a", "token_ids": [1]}', "bad_prompt", "malformed"),
        (b'{"task": "sum", "messages": "hello"}', "bad_prompt", "malformed"),
        (b'{"task": "sum", "messages": []}', "bad_prompt", "malformed"),
        (b'{"task": "sum", "messages": [{"content": {}}]}', "bad_prompt", "malformed"),
        (b'{"task": "sum", "token_ids": [-1]}', "bad_prompt", "malformed"),
        (b'{"task": "sum", "token_ids": [260]}', "bad_prompt", "malformed"),
        (b'{"task": "sum", "token_ids": []}', "bad_prompt", "malformed"),
        (b'{"task": "sum", "prompt": ""}', "bad_prompt", "malformed"),
        (b'{"task": 3, "prompt": "a"}', "bad_prompt", "malformed"),
        (b'{"task": "other", "prompt": "a"}', "unknown_task", "unknown_task"),
        (b'{"task": "sum", "prompt": "%s"}' % (b"a" * 200), "too_long", "too_long"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_a_dead_letter_and_closed(
    text: Text, value: bytes, code: str, reason: str
) -> None:
    engine = always(text)
    rolled = roll(engine, text, value)
    assert rolled.dead_letter is not None
    assert rolled.dead_letter.code == code
    assert rolled.dead_letter.message
    assert closed(rolled).reason == reason
    assert closed(rolled).group_id == str(ORIGIN)
    assert engine.requests == []


def test_an_offset_without_a_record_is_closed_without_a_dead_letter(text: Text) -> None:
    rolled = roll(always(text), text, None)
    assert closed(rolled).reason == "no_record"
    assert rolled.dead_letter is None


def test_an_agent_that_raises_is_tried_three_times_with_other_seeds(text: Text) -> None:
    async def agent(prompt: Any, llm: Any, tools: Any) -> None:
        await llm.chat(prompt.messages)
        raise KeyError("lost")

    engine = always(text)
    end = closed(roll(engine, text, ASKED, agent=agent, group_size=1))
    assert end.reason == "agent_failed"
    assert "KeyError" in end.message
    assert len(engine.requests) == 3
    assert len({r.request_id for r in engine.requests}) == 3
    assert len({r.sampling.seed for r in engine.requests}) == 3


def test_an_agent_that_raises_once_keeps_only_what_the_second_attempt_wrote(text: Text) -> None:
    attempts: list[int] = []

    async def agent(prompt: Any, llm: Any, tools: Any) -> Outcome:
        await llm.chat(prompt.messages)
        attempts.append(1)
        if len(attempts) == 1:
            raise ValueError("once")
        return Outcome(reward=0.5, metadata={"note": "second", "headwater.messages": "mine"})

    made = group(roll(always(text), text, ASKED, agent=agent, group_size=1))
    (row,) = made.trajectories
    assert (row.reward, row.turns) == (0.5, 1)
    assert row.metadata == {"note": "second"}  # the prefix is not the agent's


@pytest.mark.parametrize("returned", ["text", 1.0, {"reward": 1.0}])
def test_an_agent_that_returns_something_else_fails(text: Text, returned: Any) -> None:
    async def agent(prompt: Any, llm: Any, tools: Any) -> Any:
        await llm.chat(prompt.messages)
        return returned

    assert closed(roll(always(text), text, ASKED, agent=agent)).reason == "agent_failed"


def test_an_agent_that_never_asks_the_llm_fails(text: Text) -> None:
    async def agent(prompt: Any, llm: Any, tools: Any) -> None:
        return None

    assert closed(roll(always(text), text, ASKED, agent=agent)).reason == "agent_failed"


def test_a_reward_of_the_agents_own_that_is_no_number_closes_the_group(text: Text) -> None:
    async def agent(prompt: Any, llm: Any, tools: Any) -> Outcome:
        await llm.chat(prompt.messages)
        return Outcome(reward=float("nan"))

    assert closed(roll(always(text), text, ASKED, agent=agent)).reason == "reward_nan"


def test_an_engine_that_fails_for_good_closes_the_group(text: Text) -> None:
    def answer(request: GenerateRequest) -> list[int]:
        raise EngineError("broken")

    assert closed(roll(FakeEngine(answer), text, ASKED)).reason == "engine_failed"


class Ordered:
    """A rollout under way whose orders the test gives; versions below `answers_from` hang."""

    def __init__(self, text: Text, answers_from: int, agent: Any = agents.single_turn) -> None:
        def answer(request: GenerateRequest) -> list[int] | None:
            assert request.min_version is not None
            too_old = request.min_version.number < answers_from
            return None if too_old else [*text.encode("yes"), END]

        self.engine = FakeEngine(answer)
        self._text, self._agent = text, agent

    async def roll(self, *orders: tuple[Cancel, Version], look_s: float = 0.001) -> Rolled:
        """Each order is given once the requests before it are at the engine, for which it is looked
        every `look_s`."""
        settings = Settings(seed=0, sampling=Sampling(max_tokens=16), context_tokens=200)
        tasks = {"sum": AgentTask(agent=self._agent, group_size=2)}
        rollout = Rollout(settings, tasks, self.engine, self._text, UserCode("agents"))
        left = list(orders)

        async def take() -> tuple[Cancel, Version]:
            sent = 2 * (len(orders) - len(left) + 1)
            while not left or len(self.engine.requests) < sent:
                await asyncio.sleep(look_s)
            return left.pop(0)

        async with asyncio.timeout(20):
            return await rollout(msgspec.json.encode(ASKED), ORIGIN, Version(0, 0), orders=take)


def cancel(then: str, reason: str, version: int) -> tuple[Cancel, Version]:
    return Cancel(str(ORIGIN), then, reason), Version(0, version)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "closed_as"), [("stale", "stale"), ("overload", "cancelled"), ("", "cancelled")]
)
def test_a_group_that_is_ordered_to_close_cancels_its_requests_and_closes_with_the_reason(
    text: Text, reason: str, closed_as: str
) -> None:
    run = Ordered(text, answers_from=9)
    end = closed(asyncio.run(run.roll(cancel("close", reason, 1))))
    assert end.reason == closed_as
    assert reason in end.message
    assert len(run.engine.requests) == 2
    assert run.engine.cancelled == run.engine.sent


def test_a_requeued_group_cancels_its_requests_and_starts_again_under_the_announced_version(
    text: Text,
) -> None:
    run = Ordered(text, answers_from=5)
    made = group(asyncio.run(run.roll(cancel("requeue", "stale", 2), cancel("requeue", "", 5))))
    assert [t.trajectory_id for t in made.trajectories] == [f"{ORIGIN}/0", f"{ORIGIN}/1"]
    requests = run.engine.requests
    versions = [r.min_version.number for r in requests if r.min_version is not None]
    assert versions == [0, 0, 2, 2, 5, 5]
    assert run.engine.cancelled == run.engine.sent[:2]
    assert len({r.request_id for r in requests}) == 6, "what was cancelled is never asked for again"
    assert run.engine.attached == []


def test_an_order_that_comes_after_the_last_token_changes_nothing(text: Text) -> None:
    run = Ordered(text, answers_from=0)
    group(asyncio.run(run.roll(cancel("close", "stale", 1), look_s=10.0)))
    assert run.engine.cancelled == []


def test_a_users_agent_is_ended_by_an_order(text: Text) -> None:
    async def agent(prompt: Any, llm: Any, tools: Any) -> None:
        await llm.chat(prompt.messages)

    run = Ordered(text, answers_from=9, agent=agent)
    assert closed(asyncio.run(run.roll(cancel("close", "stale", 1)))).reason == "stale"
    assert len(run.engine.cancelled) == 2


def test_an_agent_that_fills_the_context_keeps_what_it_wrote(text: Text) -> None:
    async def agent(prompt: Any, llm: Any, tools: Any) -> None:
        while True:
            await llm.generate([70] * 10)

    made = group(roll(always(text), text, {"task": "sum", "prompt": "ab"}, agent=agent))
    row = made.trajectories[0]
    assert row.finish_reason == "length"
    assert row.turns > 1
    assert len(row.tokens) <= 200


def test_resubmitted_work_attaches_before_it_generates(text: Text) -> None:
    engine = always(text)
    group(roll(engine, text, ASKED))
    assert engine.attached == []
    sent = list(engine.sent)
    group(roll(engine, text, ASKED, resubmitted=True))
    assert engine.attached == sent


def test_a_group_of_one_turn_is_one_request_and_its_samples_are_rows(text: Text) -> None:
    def answer(request: GenerateRequest) -> list[int]:
        return [*text.encode("abc"[(request.sampling.seed or 0) % 3]), END]

    engine = FakeEngine(answer)
    made = group(roll(engine, text, ASKED, group_size=3))
    assert len(engine.sent) == 1
    first = engine.requests[0].sampling.seed
    assert first is not None
    assert [r.sampling.seed for r in engine.requests] == [first, first + 1, first + 2]
    said = [text.decode(t.tokens[t.loss_mask != 0]) for t in made.trajectories]
    assert said == ["abc"[(first + k) % 3] for k in range(3)]
    whole = tuple([completion([*text.encode("held"), END])] * 3)
    engine.held[engine.sent[0]] = whole
    again = group(roll(engine, text, ASKED, group_size=3, resubmitted=True))
    assert [text.decode(t.tokens[t.loss_mask != 0]) for t in again.trajectories] == ["held"] * 3
    engine.held[engine.sent[0]] = (
        *whole[:2],
        msgspec.structs.replace(whole[2], finish_reason="cancelled"),
    )
    group(roll(engine, text, ASKED, group_size=3, resubmitted=True))
    assert len(engine.sent) == 2


def test_every_turn_of_every_trajectory_is_of_the_groups_session(text: Text) -> None:
    async def twice(_: Any, llm: Any, __: Any) -> None:
        for _ in range(2):
            await llm.generate([70])

    engine = always(text)
    group(roll(engine, text, ASKED, agent=twice, group_size=2))
    assert len(engine.requests) == 4
    assert {r.session for r in engine.requests} == {str(ORIGIN)}


def test_the_tool_loop_writes_call_result_and_answer_into_one_row(text: Text) -> None:
    said = [[*text.encode("calc(12+7)"), END], [*text.encode("19"), END]]
    made = group(
        roll(FakeEngine(in_turn(*said)), text, ASKED, agent=agents.tool_loop, group_size=1)
    )
    (row,) = made.trajectories
    assert text.decode(row.tokens.tolist(), special=True) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\ncalc(12+7)<|im_end|>\n"
        "<|im_start|>tool\n19<|im_end|>\n<|im_start|>assistant\n19<|im_end|>"
    )
    assert text.decode(row.tokens[row.loss_mask == 1].tolist()) == "calc(12+7)19"
    assert row.turns == 2
    assert msgspec.json.decode(row.metadata["headwater.messages"]) == [
        {"role": "assistant", "content": "calc(12+7)"},
        {"role": "tool", "content": "19"},
        {"role": "assistant", "content": "19"},
    ]


def test_the_tool_loop_ends_after_its_turns_and_goes_on_after_a_tool_error(text: Text) -> None:
    engine = always(text, "calc(1/0)")
    made = group(
        roll(engine, text, ASKED, agent=agents.tool_loop, group_size=1, context_tokens=1000)
    )
    (row,) = made.trajectories
    assert row.turns == agents.MAX_TOOL_TURNS
    assert "error: division by zero" in text.decode(row.tokens.tolist())


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12+7", "19"), ("7/2", "3.5"), ("-(2**10)", "-1024"), ("6/2", "3"), (" 1 + 2 * 3 ", "7")],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert agents.calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "a",
        "__import__('os')",
        "2**10000",
        "9**9**9",
        "1+",
        "'a'*9",
        "(" * 150,
        "True+1",
        "1e400",
    ],
)
def test_the_calculator_refuses_everything_else(expression: str) -> None:
    with pytest.raises(ValueError, match=r"expression|too large"):
        agents.calculate(expression)


def test_a_plain_function_is_no_agent(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="async def"):
        check_agent(lambda prompt, llm, tools: None)
    check_agent(agents.single_turn)
