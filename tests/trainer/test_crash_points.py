"""A trainer killed between any two of its acts, and one that goes on elsewhere: real processes, a
real engine and log."""

from __future__ import annotations

import multiprocessing
import urllib.request
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec
import pytest
import torch

from connectors.engines.types import EngineState
from connectors.kafka.client import Cluster
from connectors.records import Fork, Version
from tests.connectors.engine_process import EngineProcess
from tests.trainer.crashing import CrashingRun
from trainer.checkpoint import CheckpointStore
from trainer.checkpoint_meta import CheckpointMeta
from trainer.engine import TrainingEngine
from trainer.reexecute import reexecute

WAIT_S = 120.0


@pytest.fixture
def engine(tmp_path: Path, tiny_model_path: Path) -> Iterator[str]:
    process = EngineProcess(tmp_path / "engine", tiny_model_path, context_tokens=64)
    yield process.url
    process.stop()


@pytest.fixture
def run(
    cluster: Cluster, tiny_model_path: Path, tmp_path: Path, engine: str
) -> Iterator[CrashingRun]:
    made = CrashingRun(cluster, tiny_model_path, tmp_path / "run", [engine])
    yield made
    made.close()


def ended(process: BaseProcess) -> int | None:
    process.join(WAIT_S)
    return process.exitcode


def state_of(url: str) -> EngineState:
    with urllib.request.urlopen(f"{url}/state", timeout=30) as answer:
        return msgspec.json.decode(answer.read(), type=EngineState)


def test_whatever_the_trainer_did_last_the_next_one_comes_to_the_same_and_trains_nothing_twice(
    run: CrashingRun, engine: str
) -> None:
    """Never a checkpoint, so each trainer executes everything again from the first step on."""
    for crash in ("trained", "recorded", "held", "announced"):
        assert ended(run.start(100, crash=crash, nth=2)) == -9
    last = run.chain.step + 2
    assert ended(run.start(last)) == 0

    chain = run.chain
    assert (chain.step, chain.breaks, chain.lineage) == (last, [], {})
    trained = Counter(r.group_id for m in chain.manifests for r in m.records)
    assert set(trained.values()) == {1}
    offsets = sorted(int(group_id.rsplit("/", 1)[1]) for group_id in trained)
    assert offsets == list(range(2 * last)), "in the order of the grants, none left out"
    assert not any(m.dropped for m in chain.manifests)
    assert max(m.staleness["max"] for m in chain.manifests) <= 1
    held = state_of(engine)
    assert (held.version, held.digest) == (Version(0, last), chain.manifests[-1].digest)
    with closing(TrainingEngine.of(run.config)) as fresh:
        again = reexecute(run.config, run.cluster, fresh, chain.manifests, {})
        assert len(deque(again)) == last


@pytest.mark.slow
def test_a_trainer_that_goes_on_with_other_bits_opens_a_rebuild_and_saves_it_at_once(
    run: CrashingRun, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other machine is this one without its vector instructions."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this machine has no vector instructions to do without")
    assert ended(run.start(100, crash="recorded", nth=3)) == -9
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    other = multiprocessing.get_context("spawn")
    assert ended(run.start(100, crash="recorded", nth=2, context=other)) == -9

    chain = run.chain
    assert [m.version for m in chain.manifests] == [
        *(Version(0, n) for n in (1, 2, 3)),
        *(Version(1, n) for n in (4, 5)),
    ]
    assert chain.lineage == {1: Fork(parent=0, number=3, reason="rebuild")}
    assert chain.manifests[3].digest_before != chain.manifests[2].digest
    store = CheckpointStore(run.run_dir.checkpoints, keep=1)
    assert store.steps() == [3]
    meta = msgspec.json.decode(store.read(3)[1], type=CheckpointMeta)
    assert (meta.version, meta.digest) == (Version(1, 3), chain.manifests[3].digest_before)
    (line,) = [
        line
        for line in (run.run_dir.path / "trainer.log").read_text().splitlines()
        if "rebuild" in line
    ]
    assert f"here step 3 ends at {meta.digest}; incarnation 1 goes on from it" in line

    assert ended(run.start(7)) == 0, "back on this machine: a second rebuild"
    chain = run.chain
    assert chain.lineage[2] == Fork(parent=1, number=5, reason="rebuild")
    assert chain.breaks == []
    trained = Counter(r.group_id for m in chain.manifests for r in m.records)
    assert set(trained.values()) == {1}
    assert max(m.staleness["max"] for m in chain.manifests) <= 1
    held = state_of(engine)
    assert (held.version, held.digest) == (Version(2, 7), chain.manifests[-1].digest)
