"""The checkpoint store, killed at every stage and damaged in every way."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from connectors.config import ConfigError
from trainer.checkpoint import STAGES, CheckpointFailed, CheckpointStore, CorruptCheckpoint
from trainer.places import local_folder


def writes(text: str) -> Callable[[Path], None]:
    """A `write` that leaves two files, one of them in a sub-folder."""

    def write(folder: Path) -> None:
        (folder / "weights").write_text(text * 1000)
        (folder / "optimizer").mkdir()
        (folder / "optimizer" / "rank_0").write_text(text)

    return write


def contents(store: CheckpointStore, step: int) -> tuple[str, str, bytes]:
    state, meta = store.read(step)
    return (state / "weights").read_text(), (state / "optimizer" / "rank_0").read_text(), meta


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "store", keep=2)
    store.clean()
    return store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where `store` lies."""
    return tmp_path / "store"


def test_what_was_saved_is_read_back(store: CheckpointStore) -> None:
    assert store.newest() is None
    assert store.steps() == []
    store.save(3, writes("a"), b"\x00meta\xff")
    assert store.newest() == 3
    assert contents(store, 3) == ("a" * 1000, "a", b"\x00meta\xff")


def test_only_the_newest_are_kept(store: CheckpointStore) -> None:
    for step in (1, 2, 5, 9):
        store.save(step, writes(str(step)), b"")
    assert store.steps() == [5, 9]
    assert sorted(entry.name for entry in Path(store.url).iterdir()) == [
        "step-00000005",
        "step-00000009",
    ]


def test_a_later_checkpoint_of_an_abandoned_run_never_displaces_the_one_just_saved(
    store: CheckpointStore,
) -> None:
    store.save(20, writes("a"), b"")
    store.save(30, writes("a"), b"")
    store.save(11, writes("b"), b"")
    assert store.steps() == [11, 20, 30]


def test_saving_a_step_again_replaces_it(store: CheckpointStore) -> None:
    store.save(4, writes("a"), b"1")
    store.save(4, writes("b"), b"2")
    assert store.steps() == [4]
    assert contents(store, 4) == ("b" * 1000, "b", b"2")


CRASHER = """
import os, signal, sys
from pathlib import Path
from trainer.checkpoint import CheckpointStore

root, crash_at, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def at(stage):
    if stage == crash_at:
        os.kill(os.getpid(), signal.SIGKILL)

def write(folder):
    (folder / "optimizer").mkdir()
    (folder / "weights").write_text("new" * 1000)
    (folder / "optimizer" / "rank_0").write_text("new")

CheckpointStore(root, keep=2, at=at).save(step, write, b"new")
"""


REPLACING = [(stage, 2) for stage in STAGES if stage not in ("retiring", "uploading")]
ADDING = [(stage, 3) for stage in STAGES if stage not in ("set_aside", "uploading")]


@pytest.mark.parametrize(("stage", "step"), REPLACING + ADDING)
def test_killed_at_any_stage_a_whole_checkpoint_is_left(
    store: CheckpointStore, stage: str, step: int
) -> None:
    for old in (1, 2):
        store.save(old, writes("old"), b"old")

    killed = subprocess.run(
        [sys.executable, "-c", CRASHER, store.url, stage, str(step)],
        cwd=Path(__file__).parents[2],
    )
    assert killed.returncode == -signal.SIGKILL

    after = CheckpointStore(store.url, keep=2)
    after.clean()
    newest = after.newest()
    published = STAGES.index(stage) >= STAGES.index("published")
    text = "new" if published else "old"
    assert newest == (step if published else 2)
    assert contents(after, newest) == (text * 1000, text, text.encode())
    assert not [entry for entry in Path(store.url).iterdir() if entry.name.startswith(".")]
    after.save(7, writes("next"), b"next")
    assert contents(after, 7) == ("next" * 1000, "next", b"next")


def test_reading_leaves_a_save_in_progress_alone(store: CheckpointStore) -> None:
    seen = []

    def write(folder: Path) -> None:
        writes("a")(folder)
        seen.append(CheckpointStore(store.url).newest())

    store.save(1, write, b"")
    assert seen == [None]
    assert store.newest() == 1


def truncate(folder: Path) -> None:
    os.truncate(folder / "state" / "weights", 999)


def remove(folder: Path) -> None:
    (folder / "state" / "optimizer" / "rank_0").unlink()


def flip(folder: Path) -> None:
    file = folder / "state" / "weights"
    data = bytearray(file.read_bytes())
    data[500] ^= 1
    file.write_bytes(data)


def flip_meta(folder: Path) -> None:
    (folder / "meta").write_bytes(b"nex")


def cut_contents(folder: Path) -> None:
    os.truncate(folder / "contents.json", 20)


def remove_contents(folder: Path) -> None:
    (folder / "contents.json").unlink()


def borrow_contents(folder: Path) -> None:
    other = folder.with_name("step-00000001") / "contents.json"
    (folder / "contents.json").write_bytes(other.read_bytes())


def folder_for_contents(folder: Path) -> None:
    (folder / "contents.json").unlink()
    (folder / "contents.json").mkdir()


def file_for_state(folder: Path) -> None:
    shutil.rmtree(folder / "state")
    (folder / "state").write_text("")


