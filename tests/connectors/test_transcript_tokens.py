"""What is learnt of a chat: the assistant's turns, to the token, as a rollout would have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from connectors.text import Text
from connectors.transcript_tokens import tokenise
from connectors.transcripts import BadTranscript, Transcript
from tests.models import CHATML, SPECIAL_TOKENS

END = "<|im_end|>"
TAGGED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if loop.last %}{{ message['content'] }}{% else %}"
    "{{ message['content'].split('</think>')[-1] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Make = Callable[..., Text]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A byte-level tokenizer under a template; `merges` join symbols of it."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    def made(template: str | None, merges: tuple[tuple[str, str], ...] = ()) -> Text:
        folder = tmp_path_factory.mktemp("tokenizer")
        symbols = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
        symbols += [a + b for a, b in merges]
        Qwen2Tokenizer(
            vocab={token: i for i, token in enumerate(symbols)},
            merges=list(merges),
            unk_token="<pad>",
            pad_token="<pad>",
            eos_token="<eos>",
            additional_special_tokens=list(SPECIAL_TOKENS[2:]),
            chat_template=template,
        ).save_pretrained(folder)
        (folder / "config.json").write_text('{"model_type": "qwen2"}')
        return Text(folder)

    return made


@pytest.fixture(scope="module")
def plain(make: Make) -> Text:
    return make(CHATML)


@pytest.fixture(scope="module")
def tagged(make: Make) -> Text:
    return make(TAGGED)


def chat(*turns: str, **more: Any) -> Transcript:
    """Turns of user and assistant by turns."""
    roles = ("user", "assistant")
    return Transcript(
        tuple({"role": roles[n % 2], "content": turn, **more} for n, turn in enumerate(turns))
    )


def learnt(text: Text, transcript: Transcript) -> list[str]:
    """The texts of the stretches that are learnt, in the only sequence."""
    ((ids, mask),) = tokenise(text, transcript)
    return stretches(text, ids, mask)


def stretches(text: Text, ids: NDArray[np.int32], mask: NDArray[np.bool_]) -> list[str]:
    borders = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return [text.decode(ids[a:b], special=True) for a, b in borders.reshape(-1, 2)]


def reason(text: Text, transcript: Transcript) -> str:
    with pytest.raises(BadTranscript) as bad:
        tokenise(text, transcript)
    return bad.value.reason


message = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool"]),
        "content": st.text(st.characters(codec="utf-8"), max_size=8),
    }
)


@given(st.lists(message, min_size=1, max_size=6))
def test_exactly_the_assistants_words_and_their_ends_are_learnt(
    plain: Text, messages: list[dict[str, str]]
) -> None:
    transcript = Transcript(tuple(messages))
    expected = [m["content"] + END for m in messages[1:] if m["role"] == "assistant"]
    if not expected:
        assert reason(plain, transcript) == "nothing_to_learn"
        return
    assert learnt(plain, transcript) == expected
    ((ids, _),) = tokenise(plain, transcript)
    last = max(k for k, m in enumerate(messages) if m["role"] == "assistant")
    said = plain.render(messages[: last + 1], generation_prompt=False)
    assert ids.tolist() == plain.encode(said)


@given(st.lists(message, min_size=1, max_size=6))
def test_where_the_template_marks_them_the_mask_is_transformers_own(
    tagged: Text, messages: list[dict[str, str]]
) -> None:
    theirs = tagged._tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    if not any(theirs["assistant_masks"]):
        assert reason(tagged, Transcript(tuple(messages))) == "nothing_to_learn"
        return
    ((ids, mask),) = tokenise(tagged, Transcript(tuple(messages)))
    assert mask[-1]
    assert ids.tolist() == theirs["input_ids"][: len(ids)]
    assert mask.astype(int).tolist() == theirs["assistant_masks"][: len(ids)]
    assert not any(theirs["assistant_masks"][len(ids) :])


def test_no_token_lies_across_the_border_of_a_turn(make: Make) -> None:
    """A line break that begins an answer would melt into the header's."""
    text = make(CHATML, merges=(("Ċ", "Ċ"),))
    transcript = chat("a", "\nb")
    ((ids, mask),) = tokenise(text, transcript)
    first = int(np.flatnonzero(mask)[0])
    assert ids[:first].tolist() == text.encode(text.render(transcript.messages[:1]))
    assert learnt(text, transcript) == ["\nb" + END]
    whole = text.encode(text.render(transcript.messages, generation_prompt=False))
    assert len(whole) == len(ids) - 1


def test_turns_of_weight_0_and_greetings_are_context_only(plain: Text, tagged: Text) -> None:
    greeting = {"role": "assistant", "content": "Hello"}
    asked = {"role": "user", "content": "a"}
    bad, good = {**greeting, "content": "b", "weight": 0}, {**greeting, "content": "c"}
    transcript = Transcript((greeting, asked, bad, asked, good))
    assert learnt(plain, transcript) == ["c" + END]
    assert learnt(tagged, transcript) == ["c" + END]
    assert reason(plain, Transcript((asked, bad))) == "nothing_to_learn"
    assert reason(plain, Transcript((greeting, asked))) == "nothing_to_learn"


def test_an_end_written_within_an_answer_ends_it_not(plain: Text) -> None:
    assert learnt(plain, chat("a", f"b{END}c")) == [f"b{END}c{END}"]


def test_tool_calls_are_learnt_and_their_results_are_not(make: Make, plain: Text) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    messages = (
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4"},
    )
    written = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    text = make(WITH_TOOLS)
    assert learnt(text, Transcript(messages, (tool,))) == [written + END, "4" + END]
    assert reason(plain, Transcript(messages)) == "template_drops_tools"
    assert reason(plain, Transcript((messages[0], messages[3]), (tool,))) == "template_drops_tools"


def test_where_a_template_rewrites_earlier_turns_the_conversation_forks(make: Make) -> None:
    """As a rollout does there: each turn is learnt after the prompt it would be sampled from."""
    text = make(FORGETFUL)
    assert learnt(text, chat("a", "b", "c", "d")) == ["b" + END, "d" + END]
    transcript = chat("a", "<think>x</think>b", "c", "d", "e", "<think>y</think>f")
    first, second = tokenise(text, transcript)
    assert stretches(text, *first) == ["<think>x</think>b" + END]
    assert stretches(text, *second) == ["d" + END, "<think>y</think>f" + END]
    for (ids, mask), k in ((first, 1), (second, 3)):
        start = int(np.flatnonzero(mask)[0])
        assert ids[:start].tolist() == text.encode(text.render(transcript.messages[:k]))


def test_a_turn_that_its_generation_prompt_does_not_begin_is_refused(make: Make) -> None:
    text = make(CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif"))
    assert reason(text, chat("a", "b")) == "template_unclear"
    assert learnt(text, chat("a", "<think>b")) == ["b" + END]


def test_a_template_that_refuses_is_said(make: Make) -> None:
    refusing = "{{ raise_exception('no system') }}"
    assert reason(make(refusing), chat("a", "b")) == "template_refuses"
    assert reason(make("{% generation %}{% endgeneration %}" + refusing), chat("a", "b")) == (
        "template_refuses"
    )


def test_a_tokenizer_without_a_template_is_refused(make: Make) -> None:
    assert reason(make(None), chat("a", "b")) == "template_refuses"
