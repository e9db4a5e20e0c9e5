"""The whole family trains: each setting of the benchmark, some steps on the same groups."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from benchmarks.algorithms import Outcome, Recorded, around, family, line, measure
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
from connectors.config import Config, Source, parse
from connectors.kafka.client import Cluster
from connectors.records import Group, Prompt, Segment, Trajectory, Version
from tests.test_docs import ROOT
from tests.trainer.groups import trainable_group
from tests.trainer.test_loop import played_manifests
from trainer.alerts import alerts, subject

NUM_STEPS = 3
AGES = {Version(0, 1): 2, Version(0, 2): 1, Version(0, 3): 0}


@pytest.fixture(scope="module")
def config(tiny_model_path: Path) -> Config:
    table = {
        "model": {"path": str(tiny_model_path)},
        "tasks": {"a": {"reward": "exact_match"}},
        "sampling": {"max_tokens": 5},
        "trainer": {"groups_per_step": 4, "learning_rate": 1e-3},
    }
    return parse(table, base_dir="/")


@pytest.fixture(scope="module")
def steps(config: Config, tiny_model_path: Path) -> list[Recorded]:
    """Of two samples a group, of each age, whose log-probs are the model's own and some noise."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    rng = np.random.default_rng(0)
    versions = list(AGES)

    def sampled(row: Trajectory, version: Version) -> Trajectory:
        tokens = torch.from_numpy(row.tokens.astype(np.int64))
        with torch.no_grad():
            scores = model(tokens[None]).logits[0, :-1] / config.sampling.temperature
        logprobs = torch.log_softmax(scores, -1).gather(1, tokens[1:, None])[:, 0].numpy()
        noisy = np.append(0, logprobs) + rng.normal(0, 0.1, len(row.tokens))
        return replace(
            row,
            logprobs=np.where(row.loss_mask != 0, noisy, np.nan).astype(np.float32),
            segments=(Segment(3, 8, version.incarnation, version.number),),
        )

    def group(number: int) -> Group:
        made = trainable_group(f"p/0/{number}", versions[0], seed=number)
        version = versions[number % len(versions)]
        rows = tuple(sampled(row, version) for row in made.trajectories)
        prompt = Prompt(task="a", id=str(number), prompt="x")
        return replace(made, prompt=prompt, trajectories=rows)

    return [
        Recorded(groups=[group(4 * s + g) for g in range(4)], ages=AGES, weights={}, seed=s)
        for s in range(NUM_STEPS)
    ]


@pytest.fixture(scope="module")
def outcomes(config: Config, steps: list[Recorded]) -> dict[str, Outcome]:
    base = around(config)
    return {name: measure(config, steps, trainer) for name, trainer in family(base).items()}


def test_the_family_is_every_name_once(config: Config) -> None:
    found = family(around(config))
    assert len(set(map(str, found.values()))) == len(found)
    for key, names in (
        ("advantage", ESTIMATORS),
        ("loss", LOSSES),
        ("aggregation", get_args(Aggregation)),
        ("correction", get_args(Correction)),
        ("rejection", get_args(Rejection)),
        ("correction_level", get_args(Level)),
        ("rejection_level", get_args(Level)),
        ("proximal", get_args(Proximal)),
        ("kl", get_args(KL)),
    ):
        assert {getattr(trainer, key) for trainer in found.values()} == set(names)
    assert len(found) == 45
    assert all(trainer.problem() is None for trainer in found.values())


def test_each_trains_and_every_number_is_finite(outcomes: dict[str, Outcome]) -> None:
    assert [name for name, found in outcomes.items() if not found.is_finite] == []
    assert [name for name, found in outcomes.items() if not found.has_changed] == []
    assert {name: found.skipped for name, found in outcomes.items() if found.skipped} == {}


def test_what_each_is_for_is_seen_in_its_numbers(outcomes: dict[str, Outcome]) -> None:
    last = {name: found.metrics[-1] for name, found in outcomes.items()}
    assert last["default"]["loss/ratio_mean"] == 1.0
    assert last["loss ppo, 2 mini-batches"]["loss/ratio_mean"] != 1.0
    assert last["proximal behaviour, 2 mini-batches"]["kl/behaviour"] == 0.0
    assert last["kl k3"]["kl/reference"] > 0
    assert "kl/reference" not in last["default"]
    assert outcomes["advantage spo"].metrics[0]["value/prompts"] == 4


def test_a_shadow_has_no_gap_for_another_policy_sampled_its_tokens(
    config: Config, steps: list[Recorded], outcomes: dict[str, Outcome]
) -> None:
    """`fresh` would be tokens of the run's version of the same number."""
    followed = Source(run="r", grants="g", namespace="n", starts=[0])
    shadow = measure(config, steps, around(config).model_copy(update={"source": followed}))
    for own, of_run in zip(shadow.metrics, outcomes["default"].metrics, strict=True):
        left_out = {name for name in of_run if name.startswith("gap/")}
        assert of_run.keys() - own.keys() == left_out >= {"gap/share_above_10pct"}
        assert ("gap" in map(subject, alerts(of_run, 0.1)), alerts(own, 0.1)) == (True, ())


def test_every_metric_is_on_the_page(
    outcomes: dict[str, Outcome], cluster: Cluster, tiny_model_path: Path, tmp_path: Path
) -> None:
    """Those of each setting's steps, and all that a run's loop adds in its manifests."""
    text = (ROOT / "docs/algorithms.md").read_text()
    said = text.split("\n## What a step says\n")[1].split("\n## ")[0]
    known = re.compile(
        "|".join(re.sub("[A-Z]+", "[^/]+", name) for name in re.findall(r"`([\w/]+)`", said))
    )
    found = {key for outcome in outcomes.values() for step in outcome.metrics for key in step}
    found |= {
        key for m in played_manifests(cluster, tiny_model_path, tmp_path) for key in m.metrics
    }
    assert {"groups", "tokens/age/0", "seconds/wait/rollouts", "tokens/masked"} <= found
    assert [key for key in sorted(found) if not known.fullmatch(key)] == []


def test_a_row_of_the_table_says_what_was_not_finite(
    outcomes: dict[str, Outcome],
) -> None:
    default = outcomes["default"]
    cells = line("default", default, default).strip("| ").split(" | ")
    assert (cells[:3], cells[-1]) == (["default", "3", "no"], "1.00")
    broken = replace(default, is_finite=False, skipped=["nan_gradient"])
    cells = line("x", broken, default).strip("| ").split(" | ")
    assert cells[:3] == ["x", "2", "YES"]
