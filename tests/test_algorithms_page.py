"""docs/algorithms.md names everything there is, with the defaults it has, and shows what works."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import pairwise, takewhile
from typing import Any, get_args

import pytest

from connectors.algorithms import (
    ESTIMATORS,
    KL,
    LOSSES,
    Aggregation,
    Correction,
    Level,
    Proximal,
    Rejection,
)
from connectors.config import Overlong, Trainer, parse
from connectors.records import Behaviour
from tests.test_docs import ROOT, tables
from trainer.execute import SETTINGS

PAGE = "docs/algorithms.md"
TEXT = (ROOT / PAGE).read_text()
REST = {"model": {"path": "model"}, "tasks": {"t": {"reward": "exact_match"}}}


def rows(head: str) -> list[list[str]]:
    """Cells of the table whose first heading begins with `head`, in backticks."""
    lines = TEXT.splitlines()
    start = next(
        number
        for number, (heading, rule) in enumerate(pairwise(lines))
        if heading.startswith(f"| `{head}`") and rule.startswith("|---")
    )
    body = takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [line.strip("| ").split(" | ") for line in body]


def named(head: str) -> set[str]:
    return {row[0].strip("`") for row in rows(head)}


def test_the_recipes_are_valid_and_there_is_one_of_each_usual_kind() -> None:
    shown = [parse({**REST, **table}, base_dir="/") for table in tables(PAGE)]
    found = [config.trainer for config in shown if config.trainer != Trainer()]
    assert len(found) == 7
    assert {trainer.advantage for trainer in found} >= {"grpo", "dr-grpo", "spo"}
    assert {trainer.loss for trainer in found} >= {"ppo", "gspo", "cispo"}


@pytest.mark.parametrize(
    ("head", "known"),
    [
        ("advantage", ESTIMATORS),
        ("loss", LOSSES),
        ("aggregation", get_args(Aggregation)),
        ("correction", get_args(Correction)),
        ("rejection", get_args(Rejection)),
        ("proximal", get_args(Proximal)),
        ("kl", get_args(KL)),
        ("behaviour", get_args(Behaviour)),
    ],
)
def test_each_table_has_every_name_and_no_other(head: str, known: Any) -> None:
    assert named(head) == set(known)


@pytest.mark.parametrize(
    ("head", "column", "known"),
    [
        ("advantage", 3, {k: {**e.parameters, **e.tracker} for k, e in ESTIMATORS.items()}),
        ("loss", 2, {k: loss.parameters for k, loss in LOSSES.items()}),
    ],
)
def test_each_name_stands_with_its_parameters_and_their_defaults(
    head: str, column: int, known: Mapping[str, Mapping[str, Any]]
) -> None:
    for row in rows(head):
        parameters = known[row[0].strip("`")]
        said = dict(re.findall(r"`(\w+)` ([^,]+)", row[column]))
        assert said == {key: text(one.default) for key, one in parameters.items()}, row[0]
        assert said or row[column] == "none"


def text(default: Any) -> str:
    if isinstance(default, float) and not isinstance(default, bool):
        return f"{default:g}" if math.isfinite(default) else "off"
    return str(default).lower()


def test_what_needs_a_group_is_said_to_need_one() -> None:
    said = {row[0].strip("`"): row[2].startswith("needs") for row in rows("advantage")}
    assert said == {name: one.needs_group for name, one in ESTIMATORS.items()}


def test_every_key_the_mathematics_reads_is_on_the_page_and_every_key_there_exists() -> None:
    read = {*SETTINGS, "filter_groups", "gap_alert", "max_tokens_per_microbatch"}
    assert read <= Trainer.model_fields.keys()
    missing = [key for key in (*read, *Overlong.model_fields) if f"`{key}`" not in TEXT]
    assert (missing, [level for level in get_args(Level) if f"`{level}`" not in TEXT]) == ([], [])
    assigned = set(re.findall(r"`(\w+) = ", TEXT))
    assert assigned <= Trainer.model_fields.keys()


def test_the_settings_table_has_the_defaults() -> None:
    lines = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| ")]
    of_keys = {row[2]: row[3] for row in lines if len(row) == 4 and row[2].startswith("`")}
    fields = Trainer.model_fields
    for keys, defaults in of_keys.items():
        names = re.findall(r"`(\w+)`", keys)
        said = [value.strip("`") for value in defaults.split(", ")]
        plain = [text(fields[name].default) for name in names if fields[name].default != {}]
        assert plain == said, keys
    assert {"`num_minibatches`, `learning_rate`, `weight_decay`, `max_grad_norm`"} <= of_keys.keys()


def test_the_readme_links_the_page() -> None:
    assert f"({PAGE})" in (ROOT / "README.md").read_text()
