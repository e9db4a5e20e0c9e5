"""What a new user meets first."""

from __future__ import annotations

import ast
import json
import socket
from pathlib import Path

import msgspec
import pytest

from connectors.config import load
from connectors.plugins import load as load_plugin
from connectors.records import Prompt
from deploy import errors
from deploy.cli import main
from deploy.doctor import examine
from deploy.init import FILES
from tests.deploy.command import config_text, model_folder

ROOT = Path(__file__).resolve().parent.parent.parent


def test_init_writes_files_that_work_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    assert main(["init", str(folder), "--json"]) == errors.OK
    files = json.loads(capsys.readouterr().out)["files"]
    assert files == [str(folder / name) for name in FILES]
    config = load(folder / "headwater.toml")
    (task,) = config.tasks.values()
    score = load_plugin(task.reward, config.base_dir)
    assert task.prompts is not None
    prompts = [
        msgspec.convert({"task": "my_task", **json.loads(line)}, Prompt)
        for line in config.resolve(task.prompts).read_text().splitlines()
    ]

    class Sample:
        def __init__(self, text: str) -> None:
            self.text = text

    for prompt in prompts:
        right = str(prompt.reward)
        assert score(Sample(f"5, no, {right}"), prompt)["correct"] == 1.0
        assert (
            score(Sample(right), prompt)["reward"] > score(Sample(f"no: {right}"), prompt)["reward"]
        )
        assert score(Sample("no idea"), prompt)["reward"] == 0.0


def test_init_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.py").write_text("mine")
    assert main(["init", str(tmp_path)]) == errors.ENVIRONMENT
    assert "reward.py exists" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["reward.py"]
    assert (tmp_path / "reward.py").read_text() == "mine"


def test_the_example_in_the_repository_is_what_init_writes() -> None:
    for name in FILES:
        written = (ROOT / "deploy" / "templates" / name).read_bytes()
        assert (ROOT / "examples" / "my_reward" / name).read_bytes() == written


def test_the_example_reward_is_short() -> None:
    text = (ROOT / "examples" / "my_reward" / "reward.py").read_text()
    assert len(text.splitlines()) <= 15
    assert ast.get_docstring(ast.parse(text))


@pytest.mark.parametrize("file", sorted((ROOT / "examples").rglob("*.toml")), ids=lambda f: f.name)
def test_every_shipped_configuration_is_valid(file: Path) -> None:
    load(file)


def test_doctor_passes_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.toml"
    file.write_text(config_text(model_folder(tmp_path / "m"), broker="port = 0"))
    assert main(["doctor", str(file), "--json"]) == errors.OK, capsys.readouterr().out
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert all(set(check) == {"name", "ok", "fix"} and check["ok"] for check in checks)
    names = {check["name"] for check in checks}
    assert {"python", "packages", "torch", "memory", "disk", "configuration", "files"} <= names


def test_doctor_names_what_a_configuration_lacks(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file.write_text(config_text(tmp_path / "none", broker=f"port = {port}"))
        bad = {check.name: check.fix for check in examine(str(file)) if not check.ok}
    assert set(bad) == {"files", "port"}
    assert "no model folder" in bad["files"]
    assert str(port) in bad["port"]


def test_doctor_tells_a_wrong_configuration_from_a_wrong_machine(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[trainer]\nlearning_rat = 1\n")
    bad = [check for check in examine(str(file)) if not check.ok]
    assert [check.name for check in bad] == ["configuration"]
    assert "learning_rat" in bad[0].fix
    text = config_text(model_folder(tmp_path / "m"), broker="port = 0")
    file.write_text(f'{text}\n[staleness]\npolicy = "one-step-off"\nbound = 8\n')
    (refused,) = [check for check in examine(str(file)) if not check.ok]
    assert "staleness.bound: one-step-off bounds every token at 1, got 8" in refused.fix
