"""Five short chaos runs, which together have every kind of event: two in `make test`, engine,
network, trainer, files; `make chaos` plays the long ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.run import chaos_run
from tests.chaos.schedule import SHORT, schedule
from tests.small_run import SmallRun


@pytest.mark.timeout(900)  # a run that stands still says so itself
@pytest.mark.parametrize(
    "seed",
    [
        seed if seed in (1, 3) else pytest.param(seed, marks=pytest.mark.slow)
        for seed in range(len(SHORT))
    ],
)
def test_whatever_dies_nothing_is_lost_and_nothing_is_trained_twice(
    seed: int, tmp_path: Path, tiny_model_path: Path
) -> None:
    plan = schedule(seed, short=True)
    result = chaos_run(plan, tmp_path, tiny_model_path)
    if result.failure:
        played = (tmp_path / "events.log").read_text()
        said = SmallRun(tmp_path, tiny_model_path).logs()
        pytest.fail(f"seed {seed}: {result.failure}\n{plan}\n{played}\n{said}", pytrace=False)
