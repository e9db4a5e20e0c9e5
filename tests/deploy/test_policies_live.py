"""A real run under each strict policy: broker, engine, dataflow and trainer. How stale its trained
tokens were is read from its log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from connectors.kafka.client import Reader
from deploy.audit_log import trained_versions
from operators.staleness import PRESETS
from operators.staleness.lineage import lag
from tests.small_run import SmallRun
from trainer.overdue import masked_versions
from trainer.reexecute import read_groups
from trainer.staleness import configured_policy

STRICT: list[tuple[str, Mapping[str, Any]]] = [
    ("areal", {}),
    ("deadline", {"bound": 2, "lookahead": 2}),
    ("deadline", {"bound": 2, "lookahead": "auto"}),
    ("deadline", {"bound": 1, "lookahead": 1, "at_deadline": "mask"}),
    ("deadline", {"bound": 1, "lookahead": 1, "at_deadline": "drop"}),
    ("n-step-off", {"n": 2}),
    ("nemo-in-order", {"max_lookahead_versions": 2}),
    ("nemo-weight-fifo", {"max_staleness_versions": 2}),
    ("nemo-windowed", {"max_staleness_versions": 1}),
    ("one-step-off", {}),
    ("openrlhf", {"async_queue_size": 2}),
    ("over-generate", {"then": "close"}),
    ("over-generate", {"then": "requeue"}),
    ("prime-rl", {"max_off_policy_steps": 1}),
    ("psrl-roc", {"staleness": 2}),
    ("psrl-roc", {"staleness": 2, "proactive_filter": "retry"}),
    ("roll", {"async_generation_ratio": 1.5}),
    ("skyrl", {"max_staleness_steps": 0}),
    ("sync", {}),
    ("trl", {"max_staleness": 1}),
    ("verl-drop", {"max_off_policy_threshold": 2}),
    ("verl-wait", {"max_off_policy_threshold": 2}),
    ("windowed-fifo", {"target_offpolicy_steps": 1, "window_size": 2}),
]
NOT_STRICT = {"dressage", "nemo-ready-first", "slime"}


def test_every_preset_that_is_strict_has_its_run() -> None:
    assert {name for name, _ in STRICT} == PRESETS.keys() - NOT_STRICT


def ages(run: SmallRun) -> Iterator[int]:
    """Of every trained token's version at the step that trained it."""
    with closing(Reader(run.cluster, run.cluster.topic("trajectories"), {})) as reader:
        for manifest in run.manifests():
            masked = masked_versions(manifest.settings)
            at = type(manifest.version)(manifest.version.incarnation, manifest.step - 1)
            for group in read_groups(reader, manifest):
                yield from (lag(at, v, {}) for v in trained_versions(group) - masked)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parameters"), STRICT, ids=lambda value: str(value))
def test_a_run_trains_no_token_beyond_its_policys_bound(
    name: str, parameters: Mapping[str, Any], tmp_path: Path, tiny_model_path: Path
) -> None:
    run = SmallRun(
        tmp_path,
        tiny_model_path,
        settings={
            "staleness.policy": name,
            "trainer.num_steps": 10_000,
            **{f"staleness.parameters.{key}": value for key, value in parameters.items()},
        },
    )
    bound = None
    with run.running() as process:
        run.wait_for_step(process, 8, 240.0)
        bound = configured_policy(run.config).bound
        found = list(ages(run))
    assert process.returncode == 0, run.logs()
    assert bound is not None
    assert max(found) <= bound
    assert len(found) >= 8
    status, audit = run.ask("status"), run.ask("audit")
    assert (status["policy"]["name"], status["stall"]) == (name, None)
    assert status["staleness"]["max"] <= bound
    assert audit["ok"], audit
    assert audit["bound_checked"]
    assert (audit["lost"], audit["bound_violations"], audit["credit_balance"]) == ([], [], 0)


SLOW_AGENT = """
import asyncio

async def rollout(prompt, llm, tools):
    if int(prompt.prompt.split()[-1]) % 5 == 0:
        for _ in range(2):
            await llm.generate((70,))
            await asyncio.sleep(6)
    await llm.generate(())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("deadline", {"bound": 1, "lookahead": 1, "at_deadline": "drop"}),
        ("deadline", {"bound": 1, "lookahead": 1, "at_deadline": "mask"}),
        ("over-generate", {"then": "requeue"}),
    ],
    ids=lambda value: str(value),
)
def test_what_takes_too_long_is_cancelled_or_masked_though_worker_and_trainer_are_killed(
    name: str, parameters: Mapping[str, Any], tmp_path: Path, tiny_model_path: Path
) -> None:
    """Every fifth prompt takes many steps' time."""
    (tmp_path / "agent.py").write_text(SLOW_AGENT)
    run = SmallRun(
        tmp_path,
        tiny_model_path,
        settings={
            "tasks.even.agent": "agent.py:rollout",
            "staleness.policy": name,
            "trainer.num_steps": 10_000,
            **{f"staleness.parameters.{key}": value for key, value in parameters.items()},
        },
    )
    with run.running() as process:
        run.wait_for_step(process, 3, 240.0)
        run.kill("dataflow")
        run.wait_for_step(process, 6, 240.0)
        run.kill("trainer")
        run.wait_for_step(process, 10, 240.0)
        bound = configured_policy(run.config).bound
        found = list(ages(run))
    assert bound is not None
    assert max(found) <= bound
    audit, did = run.ask("audit"), run.ask("status")["staleness_actions"]
    assert audit["ok"], audit
    assert (audit["lost"], audit["bound_violations"], audit["credit_balance"]) == ([], [], 0)
    if parameters.get("at_deadline") == "drop":
        assert did["cancels"]["close"]["stale"] > 0
        assert audit["closed_by_reason"]["stale"] > 0
    elif parameters.get("at_deadline") == "mask":
        assert did["masked_tokens"] > 0
    else:
        assert did["cancels"]["requeue"]["cancelled"] > 0
        assert audit["closed_by_reason"] == {}
