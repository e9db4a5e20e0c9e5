"""The table of checks in docs/engines.md: what every engine is held to, and which kinds pass.

python -P -m tests.contract_table    runs the engine contract and writes the table
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "engines.md"
KINDS = ("hf", "vllm")
FILES = sorted((ROOT / "tests" / "connectors").glob("test_engine_contract*.py"))
TABLE = re.compile(r"(<!-- checks -->\n).*?(<!-- end of checks -->)", re.DOTALL)


def checks() -> Iterator[str]:
    """Every check's name, in the order of the files."""
    for file in FILES:
        yield from re.findall(r"^async def (test_\w+)", file.read_text(), re.MULTILINE)


def sentence(name: str) -> str:
    words = name.removeprefix("test_").replace("_", " ")
    return words[0].upper() + words[1:]


class Outcomes:
    """A pytest plugin: by check and kind, whether all of its cases passed."""

    def __init__(self) -> None:
        self.passed: dict[tuple[str, str], list[bool]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = re.search(r"::(\w+)\[(\w+)", report.nodeid)
        if found and (report.when == "call" or not report.passed):
            self.passed[found[1], found[2]].append(report.passed)


def rows(outcomes: Outcomes) -> Iterator[str]:
    """The table's lines; a check that was skipped is not passed."""
    yield f"| check | {' | '.join(KINDS)} |"
    yield "|---|" + "---|" * len(KINDS)
    for name in checks():
        seen = [outcomes.passed.get((name, kind), [False]) for kind in KINDS]
        marks = " | ".join("yes" if all(cases) else "no" for cases in seen)
        yield f"| {sentence(name)} | {marks} |"


def listed(text: str) -> list[str]:
    """The sentences of the table in `text`."""
    table = TABLE.search(text)
    lines = table[0].splitlines()[3:-1] if table else []
    return [line.split("|")[1].strip() for line in lines]


def main() -> int:
    outcomes = Outcomes()
    code = pytest.main([*map(str, FILES), "-n", "2"], plugins=[outcomes])
    table = "\n".join(rows(outcomes))
    DOCS.write_text(TABLE.sub(rf"\g<1>{table}\n\g<2>", DOCS.read_text()))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
