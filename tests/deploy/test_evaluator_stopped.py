"""Training waits for nobody who evaluates: a whole run whose evaluator stands still."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from connectors.kafka.client import KafkaFailure, read_all
from connectors.records import Evaluation, decode_as
from tests.small_run import SmallRun, until

STEPS_MEANWHILE, NUM_STEPS = 8, 40


def evaluated(run: SmallRun) -> list[int]:
    """Versions with an evaluation, in the order they were written; none before there is a log."""
    try:
        records = read_all(run.cluster, run.cluster.topic("evaluations"), [0])
    except (KafkaFailure, OSError, ValueError):
        return []
    return [decode_as(record.value, Evaluation).version.number for record in records]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_steps_go_on_while_the_evaluator_is_stopped_and_it_then_takes_the_newest_version(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    run = SmallRun(
        tmp_path,
        tiny_model_path,
        settings={
            "tasks.even.eval_prompts": "prompts.jsonl",
            "eval.every_versions": 2,
            "eval.max_prompts": 16,
            "eval.num_samples": 4,
            "eval.pass_k": [1, 4],
            "trainer.num_steps": NUM_STEPS,
        },
    )
    with run.running() as process:
        before = until(lambda: evaluated(run), "an evaluation", 300)
        evaluator = run.pid("evaluate")
        os.kill(evaluator, signal.SIGSTOP)
        try:
            trained = max((manifest.step for manifest in run.manifests()), default=0)
            run.wait_for_step(process, trained + STEPS_MEANWHILE, 300)
            stopped = evaluated(run)
        finally:
            os.kill(evaluator, signal.SIGCONT)
        assert process.wait(120) == 0, run.logs()
    # One may have been on its way to the broker when the signal came.
    assert len(stopped) <= len(before) + 1
    found = run.ask("status")
    assert found["step"] == NUM_STEPS
    assert found["eval"]["versions"] == [f"0.{NUM_STEPS}"]
    assert set(found["eval"]["pass_at"]) == {"1", "4"}
    assert next(r["restarts"] for r in found["roles"] if r["name"] == "evaluate") == 0
    audit = run.ask("audit")
    assert audit["ok"], audit
