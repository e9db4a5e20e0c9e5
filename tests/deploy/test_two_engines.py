"""A whole run on two engines, of which one is killed and comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from connectors.engines.types import EngineState
from connectors.weights import WeightsError
from connectors.weights.calls import ask
from tests.small_run import SmallRun, until
from tests.vllm_gate import requires_vllm


def num_tokens(run: SmallRun, role: str) -> int:
    """What the engine generated since it started; 0 while it does not answer."""
    try:
        return ask(run.run_dir.url(role) or "", "GET", "/state", None, EngineState, 5.0).num_tokens
    except WeightsError:
        return 0


# Three starts of a vLLM engine: more than a minute on a laptop.
VLLM = pytest.param("vllm", marks=(requires_vllm, pytest.mark.timeout(900)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hf", VLLM])
def test_a_run_goes_on_without_an_engine_that_is_killed_and_gives_it_work_when_it_is_back(
    tmp_path: Path, tiny_model_path: Path, kind: str
) -> None:
    run = SmallRun(
        tmp_path,
        tiny_model_path,
        settings={
            "engine.kind": kind,
            "engine.count": 2,
            "engine.max_running": 4,  # less than a step needs: both have work all the time
            "trainer.num_steps": 10_000,
        },
    )
    with run.running() as process:
        for role in ("engine-0", "engine-1"):
            until(lambda role=role: num_tokens(run, role) > 0, f"work for {role}", 240)
        run.wait_for_step(process, 2)
        before = run.pid("engine-1")
        run.kill("engine-1")
        run.wait_for_step(process, run.manifests()[-1].step + 2)
        until(lambda: run.pid("engine-1") != before, "engine-1 to be back", 240)
        until(lambda: num_tokens(run, "engine-1") > 0, f"work for it\n{run.logs()}", 240)
        run.wait_for_step(process, run.manifests()[-1].step + 2)
    assert process.returncode == 0
    audit, status = run.ask("audit"), run.ask("status")
    assert audit["ok"], audit
    assert (audit["lost"], audit["trained_twice"], audit["bound_violations"]) == ([], [], [])
    assert audit["credit_balance"] == 0
    assert status["closed_by_reason"] == {}
