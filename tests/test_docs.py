"""What the documentation shows can be used as it stands."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from itertools import takewhile
from pathlib import Path
from typing import Any

from connectors.config import EngineSection, parse
from connectors.parameters import REQUIRED
from operators.staleness import PRESETS, policy_for
from operators.staleness.preset import RunShape
from tests.contract_table import DOCS, checks, listed, sentence
from tests.vllm_gate import requires_vllm
from trainer.staleness import configured_policy

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


def test_staleness_sections_in_the_documentation_are_valid() -> None:
    rest = {"model": {"path": "model"}, "tasks": {"t": {"reward": "exact_match"}}}
    shown = list(tables("docs/staleness.md"))
    assert len(shown) == 2
    for table in shown:
        configured_policy(parse({**rest, **table}, base_dir="/"))


def test_every_policy_is_in_both_tables_with_the_defaults_of_its_parameters() -> None:
    acts, settings = (rows_of("docs/staleness.md", head) for head in ("grants in,", "strict,"))
    assert {name for row in acts for name in re.findall(r"`(.+?)`", row[0])} == PRESETS.keys()
    assert sorted(row[0].strip("`") for row in settings) == sorted(PRESETS)
    said = " ".join(row[2] for row in settings)
    for name, preset in PRESETS.items():
        for parameter, rule in preset.parameters.items():
            default = re.escape(f"`{parameter}` {default_text(rule.default)}")
            assert re.search(rf"{default}(?![\d.])", said), f"{name}: {parameter}"


def default_text(default: Any) -> str:
    if default is REQUIRED:
        return ""
    if default is None:
        return "none"
    return str(default).lower().replace("-", "−")


def test_policies_that_are_said_not_to_be_strict_have_no_bound() -> None:
    shape = RunShape(batch_size=32, group_size=8, num_slots=512)
    for row in rows_of("docs/staleness.md", "strict,"):
        name = row[0].strip("`")
        bound = policy_for(name, shape, **({"n": 1} if name == "n-step-off" else {})).bound
        assert (bound is None) == (row[1] == "no" or name == "skyrl"), name  # at S = 4


def rows_of(file: str, head: str) -> list[list[str]]:
    """Cells of the table in `file` whose heading has a column that starts with `head`."""
    lines = iter((ROOT / file).read_text().splitlines())
    next(line for line in lines if line.startswith("| ") and f" | {head}" in line)
    next(lines)
    return [
        line.strip("| ").split(" | ")
        for line in takewhile(lambda line: line.startswith("|"), lines)
    ]


@requires_vllm
def test_options_in_the_documentation_are_arguments_of_vllm() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    (options,) = [
        t["engine"]["options"] for t in tables("docs/engines.md") if "options" in t["engine"]
    ]
    assert options.keys() <= {field.name for field in fields(AsyncEngineArgs)}


def test_files_that_the_documentation_links_exist() -> None:
    for page in ("README.md", *sorted(f"docs/{file.name}" for file in (ROOT / "docs").iterdir())):
        for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
            is_here = (ROOT / page).parent.joinpath(link).exists()
            assert "://" in link or is_here, f"{page}: {link}"


def test_the_checks_in_the_documentation_are_those_of_the_engines_contract() -> None:
    assert listed(DOCS.read_text()) == [sentence(name) for name in checks()]
