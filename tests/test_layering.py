"""The layering, read from the source: who may import whom, and which file may import which library.

connectors  nothing of ours
operators   connectors.records, .traffic, .tool_calls, .branches, .parameters and .turns, engine
            types
pipelines   connectors, operators
trainer     connectors, operators.staleness and .tracker
deploy      everything
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("connectors", "operators", "pipelines", "trainer", "deploy")

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "connectors": ("connectors",),
    "operators": (
        "operators",
        "connectors.branches",
        "connectors.engines.types",
        "connectors.parameters",
        "connectors.records",
        "connectors.tool_calls",
        "connectors.traffic",
        "connectors.turns",
    ),
    "pipelines": ("pipelines", "connectors", "operators"),
    "trainer": ("trainer", "connectors", "operators.staleness", "operators.tracker"),
    "deploy": (*ROOMS, "headwater"),
}
LIBRARY_ROOMS: dict[str, tuple[str, ...]] = {
    "deepspeed": (
        "trainer/engine.py",
        "trainer/engine_state.py",
        "trainer/process_group.py",
        "trainer/sequence_parallel.py",
        "trainer/zero.py",
    ),
    "kafka": (
        "connectors/kafka/client.py",
        "connectors/kafka/connections.py",
        "connectors/kafka/knock.py",
        "connectors/kafka/topics.py",
        "connectors/broker/",
    ),
    "bytewax": ("connectors/kafka/", "pipelines/"),
}
HEAVY = ("torch", "deepspeed", "transformers", "vllm", "ray", "bytewax")


def sources() -> list[Path]:
    return [
        file
        for room in ROOMS
        for file in sorted((ROOT / room).rglob("*.py"))
        if "templates" not in file.parts
    ]


def imports(code: str, package: tuple[str, ...]) -> Iterator[str]:
    """Every name that `code`, a module of `package`, imports anywhere, dotted: `from a.b import c`
    gives a.b.c."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*start, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imports_of(file: Path) -> list[str]:
    return list(imports(file.read_text(), file.relative_to(ROOT).parent.parts))


def lies_within(name: str, allowed: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in allowed)


def violations(file: Path) -> list[str]:
    room = file.relative_to(ROOT).parts[0]
    return [
        f"{file.relative_to(ROOT)} imports {name}"
        for name in imports_of(file)
        if lies_within(name, (*ROOMS, "headwater")) and not lies_within(name, MAY_IMPORT[room])
    ]


def test_no_package_imports_one_above_or_beside_it() -> None:
    found = [violation for file in sources() for violation in violations(file)]
    assert found == []


@pytest.mark.parametrize("library", LIBRARY_ROOMS)
def test_a_library_is_imported_only_in_its_room(library: str) -> None:
    found = [
        str(file.relative_to(ROOT))
        for file in sources()
        if any(lies_within(name, (library,)) for name in imports_of(file))
        and not str(file.relative_to(ROOT)).startswith(LIBRARY_ROOMS[library])
    ]
    assert found == []


def test_the_reader_sees_every_package_and_imports_within_functions() -> None:
    assert {file.relative_to(ROOT).parts[0] for file in sources()} == set(ROOMS)
    code = "def f():\n  from pipelines.job import f\n  from . import loop\n  import kafka.errors\n"
    seen = list(imports(code, ("trainer",)))
    assert seen == ["pipelines.job.f", "trainer.loop", "kafka.errors"]
    assert not lies_within(seen[0], MAY_IMPORT["trainer"])


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys, headwater; from deploy.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        f"print('loaded:', [m for m in {(*HEAVY, 'kafka', 'pyarrow')!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "loaded: []"
