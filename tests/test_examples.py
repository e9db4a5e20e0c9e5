"""Every shipped configuration and prompt is valid, and the demo sees what it claims."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from connectors.config import load
from connectors.prompt_lines import PromptFile
from connectors.records import Prompt
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


def test_held_out_prompts_are_not_trained_on() -> None:
    trained, held_out = (
        {msgspec.json.encode(msgspec.json.decode(lines.line(k))) for k in range(lines.num_lines)}
        for lines in (
            PromptFile(ROOT / "examples/quickstart/prompts.jsonl"),
            PromptFile(ROOT / "examples/quickstart/eval.jsonl"),
        )
    )
    assert not trained & held_out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_sees_what_it_claims(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "deploy.demo"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-2000:]}"
    assert "kill -9 of the trainer" in done.stdout
