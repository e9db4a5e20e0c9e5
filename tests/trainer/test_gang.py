"""Ranks in processes of their own: told in order, heard when they fail, never left behind. Their
engine is a stub here; with the real one: `test_ranks_train.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.stub_rank import NO_LOG, PROGRAM, config
from trainer import gang as gang_module
from trainer.checkpoint import CheckpointStore
from trainer.gang import Gang, RankDied
from trainer.shares import Capture, Digest, Load, Pretrained, Take

Start = Callable[..., Gang]
DEADLINE_S = 60.0


def wait_until(done: Callable[[], bool], limit_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang]:
    """Of two other ranks, which no test ends."""
    logs = tmp_path_factory.mktemp("logs")
    gang = Gang(config(3), NO_LOG, lambda k: logs / f"{k}.log", program=PROGRAM)
    gang.wait_ready()
    yield gang
    gang.close()
    assert [process(gang, rank).returncode for rank in (1, 2)] == [0, 0]
    gang.close()  # nothing more
    gang.tell(Take())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Gang] = []

    def started(num_ranks: int = 2, **trainer: Any) -> Gang:
        logs = tmp_path / "logs"
        gang = Gang(
            config(num_ranks, **trainer), NO_LOG, lambda k: logs / f"{k}.log", program=PROGRAM
        )
        made.append(gang)
        gang.wait_ready()
        return gang

    yield started
    for gang in made:
        gang.kill()


def process(gang: Gang, rank: int = 1) -> subprocess.Popen[bytes]:
    return gang._ranks[rank].process


def told(folder: Path, rank: int) -> list[str]:
    """What the stub was told; it says so when told Pretrained."""
    wait_until((folder / str(rank)).exists)
    return (folder / str(rank)).read_text().splitlines()


def test_every_rank_is_told_the_same_in_order(gang: Gang, tmp_path: Path) -> None:
    for call in (Take(), Load("x"), Digest(), Capture(), Pretrained(str(tmp_path))):
        gang.tell(call)
    for rank in (1, 2):
        *seen, _, model = told(tmp_path, rank)
        assert seen[-4:] == ["part", "x", "part", "capture"]
        assert model == "/somewhere/model"


def test_a_rank_that_fails_says_why(start: Start, tmp_path: Path) -> None:
    gang = start()
    gang.tell(Load("fail 1"))
    wait_until(lambda: process(gang).poll() is not None)
    wait_until(lambda: bool(gang._gone))
    for again in (gang.check, lambda: gang.tell(Take())):
        with pytest.raises(RankDied, match=r"^rank 1 of the trainer failed: ValueError: of rank 1"):
            again()
    assert "Traceback" in (tmp_path / "logs/1.log").read_text()


@pytest.mark.parametrize("how", ["killed", "exited"])
def test_a_rank_that_could_say_nothing_leaves_its_end_and_its_last_lines(
    start: Start, how: str
) -> None:
    gang = start()
    if how == "killed":
        process(gang).kill()
    else:
        gang.tell(Load("exit"))
    wait_until(lambda: bool(gang._gone))
    said = "was ended by SIGKILL" if how == "killed" else r"ended with 7.*before the exit"
    with pytest.raises(RankDied, match=rf"rank 1 of the trainer {said}.*1\.log"):
        gang.check()


def test_a_rank_that_does_not_come_up_is_told_at_the_start(tmp_path: Path) -> None:
    gang = Gang(config(2), NO_LOG, lambda k: tmp_path / "log", program="no.such.module")
    with closing(gang), pytest.raises(RankDied, match=r"ended with 1; the last it said is: .*no"):
        gang.wait_ready()


# ----------------------------------------------------------------------------------- checkpoints
def test_files_are_written_beside_what_a_rank_is_told(gang: Gang, tmp_path: Path) -> None:
    gang.tell(Capture())
    gang.tell(Load(f"{tmp_path}/busy 1"))
    gang.write(tmp_path)()
    for rank in (1, 2):
        assert "told" in torch.load(tmp_path / f"rank_{rank}.pt")
    (tmp_path / "free").touch()


def test_what_a_rank_could_not_write_is_said_and_does_not_end_it(
    gang: Gang, tmp_path: Path
) -> None:
    gang.tell(Capture())
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(RuntimeError, match=r"^rank 1: .*Error"):
        gang.write(tmp_path / "file")()
    gang.write(tmp_path)()
    assert (tmp_path / "rank_1.pt").exists()
    gang.check()


def test_a_rank_that_does_not_write_in_time_is_named(
    gang: Gang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang_module, "WRITE_S", 0.2)
    gang.tell(Capture())
    (tmp_path / "slow").touch()
    with pytest.raises(RuntimeError, match="rank 1 has not written in 0 s"):
        gang.write(tmp_path)()
    monkeypatch.undo()
    (tmp_path / "slow").unlink()  # its answer comes late, and is not that of the next write
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(RuntimeError, match=r"rank 1: .*Error"):
        gang.write(tmp_path / "file")()


def test_a_rank_that_is_killed_while_it_writes_fails_the_write(
    start: Start, tmp_path: Path
) -> None:
    gang = start()
    gang.tell(Capture())
    (tmp_path / "slow").touch()
    wait_written = gang.write(tmp_path)
    process(gang).kill()
    with pytest.raises(RankDied, match="SIGKILL"):
        wait_written()


@pytest.mark.parametrize(
    ("stage", "victim", "last"),
    [("writing", 0, 1), ("writing", 2, 1), ("written", 0, 1), ("published", 0, 2)],
)
def test_a_kill_at_any_stage_of_a_save_leaves_the_last_checkpoint_whole(
    stage: str, victim: int, last: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-P", "-m", PROGRAM, "save", stage, str(victim), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if victim == 0:
        assert done.returncode == -signal.SIGKILL, done.stderr
    else:
        assert "RankDied: rank 2 of the trainer was ended by SIGKILL" in done.stderr
    store = CheckpointStore(tmp_path / "store")
    store.clean()
    assert store.newest() == last
    folder, _ = store.read(last)
    assert [int(torch.load(folder / f"rank_{k}.pt")["told"]) for k in range(3)] == [last - 1] * 3


# ---------------------------------------------------------------------------------------- errors
def test_an_error_that_the_end_of_a_rank_explains_becomes_that(start: Start) -> None:
    gang = start()
    with pytest.raises(RankDied, match="SIGKILL") as found, gang.watched():  # noqa: PT012
        process(gang).kill()
        raise RuntimeError("Connection closed by peer")  # as gloo says it, maybe before anybody
    assert str(found.value.__cause__) == "Connection closed by peer"


def test_after_any_other_error_the_ranks_are_killed_and_it_stays_what_it_is(start: Start) -> None:
    gang = start()
    gang.tell(Load("busy"))
    with pytest.raises(KeyError), gang.watched():
        raise KeyError("a bug")
    assert process(gang).returncode == -signal.SIGKILL
    gang.check()
    gang.close()


# ------------------------------------------------------------------------------- ends of rank 0
def lead(how: str, folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A rank 0 in a session of its own, and the pids of its other ranks."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", PROGRAM, how, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_nothing_outlives_a_rank_0_that_is_killed(tmp_path: Path) -> None:
    process, pids = lead("busy", tmp_path)
    assert not any(map(is_gone, pids))
    process.kill()
    process.communicate()
    wait_until(lambda: all(map(is_gone, pids)), 2.0)


def test_sigterm_to_all_of_them_is_rank_0s_to_act_on(tmp_path: Path) -> None:
    process, pids = lead("until SIGTERM", tmp_path)
    os.killpg(process.pid, signal.SIGTERM)
    codes, error = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, codes.split()) == (0, ["0", "0"]), error
    assert all(map(is_gone, pids))
    assert "closed" in (tmp_path / "1.log").read_text()


def test_a_rank_0_that_cannot_hear_of_a_dead_rank_ends_by_itself(tmp_path: Path) -> None:
    process, pids = lead("deaf", tmp_path)
    os.kill(pids[1], signal.SIGKILL)
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "rank 2 of the trainer was ended by SIGKILL" in said
    wait_until(lambda: is_gone(pids[0]), 2.0)


# -------------------------------------------------------------------------------------- devices
@pytest.mark.parametrize(
    ("visible", "num_gpus", "expected"),
    [("4,5", 2, "5"), (None, 2, "1"), ("", 2, ""), ("4,5", 0, ""), (None, 0, "")],
)
def test_each_rank_sees_one_gpu_of_those_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, num_gpus: int, expected: str
) -> None:
    monkeypatch.delenv(gang_module.DEVICES, raising=False)
    if visible is not None:
        monkeypatch.setenv(gang_module.DEVICES, visible)
    assert gang_module._device(1, num_gpus) == expected


def test_a_rank_is_started_with_its_gpu(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(gang_module.DEVICES, "3,GPU-8f")
    gang = start(num_gpus=2)
    gang.tell(Pretrained(str(tmp_path)))
    assert told(tmp_path, 1)[0] == "gpus=GPU-8f"
