"""Checkpoints in an object store: a real S3 server, killed writers, damage, and what is refused."""

from __future__ import annotations

import http.server
import itertools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import msgspec
import pytest

from tests.trainer.s3_server import BUCKET, S3, s3_server
from tests.trainer.test_checkpoint import contents, writes
from trainer import object_place
from trainer.checkpoint import STAGES, CheckpointFailed, CheckpointStore, CorruptCheckpoint

PREFIXES = itertools.count()


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture
def prefix() -> str:
    """Of the test alone, within the bucket."""
    return f"runs/{next(PREFIXES)}"


def s3_store(s3: S3, prefix: str, tmp_path: Path, **settings: object) -> CheckpointStore:
    return CheckpointStore(
        f"s3://{BUCKET}/{prefix}", cache=tmp_path / "cache", options=s3.options, **settings
    )  # type: ignore[arg-type]


@pytest.fixture
def store(s3: S3, prefix: str, tmp_path: Path) -> CheckpointStore:
    store = s3_store(s3, prefix, tmp_path)
    store.clean()
    return store


@pytest.mark.parametrize("scheme", ["s3", "memory"])
def test_what_was_saved_is_read_back_and_only_the_newest_are_kept(
    scheme: str, s3: S3, prefix: str, tmp_path: Path
) -> None:
    store = s3_store(s3, prefix, tmp_path)
    if scheme == "memory":
        store = CheckpointStore(f"memory://{prefix}", cache=tmp_path / "cache")
    store.clean()
    assert (store.newest(), store.steps()) == (None, [])
    for step in (1, 2, 5):
        store.save(step, writes(str(step)), b"\x00meta\xff")
    assert store.steps() == [2, 5]
    assert contents(store, 5) == ("5" * 1000, "5", b"\x00meta\xff")
    assert store.meta(2) == b"\x00meta\xff"
    store.save(5, writes("again"), b"2")
    assert contents(store, 5) == ("again" * 1000, "again", b"2")
    store.save(4, writes("4"), b"")
    assert store.steps() == [2, 4, 5]


def test_nothing_but_the_kept_checkpoints_is_left_in_the_bucket(
    store: CheckpointStore, s3: S3, prefix: str, tmp_path: Path
) -> None:
    for step in (1, 2, 2, 3):
        store.save(step, writes(str(step)), b"m")
    kept = [key.removeprefix(f"{prefix}/").split("/") for key in s3.objects(prefix)]
    assert {folder for folder, *_ in kept} == {"step-00000002", "step-00000003"}
    assert len(kept) == 2 * 4  # contents.json, meta and two files of state
    assert not list((tmp_path / "cache").iterdir())


def test_a_copy_is_read_again_and_goes_when_nobody_does(
    store: CheckpointStore, s3: S3, prefix: str
) -> None:
    store.save(1, writes("a"), b"")
    first, _ = store.read(1)
    weights = next(key for key in s3.objects(prefix) if key.endswith("weights"))
    s3.put(weights, s3.get(weights))
    before = (first / "weights").stat().st_ino
    assert (store.read(1)[0] / "weights").stat().st_ino == before
    os.utime(first.parent, (0, 0))
    store.save(2, writes("b"), b"")
    assert not first.exists()


CRASHER = """
import os, signal, sys
from pathlib import Path
import msgspec, s3fs
from trainer.checkpoint import CheckpointStore

def write(folder):
    (folder / "optimizer").mkdir()
    (folder / "weights").write_text("new" * 1000)
    (folder / "optimizer" / "rank_0").write_text("new")

url, cache, options, cases = map(msgspec.json.decode, sys.argv[1:])
for prefix, crash_at, step in cases:
    def at(stage):
        if stage == crash_at:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        store = CheckpointStore(url + prefix, cache=Path(cache), options=options, at=at)
        store.save(step, write, b"new")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, (crash_at, step)
"""

KILLED = [
    (f"{stage}-{step}", stage, step)
    for stage in STAGES
    for step in (2, 3)  # replaces the newest, adds one
    if stage != "set_aside" and (stage, step) != ("retiring", 2)
]


