"""The log of a run that is not at work, read by several commands at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from connectors.config import load
from connectors.kafka.client import Cluster
from connectors.kafka.topics import ensure_topics, partition_counts
from connectors.run_dir import RunDir
from deploy.log import is_alive, opened, running_broker
from tests.small_run import until

CONFIG = '[model]\npath = "m"\n[tasks.a]\nreward = "exact_match"\n'
READER = """
import sys
from connectors.config import load
from connectors.kafka.topics import partition_counts
from connectors.run_dir import RunDir
from deploy.log import opened
run_dir = RunDir(sys.argv[1])
with opened(load(run_dir.config_file), run_dir) as log:
    print("reads", flush=True)
    sys.stdin.readline()
    print(partition_counts(log, ["steps"])["steps"], flush=True)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path)
    found.config_file.write_text(CONFIG)
    return found


def reading(run_dir: RunDir) -> subprocess.Popen[str]:
    """Another command that reads, until it is sent a line."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", READER, str(run_dir.path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "reads\n"
    return process


def finish(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate("\n", timeout=60)
    assert process.returncode == 0
    return said


@contextmanager
def here(run_dir: RunDir) -> Iterator[Cluster]:
    with opened(load(run_dir.config_file), run_dir) as log:
        yield log


def broker_pid(run_dir: RunDir) -> int:
    found = running_broker(run_dir)
    assert found is not None
    return found.pid


def test_whoever_started_the_broker_may_end_first(run_dir: RunDir) -> None:
    with here(run_dir) as log:
        ensure_topics(log, {"steps": 3})
    first = reading(run_dir)
    second, pid = reading(run_dir), broker_pid(run_dir)
    assert finish(first) == "3\n"
    assert finish(second) == "3\n"
    until(lambda: not is_alive(pid), "the end of the broker")


def test_whoever_came_second_ends_nobody_s_broker(run_dir: RunDir) -> None:
    with here(run_dir) as log:
        ensure_topics(log, {"steps": 3})
        assert finish(reading(run_dir)) == "3\n"
        pid = broker_pid(run_dir)
        assert partition_counts(log, ["steps"]) == {"steps": 3}
    assert not is_alive(pid), "the last one sees to its end"


def test_a_broker_whose_readers_are_all_killed_ends(run_dir: RunDir) -> None:
    with here(run_dir) as log:
        ensure_topics(log, {"steps": 3})
    first = reading(run_dir)
    second, pid = reading(run_dir), broker_pid(run_dir)
    for process in (first, second):
        process.kill()
        process.wait()
    until(lambda: not is_alive(pid), "the end of the broker")
    with here(run_dir) as log:
        assert partition_counts(log, ["steps"]) == {"steps": 3}
