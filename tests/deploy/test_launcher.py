"""Real child processes: sessions, logs, and children that never outlive their supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from connectors.run_dir import RunDir
from deploy.gpus import VARIABLE
from deploy.launcher import LocalLauncher, Member, last_line
from tests.deploy.command import config_text, model_folder

ROOT = Path(__file__).resolve().parent.parent.parent


def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "did not become true"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Neither gone nor a zombie that only waits to be noticed."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "a.toml"
    file.write_text(config_text(model_folder(tmp_path / "m")))
    return file


def broker(config_file: Path, run_dir: RunDir) -> Member:
    arguments = ["broker", str(config_file), "--run-dir", str(run_dir.path)]
    return Member(name="broker", arguments=arguments)


def registered(run_dir: RunDir) -> bool:
    return run_dir.url("broker") is not None


def test_a_child_has_its_own_session_and_ends_cleanly_when_asked(
    config_file: Path, tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path / "run")
    process = LocalLauncher(run_dir).start(broker(config_file, run_dir))
    try:
        until(lambda: registered(run_dir) or process.poll() is not None)
        assert os.getsid(process.pid) == process.pid != os.getsid(0)
        process.terminate()
        until(lambda: process.poll() is not None)
        assert process.poll() == 0
    finally:
        process.kill()


def test_a_child_sees_the_gpus_it_was_given_and_another_what_was_visible(
    config_file: Path, tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path / "run")
    arguments = broker(config_file, run_dir).arguments
    starter = LocalLauncher(run_dir, {VARIABLE: "3"})
    for gpus, seen in (("1,2", "1,2"), (None, "3"), ("", "")):
        process = starter.start(Member(name="broker", arguments=arguments, gpus=gpus))
        try:
            # The kernel shows no environment until the new program image is set up.
            until(psutil.Process(process.pid).environ)
            assert psutil.Process(process.pid).environ()[VARIABLE] == seen
        finally:
            process.kill()


def test_what_a_child_says_is_in_its_log(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    member = Member(name="engine-7", arguments=["engine", str(tmp_path / "none.toml")])
    process = LocalLauncher(run_dir).start(member)
    until(lambda: process.poll() is not None)
    assert process.poll() == 2
    said = run_dir.log_file("engine-7").read_text()
    assert said.startswith("headwater: ")
    assert "none.toml: cannot be read" in said
    assert said.count("\n") == 1


def test_a_supervisor_killed_with_9_leaves_no_child_behind(
    config_file: Path, tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path / "run")
    program = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from connectors.run_dir import RunDir
from deploy.gpus import VARIABLE
from deploy.launcher import LocalLauncher, Member
run_dir = RunDir({str(run_dir.path)!r})
arguments = ["broker", {str(config_file)!r}, "--run-dir", str(run_dir.path)]
process = LocalLauncher(run_dir).start(Member(name="broker", arguments=arguments))
time.sleep(600)
"""
    supervisor = subprocess.Popen([sys.executable, "-P", "-c", program])
    try:
        until(lambda: registered(run_dir))
        child = next(role.pid for role in run_dir.roles())
        assert is_running(child)
        supervisor.kill()
        until(lambda: not is_running(child))
    finally:
        supervisor.kill()
        supervisor.wait()


def test_a_child_whose_supervisor_is_already_gone_does_not_start(
    config_file: Path, tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path / "run")
    stranger = 1 if os.getpid() != 1 else 2
    command = [
        sys.executable,
        "-P",
        str(ROOT / "headwater.py"),
        *broker(config_file, run_dir).arguments,
    ]
    done = subprocess.run([*command, "--supervisor", str(stranger)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not registered(run_dir)


def test_the_last_line_of_a_log_is_found_without_reading_all_of_it(tmp_path: Path) -> None:
    log = tmp_path / "role.log"
    with log.open("wb") as file:
        file.truncate(1 << 34)  # sparse: it takes no room
        file.seek(0, 2)
        file.write(b"\nfirst\nheadwater: it failed\n\n")
    assert last_line(log) == "it failed"
    assert last_line(tmp_path / "none.log") == "no log was written"
