"""What is sampled is what is trained: the llm's ids against templates and tokenizers that would
change them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connectors.branches import Row
from connectors.engines.types import EngineError, Sampling
from connectors.records import Version
from connectors.text import Text
from operators.agents import ContextFull, Message
from operators.llm import EngineLLM, Session
from tests.operators.engine_fake import END, START, FakeEngine, completion, in_turn, tokenizer

USER = {"role": "user", "content": "a"}
MORE = {"role": "user", "content": "b"}

STRIPS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in m['content'] %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return tokenizer(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def drifting(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """Encodes HAVING as HAV ING, though a model may sample H AVING."""
    merges = (("H", "A"), ("HA", "V"), ("I", "N"), ("IN", "G"))
    return tokenizer(tmp_path_factory.mktemp("drift"), merges=merges, more=["AVING"])


def session(**changes: Any) -> Session:
    fields: dict[str, Any] = {
        "name": "headwater.prompts/0/7/0",
        "group_id": "headwater.prompts/0/7",
        "seed": 1,
        "sampling": Sampling(max_tokens=8, stop_ids=(END,)),
        "context_tokens": 500,
        "min_version": None,
    }
    return Session(**(fields | changes))


def converse(
    engine: FakeEngine,
    text: Text,
    agent: Any,
    *,
    prompt_ids: list[int] | None = None,
    **changes: Any,
) -> list[Row]:
    """The rows left by `agent`, which talks to a session with `changes`."""

    async def run() -> list[Row]:
        llm = EngineLLM(engine, text, session(**changes), prompt_ids or ())
        await agent(llm)
        return llm.rows()

    return asyncio.run(run())


async def two_turns(llm: EngineLLM) -> None:
    first = await llm.chat([USER])
    await llm.chat([USER, first, MORE])


def ids_of(row: Row) -> list[int]:
    return [int(i) for i in row.tokens]


def test_the_second_turn_continues_the_sampled_ids_not_those_of_the_same_text(
    drifting: Text,
) -> None:
    h, aving = drifting.encode("H")[0], drifting.vocab_size - 1
    assert drifting.decode([h, aving]) == "HAVING"
    assert len(drifting.encode("HAVING")) == 2
    assert drifting.encode("HAVING") != [h, aving]
    answer = drifting.encode("x")
    engine = FakeEngine(in_turn([h, aving, END], [*answer, END]))
    (row,) = converse(engine, drifting, two_turns)
    first = drifting.encode("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")
    between = drifting.encode("\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n")
    assert ids_of(row) == [*first, h, aving, END, *between, *answer, END]
    assert engine.requests[1].token_ids == (*first, h, aving, END, *between)
    assert row.turns == 2


def test_the_newline_after_an_end_of_turn_is_the_next_prompts(text: Text) -> None:
    engine = FakeEngine(in_turn([*text.encode("yes"), END], [*text.encode("no"), END]))
    (row,) = converse(engine, text, two_turns)
    ends = [i for i, token in enumerate(row.tokens) if token == END and row.loss_mask[i]]
    newline = text.encode("\n")[0]
    assert row.tokens[ends[0] + 1] == newline
    assert row.loss_mask[ends[0]] == 1
    assert row.loss_mask[ends[0] + 1] == 0
    assert ends[1] == len(row.tokens) - 1  # nothing is added after the last turn


def test_masks_logprobs_and_segments_lie_on_the_generated_tokens(text: Text) -> None:
    engine = FakeEngine(in_turn([*text.encode("yes"), END], [*text.encode("no"), END]))

    async def agent(llm: EngineLLM) -> None:
        first = await llm.chat([USER])
        engine.version = Version(0, 1)
        await llm.chat([USER, first, MORE])

    (row,) = converse(engine, text, agent)
    assert np.array_equal(~np.isnan(row.logprobs), row.loss_mask == 1)
    assert row.logprobs[row.loss_mask == 1] == pytest.approx(
        [-0.01, -0.02, -0.03, -0.04, -0.01, -0.02, -0.03]
    )
    covered = np.zeros(len(row.tokens), np.int8)
    for segment in row.segments:
        covered[segment.start : segment.end] = 1
    assert np.array_equal(covered, row.loss_mask)
    assert [s.version for s in row.segments] == [Version(0, 0), Version(0, 1)]


def test_a_turn_cut_by_its_length_gets_its_end_from_the_next_prompt(text: Text) -> None:
    cut = text.encode("half")
    engine = FakeEngine(in_turn(cut, [*text.encode("x"), END]))
    (row,) = converse(engine, text, two_turns)
    end = ids_of(row).index(cut[0], 10) + len(cut)
    assert row.tokens[end] == END
    assert row.loss_mask[end] == 0


def test_a_template_that_strips_thoughts_forks(tmp_path: Path) -> None:
    text = tokenizer(tmp_path, template=STRIPS_THOUGHTS)
    thought = [*text.encode("<think>hm</think>yes"), END]
    engine = FakeEngine(in_turn(thought, [*text.encode("no"), END]))
    first, second = converse(engine, text, two_turns)
    assert text.decode(first.tokens[first.loss_mask == 1].tolist()) == "<think>hm</think>yes"
    written = text.decode(second.tokens.tolist(), special=True)
    assert written == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\nno<|im_end|>"
    )
    # the stripped answer is context in the second row: nobody sampled these ids after this prompt
    assert text.decode(second.tokens[second.loss_mask == 1].tolist()) == "no"


def test_a_rewritten_answer_forks_and_an_unchanged_one_with_a_tool_call_does_not(
    text: Text,
) -> None:
    said = "Let me call a <tool_call>{}</tool_call> and get the result"
    turn, answer = [*text.encode(said), END], [*text.encode("x"), END]

    async def rewriting(llm: EngineLLM) -> None:
        await llm.chat([USER])
        stripped = {"role": "assistant", "content": "Let me call a and get the result"}
        await llm.chat([USER, stripped, MORE])

    assert len(converse(FakeEngine(in_turn(turn, answer)), text, rewriting)) == 2
    (row,) = converse(FakeEngine(in_turn(turn, answer)), text, two_turns)
    assert row.turns == 2


def test_a_message_reads_its_tool_calls_and_leaves_the_content_as_sampled() -> None:
    said = 'first <tool_call>{"name": "calc"}</tool_call> <tool_call>no json</tool_call>'
    message = Message(role="assistant", content=said)
    assert message.tool_calls == [{"name": "calc"}]
    assert dict(message) == {"role": "assistant", "content": said}


def test_two_branches_from_one_turn_share_its_ids_and_train_them_once(drifting: Text) -> None:
    h, aving = drifting.encode("H")[0], drifting.vocab_size - 1
    engine = FakeEngine(in_turn([h, aving, END], [*drifting.encode("x"), END], [END]))

    async def agent(llm: EngineLLM) -> None:
        first = await llm.chat([USER])
        await llm.chat([USER, first, MORE])
        await llm.chat([USER, first, {"role": "user", "content": "c"}])

    left, right = converse(engine, drifting, agent)
    shared = len(engine.requests[0].token_ids) + 3
    assert ids_of(left)[:shared] == ids_of(right)[:shared]
    assert left.loss_mask[:shared].sum() == 3
    assert right.loss_mask[:shared].sum() == 0
    assert right.loss_mask.sum() == 1


def test_of_two_answers_to_equal_input_the_continued_one_stays(text: Text) -> None:
    yes, no, end = [*text.encode("yes"), END], [*text.encode("no"), END], [END]

    async def continued(llm: EngineLLM) -> None:
        first = await llm.chat([USER])
        await llm.chat([USER])
        await llm.chat([USER, first, MORE])

    (row,) = converse(FakeEngine(in_turn(yes, no, end)), text, continued)
    assert "yes" in text.decode(row.tokens.tolist())

    async def abandoned(llm: EngineLLM) -> None:
        await llm.chat([USER])
        await llm.chat([USER])

    (row,) = converse(FakeEngine(in_turn(yes, no)), text, abandoned)
    assert text.decode(row.tokens[row.loss_mask == 1].tolist()) == "no"


def test_a_failed_request_leaves_no_trace(text: Text) -> None:
    async def agent(llm: EngineLLM) -> None:
        first = await llm.chat([USER])
        with pytest.raises(EngineError):
            await llm.chat([USER, first, MORE])
        await llm.chat([USER, first, MORE])

    yes = [*text.encode("yes"), END]
    (row,) = converse(FakeEngine(in_turn(yes, EngineError("away"), yes)), text, agent)
    assert text.decode(row.tokens.tolist()).count("b") == 1
    assert row.turns == 2


def test_generate_continues_with_exactly_the_given_ids(text: Text) -> None:
    async def agent(llm: EngineLLM) -> None:
        await llm.generate(())
        await llm.generate([40, 41])

    engine = FakeEngine(in_turn([50, END], [60, END]))
    (row,) = converse(engine, text, agent, prompt_ids=[10, 11])
    assert ids_of(row) == [10, 11, 50, END, 40, 41, 60, END]
    assert row.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


def test_the_context_bounds_a_generation_and_then_ends_the_conversation(text: Text) -> None:
    async def agent(llm: EngineLLM) -> None:
        await llm.generate(())
        with pytest.raises(ContextFull):
            await llm.generate([40, 41, 42])

    engine = FakeEngine(in_turn([50, 51, 52]))
    (row,) = converse(engine, text, agent, prompt_ids=[10] * 5, context_tokens=8)
    assert engine.requests[0].sampling.max_tokens == 3
    assert ids_of(row) == [10] * 5 + [50, 51, 52]


def test_equal_sessions_ask_with_equal_ids_and_seeds_and_others_do_not(text: Text) -> None:
    def asked(**changes: Any) -> list[tuple[str, int | None]]:
        engine = FakeEngine(in_turn([*text.encode("x"), END], [END]))
        converse(engine, text, two_turns, **changes)
        return [(r.request_id, r.sampling.seed) for r in engine.requests]

    assert asked() == asked()
    assert asked() != asked(seed=2)
    first, second = asked()
    assert first[1] != second[1]
    assert first[0].startswith("headwater.prompts/0/7/0/0/")


def test_resubmitted_work_takes_what_the_engine_still_holds(text: Text) -> None:
    engine = FakeEngine(in_turn([*text.encode("new"), END]))

    async def agent(llm: EngineLLM) -> None:
        await llm.chat([USER])

    converse(engine, text, agent)
    assert engine.attached == []  # only resubmitted work asks
    request = engine.requests[0]
    engine.held[request.request_id] = (completion([*text.encode("held"), END]),)
    (row,) = converse(engine, text, agent, attach=True)
    assert text.decode(row.tokens[row.loss_mask == 1].tolist()) == "held"
    assert len(engine.requests) == 1


def test_an_agent_that_runs_on_after_its_llm_was_cancelled_asks_the_engine_for_nothing(
    text: Text,
) -> None:
    async def agent(llm: EngineLLM) -> None:
        await llm.requests.cancel()
        with pytest.raises(EngineError, match="the trajectory is over"):
            await llm.chat([USER])

    engine = FakeEngine(in_turn([START, END]))
    assert converse(engine, text, agent) == []
    assert engine.requests == []


def test_the_temperature_is_the_runs(text: Text) -> None:
    async def agent(llm: EngineLLM) -> None:
        with pytest.raises(ValueError, match="temperature is the run's"):
            await llm.chat([USER], temperature=0.5)
        with pytest.raises(ValueError, match="unknown sampling option tmperature"):
            await llm.chat([USER], tmperature=0.5)
        await llm.chat([USER], max_tokens=3)

    engine = FakeEngine(in_turn([START, END]))
    converse(engine, text, agent)
    assert engine.requests[0].sampling.max_tokens == 3
