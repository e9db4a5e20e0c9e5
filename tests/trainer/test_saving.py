"""Saving beside training: what is written is the moment of the call, failures surface, and a save
is waited for where it must be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from connectors.config import ConfigError
from connectors.config.lora import Lora
from connectors.kafka.client import Cluster
from connectors.kafka.topics import ensure_topics
from tests.trainer.training import open_engine, train
from trainer import written_by
from trainer.checkpoint import CheckpointFailed, CheckpointStore
from trainer.engine import TrainingEngine
from trainer.saving import Fence, Saver
from trainer.state_copy import StateCopy
from trainer.step_log import StepLog


class Numbers:
    """An engine whose state is one number."""

    def __init__(self) -> None:
        self.state = torch.zeros(3)

    def capture(self, into: StateCopy | None = None) -> StateCopy:
        captured = into or StateCopy()
        captured.clear()
        captured.add("state.pt", {"n": self.state})
        return captured

    def environment(self) -> dict[str, str]:
        return {"ranks": "1", "zero_stage": "2", "dtype": "float32", "lora": "none"}


class Gate:
    """Holds a save at a stage until it is opened."""

    def __init__(self, stage: str) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._stage = stage

    def __call__(self, stage: str) -> None:
        if stage == self._stage:
            self.reached.set()
            assert self.opened.wait(60)


def saved(store: CheckpointStore, step: int) -> list[float]:
    folder, _ = store.read(step)
    numbers: list[float] = torch.load(folder / "state.pt")["n"].tolist()
    return numbers


def test_training_goes_on_while_the_moment_of_the_call_is_written(tmp_path: Path) -> None:
    gate, engine = Gate("staged"), Numbers()
    store = CheckpointStore(tmp_path, at=gate)
    saver = Saver(store, engine)
    saver.save(1, b"meta")
    assert gate.reached.wait(60)
    engine.state += 1.0  # the next step
    assert store.steps() == []
    gate.opened.set()
    saver.wait()
    assert saved(store, 1) == [0.0, 0.0, 0.0]
    assert store.meta(1) == b"meta"
    assert saver.write_s > 0


def test_a_save_waits_for_the_one_before_and_says_what_that_cost(tmp_path: Path) -> None:
    gate, engine = Gate("staged"), Numbers()
    store = CheckpointStore(tmp_path, at=gate)
    saver = Saver(store, engine)
    saver.save(1, b"")
    assert gate.reached.wait(60)
    engine.state += 1.0
    threading.Timer(0.3, gate.opened.set).start()
    saver.save(2, b"")
    assert saver.pause_s > 0.25
    saver.wait()
    assert (saved(store, 1), saved(store, 2)) == ([0.0] * 3, [1.0] * 3)


def test_a_failed_save_is_raised_at_the_next_call(tmp_path: Path) -> None:
    store, engine = CheckpointStore(tmp_path / "store"), Numbers()
    store.clean()
    saver = Saver(store, engine)
    saver.check()
    (tmp_path / "store").rmdir()
    (tmp_path / "store").write_text("no folder any more")
    saver.save(1, b"")
    with pytest.raises(CheckpointFailed, match="step 1 could not be written"):
        saver.wait()
    for again in (saver.check, saver.wait, lambda: saver.save(2, b"")):
        with pytest.raises(CheckpointFailed):
            again()
    saver.close()  # says nothing more


def test_a_checkpoint_of_other_ranks_or_stage_is_refused_in_words_of_the_configuration(
    tmp_path: Path,
) -> None:
    store, engine = CheckpointStore(tmp_path), Numbers()
    saver = Saver(store, engine)
    saver.save(7, b"")
    saver.wait()
    folder, _ = store.read(7)
    here = engine.environment()
    written_by.check(folder, here, 7)
    with pytest.raises(ConfigError) as refused:
        written_by.check(folder, here | {"ranks": "4", "zero_stage": "3"}, 7)
    assert str(refused.value).startswith(
        "the checkpoint of step 7 was saved with trainer.num_ranks = 1, trainer.zero_stage = 2; "
        "this configuration says trainer.num_ranks = 4, trainer.zero_stage = 3"
    )
    with pytest.raises(ConfigError, match=r"trainer\.lora = none; .* trainer\.lora = rank=4 "):
        written_by.check(folder, here | {"lora": str(Lora(rank=4))}, 7)


def test_what_a_checkpoint_of_an_earlier_version_does_not_say_is_not_compared(
    tmp_path: Path,
) -> None:
    (tmp_path / "ranks.json").write_text('{"ranks": "1", "zero_stage": "2", "dtype": "float32"}')
    written_by.check(tmp_path, Numbers().environment(), 7)
    with pytest.raises(ConfigError, match="zero_stage"):
        written_by.check(tmp_path, Numbers().environment() | {"zero_stage": "3"}, 7)


def test_what_others_captured_is_written_with_it_and_waited_for(tmp_path: Path) -> None:
    seen: list[str] = []

    def others(folder: Path) -> Callable[[], None]:
        seen.append("begun")
        return lambda: seen.append(f"waited for {sorted(f.name for f in folder.iterdir())}")

    copy = StateCopy(others)
    copy.add("x.pt", torch.zeros(2))
    copy.add_text("note.json", "{}")
    copy.write(tmp_path)
    assert seen == ["begun", "waited for ['note.json', 'x.pt']"]
    assert (tmp_path / "note.json").read_text() == "{}"


def test_what_follows_a_save_runs_after_it_and_its_failure_is_raised_too(tmp_path: Path) -> None:
    store, seen = CheckpointStore(tmp_path), []

    def on_saved() -> None:
        seen.append(store.steps())
        raise KeyError("a bug")

    saver = Saver(store, Numbers(), on_saved=on_saved)
    saver.save(1, b"")
    with pytest.raises(KeyError):
        saver.wait()
    assert seen == [[1]]


def test_tied_tensors_are_copied_once_and_the_memory_is_used_again(tmp_path: Path) -> None:
    tied = torch.arange(4.0)
    state = {"a": tied, "b": [tied, tied[:2]], "c": ("text", {"lr": 0.1})}
    copy = StateCopy()
    for value in (1.0, 2.0):
        tied.fill_(value)
        copy.clear()
        copy.add("x.pt", state)
        assert copy.num_bytes == 4 * 4 + 2 * 4
        tied.fill_(9.0)
        copy.write(tmp_path)
        read = torch.load(tmp_path / "x.pt")
        assert torch.equal(read["a"], torch.full((4,), value))
        assert torch.equal(read["b"][1], torch.full((2,), value))
        assert read["c"] == state["c"]
    before = copy._buffers[0].data_ptr()
    copy.clear()
    copy.add("x.pt", state)
    assert copy._buffers[0].data_ptr() == before


def test_what_lies_where_something_freed_lay_is_copied_for_itself(tmp_path: Path) -> None:
    copy = StateCopy()
    for value in range(20):
        copy.add(f"{value}.pt", {"x": torch.full((4096,), float(value))})
    copy.wait()
    copy.write(tmp_path)
    found = [torch.load(tmp_path / f"{value}.pt")["x"][0].item() for value in range(20)]
    assert found == list(range(20))


@pytest.fixture
def engine(tiny_model_path: Path) -> Iterator[TrainingEngine]:
    engine = open_engine(tiny_model_path)
    yield engine
    engine.close()


def test_an_engine_saved_beside_training_loads_bit_for_bit(
    engine: TrainingEngine, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path)
    saver = Saver(store, engine)
    train(engine, 1)
    digest = engine.digest()
    saver.save(1, b"")
    straight = []
    for step in (2, 3):
        train(engine, step)
        straight.append((engine.digest(), float(torch.rand(()))))
    saver.wait()
    engine.load(store.read(1)[0])
    assert engine.digest() == digest
    again = []
    for step in (2, 3):
        train(engine, step)
        again.append((engine.digest(), float(torch.rand(()))))
    assert again == straight


def test_a_trainer_is_current_until_a_newer_one_begins(cluster: Cluster) -> None:
    ensure_topics(cluster, {"steps": 1, "policy": 1})
    log = StepLog(cluster)
    fence = Fence(cluster, log.begin(0))
    assert fence.is_current()
    log.begin(0)
    assert not fence.is_current()
    log.close()


def test_a_fenced_trainer_retires_nothing(tmp_path: Path) -> None:
    store, current = CheckpointStore(tmp_path, keep=1), [True, True, False]
    saver = Saver(store, Numbers(), may_retire=lambda: current.pop(0))
    for step in (1, 2, 3):
        saver.save(step, b"")
    saver.wait()
    assert store.steps() == [2, 3]
