"""What the documentation shows can be used as it stands."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from connectors.config import EngineSection, parse
from tests.contract_table import DOCS, checks, listed, sentence
from tests.vllm_gate import requires_vllm

ROOT = Path(__file__).resolve().parent.parent


def tables(file: str) -> Iterator[dict[str, Any]]:
    """The TOML that `file` shows, parsed."""
    blocks = re.findall(r"^```toml\n(.*?)^```", (ROOT / file).read_text(), re.DOTALL | re.MULTILINE)
    yield from map(tomllib.loads, blocks)


def test_engine_sections_in_the_documentation_are_valid() -> None:
    shown = [table["engine"] for table in tables("docs/engines.md")]
    assert len(shown) == 2
    for section in shown:
        EngineSection(**section)


def test_kafka_and_broker_sections_in_the_documentation_are_valid() -> None:
    rest = {"model": {"path": "model"}, "tasks": {"t": {"reward": "exact_match"}}}
    shown = list(tables("docs/kafka.md"))
    assert len(shown) == 2
    for table in shown:
        parse({**rest, **table}, base_dir="/")


def test_checkpoint_sections_in_the_documentation_are_valid() -> None:
    rest = {"model": {"path": "model"}, "tasks": {"t": {"reward": "exact_match"}}}
    shown = list(tables("docs/checkpoints.md"))
    assert len(shown) == 2
    for table in shown:
        parse({**rest, **table}, base_dir="/")


@requires_vllm
def test_options_in_the_documentation_are_arguments_of_vllm() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    (options,) = [
        t["engine"]["options"] for t in tables("docs/engines.md") if "options" in t["engine"]
    ]
    assert options.keys() <= {field.name for field in fields(AsyncEngineArgs)}


def test_files_that_the_readme_links_exist() -> None:
    for page in ("README.md", "docs/tasks.md", "docs/engines.md", "docs/kafka.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
            assert (ROOT / page).parent.joinpath(link).exists(), f"{page}: {link}"


def test_the_checks_in_the_documentation_are_those_of_the_engines_contract() -> None:
    assert listed(DOCS.read_text()) == [sentence(name) for name in checks()]
