"""What `run` writes into a run's folder, and what it refuses to change there."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from connectors.config import Config, ConfigError, load
from connectors.run_dir import RunDir
from deploy.errors import EnvironmentFailure, RunFailed
from deploy.run_folder import load_run, locked, prepare, retake
from tests.deploy.command import config_text, model_folder

ROOT = Path(__file__).resolve().parent.parent.parent
BUILDER = """
def build(folder):
    (folder / "config.json").write_text("{}")
    (folder / "built").write_text("once")

def build_nothing(folder):
    pass

def fail(folder):
    raise OSError("no weights today")
"""


class Folder:
    """A user's folder with a configuration, and the run's beside it."""

    def __init__(self, path: Path) -> None:
        self.path, self.run_dir = path / "user", RunDir(path / "run")
        model_folder(self.path / "model")
        (self.path / "mine.py").write_text("def score(sample, prompt): return 1.0\n" + BUILDER)
        (self.path / "p.jsonl").write_text('{"prompt": "a"}\n')
        self.file = self.path / "a.toml"
        self.file.write_text(config_text("model"))

    def load(self, *overrides: str) -> Config:
        return load(self.file, overrides)

    def table(self) -> dict[str, Any]:
        return tomllib.loads(self.run_dir.config_file.read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_a_runs_configuration_is_absolute_and_whole(folder: Folder) -> None:
    prepared = prepare(
        folder.load(
            "tasks.sums.prompts=p.jsonl", "tasks.sums.reward=mine.py:score", "run.seed=7",
            "checkpoint.url=kept", "tasks.sums.feedback.combine=mine.py:score",
            "gateway.keys_file=keys",
        ),
        folder.run_dir,
    )  # fmt: skip
    assert not prepared.resumed
    table = folder.table()
    assert table["model"]["path"] == str(folder.path / "model")
    assert table["tasks"]["sums"]["prompts"] == str(folder.path / "p.jsonl")
    assert table["tasks"]["sums"]["reward"] == f"{folder.path / 'mine.py'}:score"
    assert table["tasks"]["sums"]["feedback"]["combine"] == f"{folder.path / 'mine.py'}:score"
    assert table["gateway"]["keys_file"] == str(folder.path / "keys")
    assert table["checkpoint"]["url"] == str(folder.path / "kept")
    assert table["run"]["seed"] == 7
    assert table["broker"]["port"] > 0
    assert load(folder.run_dir.config_file).trainer == prepared.config.trainer


def test_a_users_modules_are_found_where_the_users_file_lay(folder: Folder) -> None:
    prepare(folder.load("tasks.sums.reward=mine:score"), folder.run_dir)
    config = load_run(folder.run_dir)
    assert config.tasks["sums"].reward == "mine:score"
    assert config.base_dir == str(folder.path)


def test_a_second_start_resumes_and_keeps_the_port(folder: Folder) -> None:
    prepare(folder.load(), folder.run_dir)
    port = folder.table()["broker"]["port"]
    again = prepare(folder.load(), folder.run_dir)
    assert (again.resumed, again.changes) == (True, ())
    assert folder.table()["broker"]["port"] == port


def test_a_run_resumes_from_its_own_configuration_too(folder: Folder) -> None:
    prepare(folder.load("model.path=mine.py:build"), folder.run_dir)
    again = prepare(load_run(folder.run_dir), folder.run_dir)
    assert (again.resumed, again.changes) == (True, ())
    assert prepare(folder.load("model.path=mine.py:build"), folder.run_dir).changes == ()


def test_a_changed_key_is_taken_over_and_named(folder: Folder) -> None:
    prepare(folder.load("trainer.learning_rate=1e-5"), folder.run_dir)
    again = prepare(folder.load("trainer.learning_rate=2e-5"), folder.run_dir)
    assert again.changes == ("trainer.learning_rate: 1e-05 -> 2e-05",)
    assert folder.table()["trainer"]["learning_rate"] == 2e-5


@pytest.mark.parametrize(
    "change",
    [
        "kafka.partitions=3",
        "run.namespace=x.",
        "model.path=mine.py:build",
        "model.dtype=bfloat16",
        "sampling.temperature=0.5",
        "staleness.policy=sync",
        "staleness.bound=3",
        "staleness.parameters.lookahead=1",
        "trainer.groups_per_step=2",
        "trainer.num_ranks=2",
        "trainer.zero_stage=2",
        "trainer.lora.rank=4",
    ],
)
def test_a_key_the_log_depends_on_cannot_change(change: str, folder: Folder) -> None:
    prepare(folder.load(), folder.run_dir)
    before = folder.run_dir.config_file.read_bytes()
    with pytest.raises(ConfigError, match=r"the log and the checkpoints in .* depend on it"):
        prepare(folder.load(change), folder.run_dir)
    assert folder.run_dir.config_file.read_bytes() == before


def test_every_key_that_cannot_change_is_named(folder: Folder) -> None:
    before = ("staleness.bound=8", "staleness.at_deadline=mask", "staleness.time_cap_s=60")
    prepare(folder.load(*before), folder.run_dir)
    with pytest.raises(ConfigError) as refused:
        prepare(folder.load("staleness.bound=3", "trainer.num_steps=7"), folder.run_dir)
    assert str(refused.value).startswith(
        "staleness.at_deadline: cannot change from 'mask' to nothing; "
        "staleness.bound: cannot change from 8 to 3: the log and the checkpoints in "
    )
    assert "\n" not in str(refused.value)


def test_a_model_is_built_once_into_the_runs_folder(folder: Folder) -> None:
    change = "model.path=mine.py:build"
    prepared = prepare(folder.load(change), folder.run_dir)
    built = folder.run_dir.path / "model"
    assert prepared.config.model.path == str(built)
    assert (built / "built").read_text() == "once"
    (built / "built").write_text("kept")
    prepare(folder.load(change), folder.run_dir)
    assert (built / "built").read_text() == "kept"


@pytest.mark.parametrize(
    ("name", "says", "code"),
    [
        ("fail", "no weights today", 1),
        ("build_nothing", "wrote no config.json", 2),
        ("none", "none", 2),
    ],
)
def test_a_model_that_cannot_be_built_leaves_no_run(
    name: str, says: str, code: int, folder: Folder
) -> None:
    with pytest.raises(RunFailed, match=says) as caught:
        prepare(folder.load(f"model.path=mine.py:{name}"), folder.run_dir)
    assert caught.value.code == code
    assert not folder.run_dir.config_file.exists()
    assert sorted(p.name for p in folder.run_dir.path.iterdir()) == ["logs"]


def test_only_one_run_at_a_time_works_in_a_folder(folder: Folder) -> None:
    says = rf"is locked.*pid {os.getpid()}"
    with (
        locked(folder.run_dir),
        pytest.raises(EnvironmentFailure, match=says),
        locked(folder.run_dir),
    ):
        pass
    with locked(folder.run_dir):
        pass


def test_the_lock_of_a_killed_run_is_free(folder: Folder) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from connectors.run_dir import RunDir
from deploy.run_folder import locked
with locked(RunDir({str(folder.run_dir.path)!r})):
    print("locked", flush=True)
    sys.stdin.read()
"""
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(EnvironmentFailure, match=f"pid {holder.pid}"), locked(folder.run_dir):
            pass
    finally:
        holder.kill()
        holder.wait()
    with locked(folder.run_dir):
        pass


def test_a_model_whose_files_changed_is_not_the_run_s(folder: Folder) -> None:
    prepare(folder.load(), folder.run_dir)
    (folder.path / "model" / "config.json").write_text('{"rms_norm_eps": 1e-2}')
    with pytest.raises(ConfigError, match=r"config\.json is not what it was when the run began"):
        prepare(folder.load(), folder.run_dir)


def test_a_password_stays_its_owners_when_settings_are_taken_over(folder: Folder) -> None:
    def mode() -> int:
        return folder.run_dir.config_file.stat().st_mode & 0o777

    security = (
        "kafka.bootstrap_servers=127.0.0.1:9", "broker.embedded=false",
        "kafka.security.security_protocol=SASL_PLAINTEXT", "kafka.security.sasl_mechanism=PLAIN",
        "kafka.security.sasl_username=ann", "kafka.security.sasl_password=secret",
    )  # fmt: skip
    prepare(folder.load(*security), folder.run_dir)
    assert mode() == 0o600
    retake(folder.load(*security, "trainer.learning_rate=2e-5"), folder.run_dir)
    assert folder.table()["trainer"]["learning_rate"] == 2e-5
    assert mode() == 0o600
