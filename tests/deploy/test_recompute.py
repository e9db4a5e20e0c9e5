"""Log-probs that a log has not: computed anew, they are the engine's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from connectors.kafka.client import read_all
from connectors.kafka.terminals import terminal
from connectors.records import Group, Trajectory, Version
from deploy.log import opened
from deploy.recompute import Recompute
from deploy.run_folder import load_run
from tests.small_run import SmallRun

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def run(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    """Ended after six steps, each of which leaves a checkpoint; the first two are kept no more."""
    made = SmallRun(
        tmp_path_factory.mktemp("run"),
        tiny_model_path,
        settings={
            "checkpoint.every_steps": 1,
            "checkpoint.keep": 4,
            "trainer.num_steps": 6,
            "trainer.learning_rate": 0.01,
            "sampling.temperature": 0.7,
        },
    )
    with made.running() as process:
        assert process.wait(240) == 0, made.logs()
    return made


def test_what_is_computed_again_is_what_the_engine_gave(run: SmallRun) -> None:
    config = load_run(run.run_dir)
    with opened(config, run.run_dir) as cluster:
        recompute = Recompute(config, run.run_dir, lambda: cluster)
        records = read_all(cluster, cluster.topic("rollouts"), range(config.kafka.partitions))
        by_version: dict[Version, Trajectory] = {}
        for ended in map(terminal, records):
            for row in ended.trajectories if isinstance(ended, Group) else ():
                versions = {segment.version for segment in row.segments}
                if len(versions) == 1:
                    by_version.setdefault(versions.pop(), row)
        kept = [v for v in sorted(by_version) if v.number == 0 or v.number >= 3]
        assert len(kept) >= 2
        for version in kept:
            row = by_version[version]
            found = recompute(version, row.tokens, row.loss_mask)
            assert found is not None, version
            written = row.loss_mask == 1
            assert np.isnan(found[~written]).all()
            np.testing.assert_allclose(found[written], row.logprobs[written], atol=TOLERANCE)
        other = recompute(kept[0], by_version[kept[-1]].tokens, by_version[kept[-1]].loss_mask)
        assert other is not None
        last = by_version[kept[-1]]
        assert np.nanmax(np.abs(other - last.logprobs)) > TOLERANCE  # versions differ
        assert recompute(Version(0, 1), last.tokens, last.loss_mask) is None
        assert recompute(Version(7, 0), last.tokens, last.loss_mask) is None
        assert recompute(kept[0], np.array([1, 9_999], np.int32), np.array([0, 1], np.int8)) is None
