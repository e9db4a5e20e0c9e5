"""A hundred steps, executed again by a process that did not train them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.small_run import SmallRun


@pytest.mark.slow
def test_a_replay_of_100_steps_gives_every_digest_again(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    run = SmallRun(
        tmp_path,
        tiny_model_path,
        settings={"trainer.num_steps": 100, "checkpoint.every_steps": 50},
    )
    run.run_to_end(timeout_s=280.0)
    assert run.ask("replay", "--from", 1) == {
        "steps": 100,
        "equal": True,
        "first_difference": None,
    }