@pytest.mark.parametrize(
    "damage",
    [
        truncate, remove, flip, flip_meta, cut_contents, remove_contents, borrow_contents,
        folder_for_contents, file_for_state,
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_named_and_passed_over(
    store: CheckpointStore, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    store.save(1, writes("old"), b"old")
    store.save(2, writes("new"), b"new")
    damage(Path(store.url) / "step-00000002")
    with caplog.at_level(logging.WARNING):
        assert store.newest() == 1
    assert "step-00000002" in caplog.text
    assert contents(store, 1) == ("old" * 1000, "old", b"old")
    with pytest.raises(CorruptCheckpoint, match="step-00000002"):
        store.read(2)


def test_a_checkpoint_of_a_line_that_was_given_up_does_not_count_among_those_kept(
    store: CheckpointStore,
) -> None:
    for step in (1, 2, 3):  # keep=2: 2 and 3 stay
        store.save(step, writes("a"), b"")
    store.pass_over({3})
    store.save(4, writes("b"), b"")
    assert store.steps() == [2, 4]
    store.save(3, writes("b"), b"")  # on the line again
    store.save(5, writes("b"), b"")
    assert store.steps() == [4, 5]


def test_what_only_its_checksum_shows_to_be_damaged_does_not_count_once_it_was_read(
    store: CheckpointStore,
) -> None:
    store.save(1, writes("a"), b"")
    store.save(2, writes("b"), b"")
    Path(store.url, "step-00000002", "state", "weights").write_text("c" * 1000)
    assert store.steps() == [1, 2]
    with pytest.raises(CorruptCheckpoint, match="differs from its checksum"):
        store.read(2)
    assert store.steps() == [1]
    store.save(3, writes("c"), b"")
    assert store.steps() == [1, 3]


def test_a_damaged_checkpoint_does_not_count_among_those_kept(store: CheckpointStore) -> None:
    store.save(1, writes("a"), b"")
    store.save(2, writes("b"), b"")
    remove(Path(store.url) / "step-00000002")
    store.save(3, writes("c"), b"")
    assert store.steps() == [1, 3]


def test_a_full_disk_fails_clearly_and_leaves_earlier_checkpoints(store: CheckpointStore) -> None:
    store.save(1, writes("a"), b"a")

    def write(folder: Path) -> None:
        writes("b")(folder)
        with open("/dev/full", "w") as full:
            full.write("x")

    with pytest.raises(CheckpointFailed, match=r"step 2 .*No space left on device.*MiB are free"):
        store.save(2, write, b"b")
    assert [entry.name for entry in Path(store.url).iterdir()] == ["step-00000001"]
    assert contents(store, 1) == ("a" * 1000, "a", b"a")


FILLER = """
import resource, sys, torch
from trainer.checkpoint import CheckpointFailed, CheckpointStore

resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    CheckpointStore(sys.argv[1]).save(2, lambda f: torch.save(torch.ones(10_000), f / "w"), b"")
except CheckpointFailed as error:
    print(error)
"""


def test_torch_running_out_of_space_is_the_same_failure(store: CheckpointStore) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FILLER, store.url],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("the checkpoint of step 2 could not be written"), done.stderr
    assert list(Path(store.url).iterdir()) == []


def test_a_bug_in_the_writer_is_not_disguised_as_a_failed_disk(store: CheckpointStore) -> None:
    def write(folder: Path) -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        store.save(1, write, b"")
    assert list(Path(store.url).iterdir()) == []


def test_a_writer_whose_staging_folder_was_cleaned_by_a_newer_one_fails(
    store: CheckpointStore,
) -> None:
    def write(folder: Path) -> None:
        writes("a")(folder)
        CheckpointStore(store.url).clean()

    with pytest.raises(CheckpointFailed, match="as a newer trainer does"):
        store.save(1, write, b"")
    assert store.newest() is None


def test_a_path_or_a_file_url_is_a_local_folder() -> None:
    assert local_folder("runs/a/checkpoints") == Path("runs/a/checkpoints")
    assert local_folder("file:///tmp/a%20b") == Path("/tmp/a b")
    assert local_folder("s3://bucket/x") is None


@pytest.mark.parametrize("url", ["file://elsewhere/x", "nosuch://bucket/x"])
def test_a_url_nobody_can_open_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=f"checkpoint.url.*{url}"):
        CheckpointStore(url)


def test_young_checkpoints_stay_beside_the_newest(tmp_path: Path) -> None:
    now = 0.0
    store = CheckpointStore(tmp_path / "a", keep=2, keep_for_s=100.0, clock=lambda: now)
    for step in range(1, 9):
        now = step * 30.0
        store.save(step, writes(str(step)), b"")
    assert store.steps() == [5, 6, 7, 8]  # 5 is 90 s old, 4 is 120 s
    now = 10_000.0
    store.save(9, writes("9"), b"")
    assert store.steps() == [8, 9]


def test_a_writer_that_may_not_retire_keeps_everything(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        store.save(step, writes("a"), b"", may_retire=lambda: False)
    assert store.steps() == [1, 2, 3]


def test_the_meta_is_read_without_the_state(store: CheckpointStore, folder: Path) -> None:
    store.save(1, writes("a"), b"offsets")
    flip(folder / "step-00000001")
    assert store.meta(1) == b"offsets"
    flip_meta(folder / "step-00000001")
    with pytest.raises(CorruptCheckpoint, match="meta"):
        store.meta(1)