@pytest.fixture(scope="module")
def killed(s3: S3, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores with steps 1 and 2, each left by a writer that was killed; the cache of all."""
    cache = tmp_path_factory.mktemp("killed")
    for prefix, _, _ in KILLED:
        store = CheckpointStore(f"s3://{BUCKET}/{prefix}", cache=cache, options=s3.options)
        for old in (1, 2):
            store.save(old, writes("old"), b"old")
    arguments = (f"s3://{BUCKET}/", str(cache), s3.options, KILLED)
    subprocess.run(
        [sys.executable, "-c", CRASHER, *(msgspec.json.encode(a).decode() for a in arguments)],
        cwd=Path(__file__).parents[2],
        check=True,
    )
    return cache


@pytest.mark.parametrize(("prefix", "stage", "step"), KILLED)
def test_killed_at_any_stage_a_whole_checkpoint_is_left(
    killed: Path, s3: S3, prefix: str, stage: str, step: int
) -> None:
    published = STAGES.index(stage) >= STAGES.index("published")
    reader = CheckpointStore(f"s3://{BUCKET}/{prefix}", cache=killed, options=s3.options)
    newest = step if published else 2
    text = "new" if published else "old"
    assert reader.newest() == newest
    reader.clean()
    assert contents(reader, newest) == (text * 1000, text, text.encode())
    assert len(s3.objects(f"{prefix}/")) == 4 * len(reader.steps())
    reader.save(7, writes("next"), b"next")
    assert contents(reader, 7) == ("next" * 1000, "next", b"next")


MEMORY = fsspec.filesystem("memory")


def cut(path: str) -> None:
    MEMORY.pipe_file(path, MEMORY.cat_file(path)[:-1])


def flip(path: str) -> None:
    data = bytearray(MEMORY.cat_file(path))
    data[0] ^= 1
    MEMORY.pipe_file(path, bytes(data))


@pytest.mark.parametrize("end", ["weights", "rank_0", "meta", "contents.json"])
@pytest.mark.parametrize("damage", [cut, flip, MEMORY.rm_file], ids=["cut", "flip", "remove"])
def test_a_damaged_checkpoint_is_passed_over(
    prefix: str,
    tmp_path: Path,
    damage: Callable[[str], None],
    end: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = CheckpointStore(f"memory://{prefix}", cache=tmp_path)
    store.save(1, writes("old"), b"old")
    store.save(2, writes("new"), b"new")
    (path,) = (p for p in MEMORY.find(f"{prefix}/step-00000002") if p.endswith(end))
    damage(path)
    with caplog.at_level(logging.WARNING):
        assert store.newest() == 1
    assert contents(store, 1) == ("old" * 1000, "old", b"old")
    with pytest.raises(CorruptCheckpoint, match="step-00000002"):
        store.read(2)
    if (damage, end) != (MEMORY.rm_file, "contents.json"):  # without it there is no checkpoint
        assert f"{store.url}/step-00000002" in caplog.text


def test_a_save_that_a_newer_writer_cleaned_away_fails(
    store: CheckpointStore, s3: S3, prefix: str, tmp_path: Path
) -> None:
    def newer_writer(stage: str) -> None:
        if stage == "uploading":
            s3_store(s3, prefix, tmp_path / "elsewhere").clean()

    slow = s3_store(s3, prefix, tmp_path, at=newer_writer)
    with pytest.raises(CheckpointFailed, match="as a newer trainer does"):
        slow.save(1, writes("a"), b"")
    assert store.steps() == []


def test_a_full_disk_under_the_local_copies_is_named(prefix: str, tmp_path: Path) -> None:
    store = CheckpointStore(f"memory://{prefix}", cache=tmp_path / "cache")
    store.save(1, writes("a"), b"a")

    def write(folder: Path) -> None:
        with open("/dev/full", "w") as full:
            full.write("x")

    full = r"step 2 .*No space left on device .*MiB are free in .*/cache"
    with pytest.raises(CheckpointFailed, match=full):
        store.save(2, write, b"b")
    assert contents(store, 1) == ("a" * 1000, "a", b"a")
    assert [p for p in MEMORY.find(prefix) if "step-00000002" in p] == []


# ----------------------------------------------------------------------------- what is refused
@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not answer is given up at once."""
    monkeypatch.setattr(object_place, "PATIENCE_S", 0.0)


def test_a_missing_bucket_is_named(s3: S3, tmp_path: Path) -> None:
    store = CheckpointStore("s3://nowhere/x", cache=tmp_path, options=s3.options)
    with pytest.raises(CheckpointFailed, match=r"s3://nowhere/x.*no such bucket") as failure:
        store.clean()
    assert "\n" not in str(failure.value)


def test_a_bucket_that_vanishes_fails_the_save_and_nothing_else(
    s3: S3, tmp_path: Path, impatient: None
) -> None:
    s3.client.create_bucket(Bucket="short-lived")
    store = CheckpointStore("s3://short-lived/x", cache=tmp_path, options=s3.options)
    store.clean()
    s3.client.delete_bucket(Bucket="short-lived")
    with pytest.raises(CheckpointFailed, match=r"step 1 .*s3://short-lived/x.*bucket"):
        store.save(1, writes("a"), b"")


class Denies(http.server.BaseHTTPRequestHandler):
    """An S3 server that lets nobody in."""

    def answer(self) -> None:
        body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer

    def log_message(self, *arguments: object) -> None:
        return None


def test_denied_access_is_named(s3: S3, tmp_path: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Denies)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = {**s3.options, "endpoint_url": f"http://127.0.0.1:{server.server_address[1]}"}
    store = CheckpointStore(f"s3://{BUCKET}/x", cache=tmp_path, options=options)
    started = time.monotonic()
    try:
        for refused in (store.clean, store.steps, lambda: store.save(1, writes("a"), b"")):
            with pytest.raises(CheckpointFailed, match=r"s3://bucket/x.*access is denied"):
                refused()
    finally:
        server.shutdown()
        server.server_close()
    assert time.monotonic() - started < object_place.PATIENCE_S  # it does not pass by itself


def test_missing_credentials_are_named(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    store = CheckpointStore(
        f"s3://{BUCKET}/x", cache=tmp_path, options={"endpoint_url": s3.endpoint}
    )
    with pytest.raises(CheckpointFailed, match=r"s3://bucket/x.*access is not configured right"):
        store.clean()


def test_a_store_that_is_away_is_waited_for_and_then_named(tmp_path: Path, impatient: None) -> None:
    options = {
        **S3("http://127.0.0.1:9").options,
        "config_kwargs": {"retries": {"max_attempts": 1}},
    }
    store = CheckpointStore(f"s3://{BUCKET}/x", cache=tmp_path, options=options)
    with pytest.raises(CheckpointFailed, match=r"s3://bucket/x.*could not be reached"):
        store.clean()


def test_an_outage_shorter_than_the_patience_costs_only_time(
    s3: S3, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = s3_store(s3, prefix, tmp_path)
    store.clean()
    files = store._place._files  # type: ignore[attr-defined]
    put, failures = files.put_file, iter([ConnectionError("reset"), TimeoutError("slow")])

    def flaky(*arguments: object) -> None:
        for failure in failures:
            raise failure
        put(*arguments)

    monkeypatch.setattr(files, "put_file", flaky)
    store.save(1, writes("a"), b"m")
    assert contents(store, 1) == ("a" * 1000, "a", b"m")


def test_settings_of_the_environment_are_enough(
    s3: S3, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    store = CheckpointStore(f"s3://{BUCKET}/{prefix}", cache=tmp_path)
    store.clean()
    store.save(1, writes("a"), b"m")
    assert contents(store, 1) == ("a" * 1000, "a", b"m")


def test_an_endpoint_that_is_none_is_refused_at_once(s3: S3, tmp_path: Path) -> None:
    options = {**s3.options, "endpoint_url": "nonsense"}
    store = CheckpointStore(f"s3://{BUCKET}/x", cache=tmp_path, options=options)
    with pytest.raises(CheckpointFailed, match=r"s3://bucket/x.*not configured right.*nonsense"):
        store.clean()
