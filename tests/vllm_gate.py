"""Tests on vLLM: mark them `requires_vllm` (a function, a module's `pytestmark`, or one parameter
by `pytest.param(..., marks=requires_vllm)`), or call `need_vllm()` in a fixture.

Where the pinned vLLM's CPU build is not installed they skip and say why; where the variable CI is
set they fail, so that no CI passes without them. Modules import vLLM within functions only."""

from __future__ import annotations

import os

import pytest

from connectors.engines.vllm.version import installed, problem

requires_vllm = pytest.mark.requires_vllm  # conftest.py calls `need_vllm` for it


def need_vllm() -> None:
    """Skips or fails the test at hand unless vLLM can be used."""
    reason = problem()
    build, version = installed() or ("", "")
    if reason is None and build == "vllm" and "+cpu" not in version:
        reason = "the tests run on the CPU, and vLLM is its CUDA build (python -m deploy.gpu_check)"
    if reason is not None and os.environ.get("CI"):
        pytest.fail(f"CI runs the tests on vLLM, and {reason}", pytrace=False)
    if reason is not None:
        pytest.skip(reason)
