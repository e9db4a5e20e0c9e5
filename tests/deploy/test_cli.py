"""The command's edges: help, exit codes, one line an error, nothing but JSON on stdout with
--json."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from deploy import errors
from deploy.cli import main, parser
from deploy.output import stdout_for_answer
from tests.deploy.command import call, config_text, model_folder

COMMANDS = (
    "run", "status", "audit", "replay", "trace", "init", "doctor", "broker", "engine", "rollout",
    "reward", "dataflow", "feeder", "evaluate", "trainer", "simulate", "build-model",
)  # fmt: skip


@pytest.mark.parametrize("name", [*COMMANDS, "prompts load"])
def test_every_command_has_help_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([*name.split(), "--help"])
    assert end.value.code == 0
    assert f"example:\n  headwater {name}" in capsys.readouterr().out


def test_the_list_of_commands_in_this_test_is_whole() -> None:
    listed = parser().format_help()
    assert all(f"    {name} " in listed for name in ("prompts", *COMMANDS[:-1]))


def test_a_wrong_key_is_one_line_with_the_nearest_one_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.toml"
    file.write_text(config_text(model_folder(tmp_path / "m"), trainer="learning_rat = 1.0"))
    assert main(["run", str(file), "--run-dir", str(tmp_path / "run")]) == errors.CONFIGURATION
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "learning_rat" in said.err
    assert "did you mean learning_rate?" in said.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ("trainer.num_steps=0", 2, "trainer.num_steps"),
        ("staleness.policy=two-step-off", 2, "did you mean"),
        ("run.launcher=ray", 2, "available yet"),
        ("tasks.sums.prompts=none.jsonl", 2, "tasks.sums.prompts: there is no file"),
        ("tasks.sums.reward=none.py:score", 2, "tasks.sums.reward: there is no file"),
        ("model.path=nowhere", 3, "model.path"),
        ("nonsense", 2, "is not key=value"),
    ],
)
def test_what_run_refuses_is_one_line_and_leaves_no_run(
    change: str, code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.toml"
    file.write_text(config_text(model_folder(tmp_path / "m")))
    got = main(["run", str(file), "--run-dir", str(tmp_path / "run"), "--set", change])
    said = capsys.readouterr().err
    assert (got, said.count("\n")) == (code, 1)
    assert says in said
    assert not (tmp_path / "run" / "config.toml").exists()


def test_a_taken_port_is_one_line_and_exit_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.toml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file.write_text(config_text(model_folder(tmp_path / "m"), broker=f"port = {port}"))
        got = main(["run", str(file), "--run-dir", str(tmp_path / "run")])
    assert got == errors.ENVIRONMENT
    assert capsys.readouterr().err.startswith(f"headwater: broker.port: port {port} is taken")


def test_a_taken_port_ends_the_broker_role_with_3(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(config_text(model_folder(tmp_path / "m")))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = call("broker", file, "--run-dir", tmp_path / "run", "--port", port)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.count("\n") == 1
    assert f"port {port}" in done.stderr


def test_an_unreachable_kafka_is_one_line_and_exit_3(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        file = tmp_path / "a.toml"
        text = config_text(model_folder(tmp_path / "m"), kafka=f'bootstrap_servers = "{address}"')
        file.write_text(text)
        (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
        done = call("prompts", "load", tmp_path / "p.jsonl", "--run", file)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.count("\n") == 1
    assert address in done.stderr


def test_a_folder_without_a_run_is_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("status", "audit", "replay"):
        assert main([name, str(tmp_path)]) == errors.CONFIGURATION
        assert "is no run's folder" in capsys.readouterr().err
    for arguments in (["status"], ["rollback", "--to", "1"]):
        name, *more = arguments
        assert main([name, str(tmp_path / "none"), *more]) == errors.CONFIGURATION
        assert f"{tmp_path / 'none'}: does not exist" in capsys.readouterr().err


def test_a_folder_given_for_a_file_is_told_which_file_is_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(tmp_path)]) == errors.CONFIGURATION
    said = capsys.readouterr().err
    assert f"{tmp_path}: is a folder" in said
    assert str(tmp_path / "config.toml") in said


def test_an_unexpected_error_is_one_line_and_its_traceback_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(folder: str) -> list[str]:
        raise ZeroDivisionError("an accident\nof two lines")

    monkeypatch.setattr("deploy.init.write_example", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["init", "anywhere"]) == errors.FAILED
    said = capsys.readouterr().err
    assert said.startswith("headwater: ZeroDivisionError: an accident of two lines (traceback in ")
    kept = Path(said.strip().removesuffix(")").rpartition(" ")[2])
    assert "ZeroDivisionError: an accident" in kept.read_text()
    assert "write_example" in kept.read_text()


def test_what_libraries_print_does_not_reach_stdout_under_json(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with stdout_for_answer(as_json=True):
        print("from Python")
        os.write(1, b"from C\n")
    print("the answer")
    said = capfd.readouterr()
    assert said.out == "the answer\n"
    assert said.err == "from Python\nfrom C\n"


def test_a_users_own_trainer_and_operators_do_not_shadow_ours(tmp_path: Path) -> None:
    for name in ("trainer", "operators", "connectors", "pipelines", "deploy"):
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").write_text(f"raise RuntimeError('the wrong {name}')\n")
    place = {"cwd": tmp_path, "environment": {"PYTHONPATH": str(tmp_path)}}
    done = call("--help", **place)
    assert (done.returncode, done.stderr) == (0, "")
    done = call("init", "mine", "--json", **place)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["files"][0] == "mine/headwater.toml"
    done = call("status", "mine", **place)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "is no run's folder" in done.stderr
