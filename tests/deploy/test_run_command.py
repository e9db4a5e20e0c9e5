"""`headwater run` as a user meets it, with every role real on a tiny model."""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import subprocess
import tomllib
from pathlib import Path

import msgspec
import psutil
import pytest
from rich.console import Console

from connectors.config import parse
from connectors.records import Manifest
from connectors.run_dir import RunDir
from deploy import errors
from deploy.health import Supervised
from deploy.log import opened
from deploy.run import introduce
from deploy.run_folder import Prepared
from tests.deploy.command import config_text
from tests.small_run import SmallRun, headwater_command, until
from trainer.step_log import chain, read_steps

ROLES = {"broker", "engine-0", "dataflow", "feeder", "trainer"}


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pids(run: SmallRun) -> dict[str, int]:
    """Of the roles that the supervisor says are running."""
    try:
        content = (run.run_dir.path / "supervisor.json").read_bytes()
    except FileNotFoundError:
        return {}
    roles = msgspec.json.decode(content, type=Supervised).roles
    return {role.name: role.pid for role in roles if role.pid is not None}


@pytest.mark.parametrize(("asked", "said"), [(None, ""), (40, ""), (42, "trainer.num_steps = 40")])
def test_a_run_that_its_own_number_of_steps_ends_first_says_so(
    tmp_path: Path, asked: int | None, said: str
) -> None:
    config = parse(tomllib.loads(config_text(tmp_path)), base_dir=str(tmp_path))
    out = io.StringIO()
    prepared = Prepared(config=config, resumed=False)
    introduce(Console(file=out, width=300), prepared, RunDir(tmp_path), 40, asked)
    first, *more = out.getvalue().splitlines()
    assert first.endswith("until step 40")
    assert len(more) == bool(said)
    assert said in "".join(more)


def all_started(run: SmallRun) -> bool:
    return pids(run).keys() == ROLES


def test_a_run_ends_at_its_steps_resumes_and_holds_up(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    run = SmallRun(tmp_path, tiny_model_path)
    done = subprocess.run(
        run.arguments("--stop-after-steps", 3, "--json"),
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == errors.OK, f"{done.stderr}\n{run.logs()}"
    final = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert (final["run"], final["step"]) == ("run", 3)
    assert final["groups"]["trained"] == 12
    assert {role["name"]: role["state"] for role in final["roles"]} == {
        **dict.fromkeys(ROLES, "stopped"),
        "trainer": "finished",
    }
    assert "starting run in" in done.stderr

    # The log of a run that does not run is read through a broker started for the command.
    assert run.ask("status") == final

    more = subprocess.run(
        [*run.arguments("--stop-after-steps", 5), "--set", "engine.max_running=8"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert more.returncode == errors.OK, f"{more.stderr}\n{run.logs()}"
    assert "resuming run in" in more.stdout
    assert "changed: engine.max_running: 64 -> 8" in more.stdout
    assert "reward" in more.stdout
    assert [m.step for m in _after(run)] == [1, 2, 3, 4, 5]
    audit = run.ask("audit")
    assert audit["ok"], audit
    assert audit["groups"]["trained"] == 20

    refused = subprocess.run(
        [*run.arguments(), "--set", "kafka.partitions=3"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert refused.returncode == errors.CONFIGURATION
    assert refused.stderr.count("\n") == 1


def test_however_a_run_is_ended_no_process_stays_and_it_resumes(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    run = SmallRun(tmp_path, tiny_model_path, settings={"trainer.num_steps": 1000})
    with run.running() as process:
        run.wait_for_step(process, 1)
        until(lambda: all_started(run), "all roles")
        children = pids(run)
        second = subprocess.run(
            run.arguments(), capture_output=True, text=True, timeout=60, check=False
        )
        assert second.returncode == errors.ENVIRONMENT
        assert f"pid {process.pid}" in second.stderr
        live = run.ask("status")
        assert live["step"] >= 1
        assert {role["state"] for role in live["roles"]} == {"running"}
        assert {role["name"]: role["pid"] for role in live["roles"]} == children
        process.kill()
        until(lambda: not any(map(is_running, children.values())), "the children's end")

    with run.running() as process:
        run.wait_for_step(process, 2)
        until(lambda: all_started(run), "all roles")
        children = pids(run)
        os.kill(children["engine-0"], signal.SIGKILL)
        until(
            lambda: all_started(run) and pids(run)["engine-0"] != children["engine-0"],
            "the engine's restart",
        )
        children = pids(run)
        process.send_signal(signal.SIGINT)
        until(lambda: "trainer" not in pids(run), "the first interrupt to be seen")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (errors.INTERRUPTED, errors.OK)
        assert not any(map(is_running, children.values()))

    audit = run.ask("audit")
    assert audit["ok"], audit
    assert audit["groups"]["trained"] >= 4 * 2


def _after(run: SmallRun) -> list[Manifest]:
    """The manifests of a run that does not run."""
    with opened(run.config, run.run_dir) as cluster:
        return chain(read_steps(cluster))


def test_a_folder_whose_broker_is_locked_is_one_line_and_exit_3(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    run = SmallRun(tmp_path, tmp_path / "model")
    run.run_dir.broker_data.mkdir(parents=True)
    with (run.run_dir.broker_data / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = subprocess.run(
            [*headwater_command("broker", run.file, "--run-dir", run.run_dir.path)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr.count("\n")) == (errors.ENVIRONMENT, 1)
        whole = subprocess.run(
            run.arguments("--json"), capture_output=True, text=True, timeout=60, check=False
        )
    assert whole.returncode == errors.ENVIRONMENT
    assert whole.stdout == ""
    assert "broker does not start" in whole.stderr.splitlines()[-1]
    assert "is in use" in whole.stderr.splitlines()[-1]
