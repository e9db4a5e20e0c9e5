"""`headwater logs import` against a run's own log."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from connectors.config import load
from connectors.files import FileLock
from connectors.kafka.client import Record, read_all
from connectors.kafka.topics import ensure_topics, partition_counts
from connectors.records import decode_as
from connectors.run_dir import RunDir
from connectors.traffic import Call, Feedback, decode_traffic, partition_of
from deploy.cli import main
from deploy.import_log import LOCK
from deploy.log import opened

SAMPLES = Path(__file__).parent.parent / "connectors" / "samples"
CONFIG = '[model]\npath = "m"\n[kafka]\npartitions = 2\n[tasks.support]\nreward = "exact_match"\n'


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    found.path.mkdir()
    found.config_file.write_text(CONFIG)
    return found


def imported(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    code = main(["logs", "import", *map(str, arguments), "--json"])
    assert code == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def written(run_dir: RunDir) -> dict[str, list[Record]]:
    with opened(load(run_dir.config_file), run_dir) as log:
        ensure_topics(log, {"agent-traffic": 2, "feedback": 2})
        return {
            name: read_all(log, log.topic(name), range(2)) for name in ("agent-traffic", "feedback")
        }


def many(path: Path, num: int) -> Path:
    with path.open("w") as file:
        for n in range(num):
            said = [{"role": "user", "content": f"{n} {'x' * 2000}"}]
            file.write(json.dumps({"messages": [*said, {"role": "assistant", "content": "Ho"}]}))
            file.write("\n")
    return path


def test_an_import_writes_calls_and_feedback_to_the_partition_of_their_session(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = imported(capsys, SAMPLES, run_dir.path)
    log = written(run_dir)
    calls = [decode_traffic(record.value) for record in log["agent-traffic"]]
    said = [decode_as(record.value, Feedback) for record in log["feedback"]]
    assert (answer["calls"], answer["feedback"]) == (len(calls), len(said))
    assert answer["written"] == len(calls) + len(said)
    assert {call.task for call in calls if isinstance(call, Call)} == {"support"}
    for records in log.values():
        for record in records:
            assert record.key is not None
            assert record.partition == partition_of(record.key.decode(), 2)
            assert record.headers["writer"] == "import"
    assert answer["skipped"]["duplicate"] == 5  # the samples in CSV say what those in JSON say


def test_an_import_that_is_repeated_adds_nothing_and_one_of_more_adds_the_rest(
    run_dir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = many(tmp_path / "few.jsonl", 5)
    assert imported(capsys, few, run_dir.path)["written"] == 5
    again = imported(capsys, few, run_dir.path)
    assert (again["written"], again["skipped"]) == (0, {"already_imported": 5})
    more = imported(capsys, many(tmp_path / "more.jsonl", 8), run_dir.path)
    assert (more["written"], more["skipped"]) == (3, {"already_imported": 5})
    assert len(written(run_dir)["agent-traffic"]) == 8


def test_an_import_killed_at_any_time_and_repeated_leaves_each_call_once(
    run_dir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = many(tmp_path / "log.jsonl", 8_000)
    with opened(load(run_dir.config_file), run_dir) as log:
        ensure_topics(log, {"agent-traffic": 2, "feedback": 2})
        command = [sys.executable, "-P", "-m", "headwater", "logs", "import", path, run_dir.path]
        for least in (1, 2_500):
            process = subprocess.Popen([*map(str, command), "--task", "support"])
            deadline = time.monotonic() + 120.0
            while len(read_all(log, log.topic("agent-traffic"), range(2))) < least:
                assert process.poll() is None
                assert time.monotonic() < deadline
            process.send_signal(signal.SIGKILL)
            process.wait()
        before = len(read_all(log, log.topic("agent-traffic"), range(2)))
        assert before < 8_000
        answer = imported(capsys, path, run_dir.path)
        assert answer["skipped"]["already_imported"] == before == 8_000 - answer["written"]
        found = read_all(log, log.topic("agent-traffic"), range(2))
    assert set(Counter(record.headers["id"] for record in found).values()) == {1}
    assert len(found) == 8_000


def test_a_dry_run_counts_and_writes_nothing(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = imported(capsys, SAMPLES / "openai.jsonl", run_dir.path, "--dry-run")
    assert answer["classes"] == {"exact": 2, "recomputed": 2, "text": 3}
    assert answer["tasks"] == {"support": 7}
    assert answer["skipped"] == {"failed_call": 1, "tool_unanswered": 1}
    assert answer["examples"]["failed_call"].startswith("openai.jsonl line 8: ")
    assert (answer["format"], answer["files"], answer["read"]) == ("openai", 1, 9)
    assert (answer["written"], answer["rejected"], answer["sessions"]) == (0, 2, 6)
    with opened(load(run_dir.config_file), run_dir) as log:
        assert partition_counts(log) == {}


def test_a_dry_run_says_what_the_run_refuses(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["logs", "import", str(SAMPLES / "openai.jsonl"), str(run_dir.path), "--dry-run"]) == 0
    )
    said = capsys.readouterr().out
    assert "exact: 2 calls" in said
    assert "refused: 3 calls of class text: correction 'tis' reads the log-probs" in said
    assert "without a section [nearline]" in said


def test_a_dry_run_needs_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    answer = imported(capsys, SAMPLES / "sharegpt.jsonl", "--dry-run")
    assert (answer["calls"], answer["refused"], answer["tasks"]) == (2, [], {"": 2})


def test_calls_of_tasks_the_run_has_not_are_left_out(
    run_dir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir.config_file.write_text(CONFIG + '[tasks.other]\nreward = "exact_match"\n')
    answer = imported(capsys, SAMPLES / "messages.jsonl", run_dir.path, "--dry-run")
    assert answer["tasks"] == {"support": 2}
    assert answer["skipped"] == {"no_task": 1, "bad_message": 1}
    row = {"task": "odd", "messages": [{"role": "user", "content": "a"},
                                       {"role": "assistant", "content": "b"}]}  # fmt: skip
    (tmp_path / "odd.jsonl").write_text(json.dumps(row))
    assert (
        main(["logs", "import", str(tmp_path / "odd.jsonl"), str(run_dir.path), "--dry-run"]) == 1
    )
    assert "unknown_task" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["nothing.jsonl", "--dry-run"], 2, "does not exist"),
        (["SAMPLES"], 2, "give the run, or --dry-run"),
        (["SAMPLES", "RUN", "--task", "x"], 2, "is no task of the run; known: support"),
        (["EMPTY", "--dry-run"], 2, "holds no .jsonl"),
        (["SAMPLES", "NEVER_RUN"], 2, "has a log once it was started"),
    ],
)
def test_what_cannot_be_imported_is_one_line(
    run_dir: RunDir,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    line: str,
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "config.toml").write_text(CONFIG + f'[run]\ndir = "{tmp_path}/never"\n')
    named = {"SAMPLES": SAMPLES, "RUN": run_dir.path, "EMPTY": tmp_path / "empty",
             "NEVER_RUN": tmp_path / "config.toml"}  # fmt: skip
    assert main(["logs", "import", *(str(named.get(a, a)) for a in arguments)]) == code
    assert line in capsys.readouterr().err


def test_one_import_at_a_time_writes_into_a_run(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = FileLock(run_dir.path / LOCK)
    assert main(["logs", "import", str(SAMPLES), str(run_dir.path)]) == 3
    assert "imports into" in capsys.readouterr().err
    lock.close()
