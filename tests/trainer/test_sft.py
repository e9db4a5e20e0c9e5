"""A warm start: the loss of the assistant's tokens alone; a folder that is whole or not there."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from connectors.config import ConfigError
from connectors.text import Text
from deploy.cli import main
from trainer.sft import Lessons, Recipe, Step, _batches, fine_tune, read_lessons

PAIRS = [("red?", "rot"), ("blue?", "blau"), ("green?", "grün"), ("one?", "eins")]
RECIPE = Recipe(learning_rate=3e-3, batch_size=2, epochs=20)


def row(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": t} for n, t in enumerate(turns)]}


def write(file: Path, rows: Sequence[Any]) -> Path:
    file.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows))
    return file


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write(tmp_path / "chats.jsonl", [row(*pair) for pair in PAIRS])


def likelihood(model: Any, lessons: Lessons, chosen: Sequence[int]) -> float:
    """Mean negative log-likelihood a learnt token: by full logits, token by token."""
    total, count = 0.0, 0
    for i in chosen:
        tokens = torch.from_numpy(lessons.tokens[i].astype(np.int64))
        with torch.no_grad():
            logprobs = model(input_ids=tokens[None]).logits[0].double().log_softmax(-1)
        for t in np.flatnonzero(lessons.masks[i]):
            total -= float(logprobs[t - 1, tokens[t]])
            count += 1
    return total / count


def test_the_loss_is_that_of_the_answers_and_falls_until_they_are_known(
    tiny_model_path: Path, chats: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    lessons = read_lessons(chats, tiny_model_path)
    first = next(_batches(len(lessons), RECIPE))
    untrained = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    to, seen = tmp_path / "models" / "warm", list[Step]()
    steps = fine_tune(tiny_model_path, lessons, RECIPE, to, seen.append)
    assert steps == seen
    assert [step.number for step in steps] == list(range(1, 41))
    assert steps[0].loss == pytest.approx(likelihood(untrained, lessons, first), rel=1e-5)
    assert steps[-1].loss is not None
    assert steps[-1].loss < 0.05 < 1 < steps[0].loss

    trained, text = AutoModelForCausalLM.from_pretrained(to), Text(to)
    assert likelihood(trained, lessons, range(4)) < 0.05
    for question, answer in PAIRS:
        ids = text.encode(text.render(row(question)["messages"]))
        made = trained.generate(
            torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=text.stop_ids
        )
        assert text.decode(made[0, len(ids) :].tolist()) == answer
    assert {p.stat().st_mode & 0o077 for p in to.iterdir()} == {0o044}


def test_an_interrupted_warm_start_leaves_nothing(
    tiny_model_path: Path, chats: Path, tmp_path: Path
) -> None:
    def interrupt(step: Step) -> None:
        if step.number == 2:
            raise KeyboardInterrupt

    lessons = read_lessons(chats, tiny_model_path)
    with pytest.raises(KeyboardInterrupt):
        fine_tune(tiny_model_path, lessons, RECIPE, tmp_path / "warm", interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["chats.jsonl"]


def test_a_target_that_holds_something_is_refused_before_anything_is_trained(
    tiny_model_path: Path, chats: Path, tmp_path: Path
) -> None:
    lessons = read_lessons(chats, tiny_model_path)
    with pytest.raises(ConfigError, match="no empty folder"):
        fine_tune(tiny_model_path, lessons, RECIPE, tmp_path, pytest.fail)


def test_rows_left_out_are_counted_by_reason_and_the_first_explained(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    rows = [row("a", "b" * 50), row("a", "b"), {"x": 1}, row("a"), row("a", "c"), *[[]] * 5]
    lessons = read_lessons(write(tmp_path / "f", rows), tiny_model_path, max_tokens=40)
    assert lessons.names == ["line 2", "line 5"]
    assert lessons.skipped == Counter(too_long=1, not_chat=6, nothing_to_learn=1)
    assert len(lessons.problems) == 5
    assert lessons.problems[0].startswith("line 1: too_long: it has ")


def test_long_rows_are_cut_where_that_leaves_something_to_learn(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    file = write(tmp_path / "f", [row("a", "b" * 50), row("a" * 50, "b")])
    lessons = read_lessons(file, tiny_model_path, max_tokens=40, truncate=True)
    assert [len(tokens) for tokens in lessons.tokens] == [40]
    assert lessons.masks[0][-1]
    assert lessons.skipped == {"too_long": 1}


@pytest.mark.parametrize(
    ("rows", "max_tokens", "message"),
    [
        ([{"x": 1}], None, "no row can be learnt from; line 1: not_chat"),
        ([row("a", "b")], 5000, "the model has 4096 positions"),
    ],
)
def test_what_cannot_be_trained_is_one_line(
    tiny_model_path: Path, tmp_path: Path, rows: list[Any], max_tokens: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_lessons(write(tmp_path / "f", rows), tiny_model_path, max_tokens=max_tokens)


def test_every_epoch_takes_each_row_once_in_another_order() -> None:
    recipe = Recipe(epochs=2, batch_size=4)
    batches = list(_batches(10, recipe))
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2]
    epochs = [list(chain(*batches[:3])), list(chain(*batches[3:]))]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]
    assert batches == list(_batches(10, recipe))


def test_the_rate_rises_to_its_highest_then_falls_and_is_never_0() -> None:
    recipe = Recipe(learning_rate=1.0)
    rates = [recipe.rate_of(n, 100) for n in range(1, 101)]
    assert rates[:3] == [pytest.approx(n / 3) for n in (1, 2, 3)]
    assert all(a > b > 0 for a, b in pairwise(rates[2:]))
    assert rates[50] == pytest.approx(0.5 * (1 + math.cos(math.pi * 48 / 98)))
    assert recipe.rate_of(1, 1) == 1.0


def test_the_command_answers_with_one_object(
    tiny_model_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "chats.jsonl", [row(*pair) for pair in PAIRS] + [{"x": 1}])
    to = tmp_path / "warm"
    command = ["sft", str(file), "--model", str(tiny_model_path), "--output", str(to), "--json"]
    assert main([*command, "--threads", "1", "--batch-size", "3", "--epochs", "2"]) == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert (found["rows"], found["skipped"], found["steps"]) == (4, {"not_chat": 1}, 4)
    assert found["loss"]["last"] < found["loss"]["first"]
    assert found["output"] == str(to)
    assert (to / "config.json").is_file()
    assert "line 5: not_chat" in err
    assert "1 rows left out: not_chat 1" in err
    assert "model shards" not in err  # transformers' bar beside ours
    assert main(command) == 2
    assert "no empty folder" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model", "nowhere"], "holds no model"),
        (["--num-gpus", "2"], "one process trains on one GPU"),
    ],
)
def test_a_command_that_cannot_begin_says_why_in_one_line(
    tiny_model_path: Path, chats: Path, capsys: pytest.CaptureFixture[str],
    more: list[str], message: str,
) -> None:  # fmt: skip
    command = ["sft", str(chats), "--model", str(tiny_model_path), "--output", "out", *more]
    assert main(command) == 2
    assert message in capsys.readouterr().err
