"""User code by name, and the tokenizer's edge."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from connectors import plugins
from connectors.config import ConfigError
from connectors.plugins import load
from connectors.records import Prompt
from connectors.text import Text, TextError
from tests.models import tiny_model
from tests.operators.engine_fake import tokenizer


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(tiny_model(tmp_path_factory.mktemp("model")))


def test_a_function_is_found_by_file_and_by_module(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("VALUE = 7\n")
    (tmp_path / "my_reward_x.py").write_text("import beside_it\ndef f(): return beside_it.VALUE\n")
    assert load("my_reward_x.py:f", tmp_path)() == 7
    assert load("my_reward_x:f", tmp_path)() == 7
    assert load("my_reward_x.py:f", tmp_path) is load("my_reward_x.py:f", tmp_path)


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "reward.py").write_text(f"def f(): return {number}\n")
    assert [load("reward.py:f", tmp_path / str(n))() for n in (1, 2)] == [1, 2]


def test_a_users_own_trainer_folder_does_not_shadow_ours(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").write_text("raise RuntimeError('the wrong one')\n")
    (tmp_path / "uses_ours.py").write_text("import trainer\ndef f(): return trainer.__file__\n")
    assert not load("uses_ours.py:f", tmp_path)().startswith(str(tmp_path))
    assert sys.path.index(str(tmp_path)) > 0


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("nothing", "neither"),
        ("a:", "neither"),
        (":f", "neither"),
        ("missing.py:f", "there is no file"),
        ("no_such_module_at_all:f", "cannot import no_such_module_at_all"),
        ("broken.py:f", "fails: ZeroDivisionError"),
        ("good.py:absent", "absent does not exist"),
        ("good.py:NUMBER", "NUMBER is not callable"),
    ],
)
def test_a_wrong_name_is_one_line(tmp_path: Path, spec: str, problem: str) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "good.py").write_text("NUMBER = 3\n")
    with pytest.raises(ConfigError, match=problem) as caught:
        load(spec, tmp_path)
    assert spec in str(caught.value)
    assert "\n" not in str(caught.value)


def test_stops_are_the_end_of_sequence_and_the_templates_end_of_turn(text: Text) -> None:
    assert set(text.stop_ids) == {1, 3}


def test_messages_are_rendered_with_their_generation_prompt(text: Text) -> None:
    ids = text.encode_prompt(Prompt(task="t", messages=[{"role": "user", "content": "é"}]))
    assert text.decode(ids, special=True) == (
        "<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text.decode(ids) == "user\né\nassistant\n"


def test_ids_outside_the_vocabulary_and_refused_templates_are_text_errors(
    text: Text, tmp_path: Path
) -> None:
    with pytest.raises(TextError, match="260"):
        text.encode_prompt(Prompt(task="t", token_ids=[260]))
    with pytest.raises(TextError, match="message 0 has no role"):
        text.encode_prompt(Prompt(task="t", messages=[{"content": "a"}]))
    strict = tokenizer(tmp_path, template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TextError, match="roles must alternate"):
        strict.encode_prompt(Prompt(task="t", messages=[{"role": "user", "content": "a"}]))


def test_a_folder_without_a_tokenizer_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        Text(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        Text(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("exact_mach", "did you mean exact_match?"),
        ("reward.py:scroe", "scroe does not exist in .*, did you mean score?"),
        ("broken.py:score", "is no Python"),
        ("missing.py:score", "there is no file"),
        ("reward.py:", "no module:function"),
    ],
)
def test_a_wrong_name_is_told_before_anything_is_imported(
    tmp_path: Path, spec: str, problem: str
) -> None:
    (tmp_path / "reward.py").write_text("raise SystemExit\ndef score(sample, prompt): ...\n")
    (tmp_path / "broken.py").write_text("def score(:\n")
    with pytest.raises(ConfigError, match=problem):
        plugins.check(spec, tmp_path, ("exact_match", "numeric_match"))


@pytest.mark.parametrize("spec", ["exact_match", "reward.py:score", "reward.py:other", "a.b:c"])
def test_a_name_that_may_be_right_passes(tmp_path: Path, spec: str) -> None:
    (tmp_path / "reward.py").write_text("from x import other\nasync def score(a, b): ...\n")
    plugins.check(spec, tmp_path, ("exact_match",))
