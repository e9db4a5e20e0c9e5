"""The trainer role with two ranks, one of which is killed: the role ends, and the next one comes to
the same weights. Real processes, a real engine and log."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from connectors.kafka.client import Cluster
from tests.connectors.engine_process import EngineProcess
from tests.trainer.crashing import CrashingRun

WAIT_S = 400.0


@pytest.fixture
def run(cluster: Cluster, tiny_model_path: Path, tmp_path: Path) -> Iterator[CrashingRun]:
    engine = EngineProcess(tmp_path / "engine", tiny_model_path, context_tokens=64)
    made = CrashingRun(
        cluster, tiny_model_path, tmp_path / "run", [engine.url], num_ranks=2, zero_stage=2
    )
    yield made
    made.close()
    engine.stop()


def test_a_rank_that_is_killed_ends_the_role_and_the_next_one_comes_to_the_same(
    run: CrashingRun,
) -> None:
    first = run.start(100)
    deadline = time.monotonic() + WAIT_S
    while run.chain.step < 2:
        assert first.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    children = psutil.Process(first.pid).children()
    (rank,) = [child for child in children if "trainer.worker" in child.cmdline()]
    rank.kill()
    first.join(WAIT_S)
    assert first.exitcode == 1
    assert not rank.is_running()
    before = run.chain
    second = run.start(before.step + 1)  # no checkpoint: it executes all of it again
    second.join(WAIT_S)
    assert second.exitcode == 0
    chain = run.chain
    assert (chain.step, chain.breaks, chain.lineage) == (before.step + 1, [], {})
    assert [m.digest for m in chain.manifests[:-1]] == [m.digest for m in before.manifests]
    assert all(set(m.ranks) == {0, 1} for m in chain.manifests)
    trained = Counter(record.group_id for m in chain.manifests for record in m.records)
    assert set(trained.values()) == {1}
