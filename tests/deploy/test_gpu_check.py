"""The GPU check itself, run without a GPU: the same functions on the CPU, on tiny models."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from deploy import errors
from deploy.gpu_check import LIMITS_S, main, run
from tests.vllm_gate import requires_vllm

MARKS: dict[str, tuple[pytest.MarkDecorator, ...]] = {
    "vllm-memory": (requires_vllm, pytest.mark.slow),
    "vllm-group": (requires_vllm, pytest.mark.slow),
}


def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "did not become true"
        time.sleep(0.05)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Those whose command line names something in `folder`."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        named = any(str(folder) in word for word in process.info["cmdline"] or ())
        if named and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, ())) for n in LIMITS_S])
def test_each_check_passes_on_the_cpu_with_finite_figures(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["--cpu", "--json", "--only", name])
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    answer = json.loads(said)
    (check,) = answer["checks"]
    assert (code, check["error"], check["skipped"]) == (errors.OK, None, None), check
    assert answer["ok"] is check["ok"] is True
    assert check["name"] == f"{name} tiny"
    assert check["figures"]
    assert all(math.isfinite(v) for v in check["figures"].values() if isinstance(v, float))


def test_without_vllm_its_checks_are_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from connectors.engines.vllm import version
    from deploy.device import engines
    from deploy.device.parts import Skipped

    monkeypatch.setattr(version, "problem", lambda: "vLLM is not installed")
    with pytest.raises(Skipped, match="not installed"):
        engines.publish_and_generate("cpu", "tiny", kind="vllm", through="memory")


def test_without_a_gpu_every_check_says_so_and_none_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--json"]) == errors.OK
    answer = json.loads(capsys.readouterr().out)
    assert answer["gpus"] == []
    assert {check["skipped"] for check in answer["checks"]} == {"no GPU"}
    assert len(answer["checks"]) == 2 * len(LIMITS_S)


def test_a_crash_is_a_result_with_its_last_line() -> None:
    check = run("trainer", "cpu", "no-such-shape", 120.0)
    assert not check.ok
    assert check.error == "ended with 1: KeyError: 'no-such-shape'"


def test_a_hang_is_a_result_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    arguments = ["--cpu", "--only", "group", "--only", "trainer", "--limit-s", "0.2"]
    assert main(arguments) == errors.FAILED
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("tiny")[0] for line in lines] == ["FAIL  group ", "FAIL  trainer "]
    assert all("took more than 0.2 s" in line for line in lines)
    assert processes_of(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_killed_check_takes_its_engine_with_it(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "deploy.gpu_check", "--cpu", "--only", "hf-memory"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    )
    try:
        until(lambda: any("engine-0" in p.cmdline() for p in processes_of(tmp_path)))
    finally:
        process.kill()
        process.wait()
    until(lambda: processes_of(tmp_path) == [])
