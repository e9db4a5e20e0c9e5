"""Two ranks with the real engine: they read their shares of each step from the log, train, publish,
checkpoint beside training, resume bit for bit, and say when one is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pytest
from transformers import AutoModelForCausalLM

from connectors import weights
from connectors.arrow import checksum, encode_group
from connectors.config import Config, ConfigError, parse
from connectors.kafka.client import Cluster, Producer
from connectors.kafka.locate import topics
from connectors.kafka.topics import ensure_topics
from connectors.records import HEADER_CRC, HEADER_KIND, Coordinate, Group, Version
from connectors.run_dir import RunDir
from tests.trainer.groups import trainable_group
from trainer import gang, written_by
from trainer.checkpoint import CheckpointStore
from trainer.engine import TrainingEngine
from trainer.execute import execute
from trainer.gang import RankDied
from trainer.saving import Saver
from trainer.shares import Call, Train

T = TypeVar("T")
Step = tuple[Sequence[Group], Sequence[Coordinate]]


def config(model: Path, num_ranks: int = 2, **trainer: Any) -> Config:
    table = {
        "model": {"path": str(model), "context_tokens": 64},
        "tasks": {"a": {"reward": "exact_match", "group_size": 2}},
        "trainer": {"learning_rate": 1e-3, "num_ranks": num_ranks, **trainer},
    }
    return parse(table, base_dir="")


def written(cluster: Cluster, num_steps: int, num_groups: int = 4) -> list[Step]:
    """Groups in the log's `trajectories`, by the step that trains them."""
    ensure_topics(cluster, topics(1))
    steps: list[Step] = []
    with closing(Producer(cluster)) as producer:
        for step in range(num_steps):
            groups, records = [], []
            for k in range(num_groups):
                offset = step * num_groups + k
                group_id = f"{cluster.topic('prompts')}/0/{offset}"
                group = trainable_group(group_id, Version(0, 0), seed=offset)
                value = encode_group(group)
                at = producer.append(
                    cluster.topic("trajectories"),
                    0,
                    value,
                    key=group_id.encode(),
                    headers={HEADER_KIND: "group", HEADER_CRC: f"{checksum(value):08x}"},
                )
                groups.append(group)
                records.append(
                    Coordinate(partition=0, offset=at, crc=checksum(value), group_id=group_id)
                )
            steps.append((groups, records))
    return steps


def train(engine: TrainingEngine, settings: Config, steps: Sequence[Step]) -> list[str]:
    """The digest after each."""
    digests = []
    for groups, records in steps:
        done = execute(engine, groups, settings.trainer, records[0].offset, records=records)
        assert done.skipped is None
        assert set(done.ranks) == {0, 1}
        digests.append(engine.digest())
    return digests


def other_rank(engine: TrainingEngine) -> int:
    assert engine._gang is not None
    return engine._gang._ranks[1].process.pid


def alone(session: Callable[..., T], *arguments: Any) -> T:
    """In a process of its own, as rank 0 of a run is."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(session, *arguments).result()


def save_beside(settings: Config, cluster: Cluster, folder: Path, steps: Sequence[Step]) -> Any:
    """Digests: at the start, after each step, and of the last snapshot. The first step is saved,
    the last one exported."""
    with gang.engine(settings, cluster, RunDir(folder)) as engine:
        saver = Saver(CheckpointStore(folder / "store"), engine)
        digests = [engine.digest(), *train(engine, settings, steps[:1])]
        saver.save(1, b"")
        digests += train(engine, settings, steps[1:])  # while the files are being written
        saver.wait()
        engine.save_pretrained(folder)
        snapshot = engine.snapshot()
        return [*digests, snapshot.digest], snapshot.plan


def resume(settings: Config, cluster: Cluster, folder: Path, steps: Sequence[Step]) -> Any:
    """Digests: loaded, and after each step; and why others could not load it."""
    state, _ = CheckpointStore(folder / "store").read(1)
    with gang.engine(settings, cluster, RunDir(folder)) as engine:
        refusals = []
        for other in ({}, {"ranks": "1"}, {"zero_stage": "2"}):
            try:
                written_by.check(state, {**engine.environment(), **other}, 1)
            except ConfigError as error:
                refusals.append(str(error))
        engine.load(state)
        return [engine.digest(), *train(engine, settings, steps)], refusals


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_ranks_resume_bit_for_bit_from_what_they_saved_beside_training(
    zero_stage: int, cluster: Cluster, tiny_model_path: Path, tmp_path: Path
) -> None:
    settings = config(tiny_model_path, zero_stage=zero_stage)
    steps = written(cluster, num_steps=3)
    digests, plan = alone(save_beside, settings, cluster, tmp_path, steps)
    *changing, last, snapshot = digests
    assert len({*changing, last}) == 4
    assert snapshot == last
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert weights.digest(model.named_parameters(), plan) == last
    again, refusals = alone(resume, settings, cluster, tmp_path, steps[1:])
    assert again == digests[1:4]
    assert [text.split(";")[0] for text in refusals] == [
        "the checkpoint of step 1 was saved with trainer.num_ranks = 2",
        f"the checkpoint of step 1 was saved with trainer.zero_stage = {zero_stage}",
    ]


def test_a_rank_that_is_killed_within_a_step_is_what_the_step_fails_of(
    cluster: Cluster, tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tiny_model_path)
    ((groups, records),) = written(cluster, num_steps=1)
    with (  # noqa: PT012
        pytest.raises(RankDied, match="rank 1 of the trainer was ended by SIGKILL"),
        gang.engine(settings, cluster, RunDir(tmp_path)) as engine,
    ):
        assert engine._gang is not None
        tell_each = engine._gang.tell_each

        def tell_then_kill(calls: Mapping[int, Call]) -> None:
            tell_each(calls)
            if isinstance(calls[1], Train):
                os.kill(other_rank(engine), signal.SIGKILL)

        monkeypatch.setattr(engine._gang, "tell_each", tell_then_kill)
        execute(engine, groups, settings.trainer, 0, records=records)


def test_a_rank_that_reads_other_rows_says_so_before_it_trains(
    cluster: Cluster, tiny_model_path: Path, tmp_path: Path
) -> None:
    settings = config(tiny_model_path)
    (first, (_, other)) = written(cluster, num_steps=2)
    with (
        pytest.raises(RankDied, match=r"rank 1 of the trainer failed: SharesDiffer: .*checksum"),
        gang.engine(settings, cluster, RunDir(tmp_path)) as engine,
    ):
        execute(engine, first[0], settings.trainer, 0, records=other)
