"""`headwater log`: every topic readable, by range and condition, printed, answered and exported."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tomli_w

from connectors.arrow import SCHEMA, decode_group
from connectors.kafka.client import Cluster, Producer, read_all
from deploy import errors
from deploy.cli import main
from deploy.log_where import Where
from tests.deploy.command import command
from tests.deploy.written_log import WrittenLog, write_example


@pytest.fixture
def log(cluster: Cluster, tmp_path: Path) -> WrittenLog:
    log = write_example(cluster, tmp_path)
    table = log.config.model_dump(exclude_none=True)
    (tmp_path / "config.toml").write_text(tomli_w.dumps(table))
    return log


class Asked:
    """One call within this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], log: WrittenLog) -> None:
        self._capsys, self._log = capsys, log

    def __call__(self, *arguments: object, code: int = errors.OK) -> tuple[str, str]:
        self._capsys.readouterr()
        assert main(["log", str(self._log.folder), *map(str, arguments)]) == code
        said = self._capsys.readouterr()
        return said.out, said.err

    def lines(self, *arguments: object) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self(*arguments)[0].splitlines()]

    def answer(self, *arguments: object) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self(*arguments, "--json")[0])
        return found


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], log: WrittenLog) -> Asked:
    return Asked(capsys, log)


def test_a_group_is_one_line_a_trajectory_and_a_closed_one_says_why(ask: Asked) -> None:
    lines = ask.lines("trajectories", "--from", "0/0", "--to", "0/1")
    assert [(x["partition"], x["offset"]) for x in lines] == [(0, 0), (0, 0), (0, 1)]
    first, second, closed = lines
    assert second["value"]["trajectory_id"] == first["value"]["group_id"] + "/1"
    assert second["value"]["tokens"] == [0, 1, 2, 3, 4]
    assert second["value"]["segments"] == [{"start": 2, "end": 5, "incarnation": 0, "number": 0}]
    assert (first["value"]["reward"], second["value"]["reward"]) == (0.0, 1.0)
    assert second["value"]["prompt"] == {"task": "sums", "prompt": "say 0"}
    assert closed["headers"]["kind"] == "closed"
    assert closed["value"]["reason"] == "reward_nan"


def test_every_topic_can_be_read_and_a_wrong_name_is_told_the_nearest(
    ask: Asked, log: WrittenLog
) -> None:
    counts = {"prompts": 10, "rollouts": 9, "trajectories": 9, "dead-letters": 0, "policy": 4,
              "steps": 3, "evaluations": 2}  # fmt: skip
    assert {t: len(ask.lines(t)) for t in counts} == counts
    assert [x["value"]["kind"] for x in ask.lines("steps")] == ["begin", "manifest", "manifest"]
    assert ask.lines(log.cluster.topic("steps")) == ask.lines("steps")
    assert "did you mean trajectories?" in ask("trajectorys", code=errors.CONFIGURATION)[1]


def test_ranges_are_offsets_places_and_times_with_both_ends_in(ask: Asked) -> None:
    def places(*arguments: object) -> list[tuple[int, int]]:
        return sorted((x["partition"], x["offset"]) for x in ask.lines("prompts", *arguments))

    assert places("--from", 3) == [(0, 3), (0, 4), (1, 3), (1, 4)]
    assert places("--to", 0) == [(0, 0), (1, 0)]
    assert places("--from", "1/2", "--to", "1/3") == [(1, 2), (1, 3)]
    assert places("--from", 99) == []
    assert places("--from", "2000-01-01") == places()
    assert places("--to", "2000-01-01T00:00:00Z") == []
    middle = ask.lines("prompts", "--from", "1/1", "--to", "1/1")[0]["time"]
    assert set(places("--from", middle)) >= {(1, p) for p in range(1, 5)}
    for wrong in (("--from", "soon"), ("--from", "7/0"), ("--from", 1, "--from", 2)):
        ask("prompts", *wrong, code=errors.CONFIGURATION)


def test_nothing_found_is_said_with_where_the_log_ends_or_which_field_is_meant(
    ask: Asked, log: WrittenLog
) -> None:
    prompts = log.cluster.topic("prompts")
    assert ask("prompts", "--from", "0/99") == (
        "",
        f"headwater: no record is there: {prompts}/0 holds the offsets 0 to 4\n",
    )
    assert "/0 holds none, " in ask("dead-letters")[1]
    assert ask("trajectories", "--where", "reward", ">", 7)[1] == "headwater: no record matches\n"
    for wrong, meant in (("rewrad", "reward"), ("segment.number", "segments.number"),
                         ("header.kind", "headers.kind")):  # fmt: skip
        said = ask("trajectories", "--where", wrong, ">", 0.5, "--where", "offset", ">", -1)[1]
        assert said.splitlines() == [
            f"headwater: none of 9 lines has a field {wrong}; did you mean {meant}?",
            "headwater: no record matches",
        ]
    said = ask("prompts", "--from", "0/3", "--to", "0/2", code=errors.CONFIGURATION)[1]
    assert "--to 2 comes before --from 3 in partition 0" in said
    ask("prompts", "--from", "2026-05-02", "--to", "2026-05-01", code=errors.CONFIGURATION)


def test_conditions_choose_lines(ask: Asked) -> None:
    def ids(*where: object) -> list[str]:
        found = ask.lines("trajectories", "--where", *where)
        return sorted(x["key"][-3:] + "/" + str(x["value"].get("reward")) for x in found)

    assert ids("reward", ">", 0.5) == ["0/0/1.0", "0/2/1.0", "1/0/1.0", "1/1/1.0"]
    assert ids("segments.number", "=", 1, "--where", "reward", "=", 0) == ["0/2/0.0"]
    assert ids("headers.kind", "=", "closed") == ["0/1/None"]
    assert ids("reason", "~", "nan") == ["0/1/None"]
    assert ids("partition", "=", 1, "--where", "offset", "<", 1, "--where", "reward", "!=", 1) == [
        "1/0/0.0"
    ]
    assert ids("no.such", "=", 1) == []
    assert "none of" in ask("steps", "--where", "a", "==", 1, code=errors.CONFIGURATION)[1]
    assert Where.parse("tokens", "~", "3").matches({"value": {"tokens": [1, 3]}})
    assert not Where.parse("key", "<", "3").matches({"key": None})


def test_the_last_lines_are_the_newest_of_all_partitions(ask: Asked) -> None:
    everything = ask.lines("prompts")
    newest = sorted(everything, key=lambda x: (x["time"], x["partition"], x["offset"]))[-3:]
    assert ask.lines("prompts", "--last", 3) == newest
    (last,) = ask.lines("trajectories", "--where", "reward", "=", 1, "--last", 1)
    assert last["key"].endswith("/0/2")


def test_json_is_one_object_with_the_range_and_whole_arrays(ask: Asked) -> None:
    found = ask.answer("trajectories", "--from", "0/0", "--to", "0/1")
    assert found["from"] == {"0": 0}
    assert found["to"] == {"0": 1}
    assert (found["written"], found["file"], found["unreadable"]) == (0, None, [])
    assert found["records"][0]["value"]["tokens"] == [0, 1, 2, 3, 4]


def unreadable(log: WrittenLog) -> None:
    """Beside the example: a damaged group, a record of no known kind, a prompt that is no JSON."""
    record = read_all(log.cluster, log.cluster.topic("trajectories"), [0])[0]
    damaged = record.value[:-40] + b"x" + record.value[-39:]
    log.append("trajectories", 0, damaged, key="damaged", **record.headers)
    log.append("trajectories", 0, b"?", key="foreign", kind="new")
    log.append("prompts", 1, b"{no json")
    log.append("dead-letters", 1, b"\xff\x00", key="x", code="not_json", message="m", origin="o")


def test_an_unreadable_record_is_named_and_not_skipped(ask: Asked, log: WrittenLog) -> None:
    unreadable(log)
    out, said = ask("trajectories", "--where", "reward", ">", 5)
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(x["key"], x["partition"]) for x in lines] == [("damaged", 0), ("foreign", 0)]
    assert "checksum" in lines[0]["unreadable"]
    assert "'new' is neither group nor closed" in lines[1]["unreadable"]
    assert "2 records are unreadable" in said
    found = ask.answer("prompts")
    assert [(x["partition"], x["offset"]) for x in found["unreadable"]] == [(1, 5)]
    (letter,) = ask.lines("dead-letters")
    assert letter["value"] == {"base64": "/wA="}
    assert letter["headers"]["code"] == "not_json"


def test_an_export_to_parquet_has_the_arrow_columns_one_row_a_trajectory(
    ask: Asked, log: WrittenLog, tmp_path: Path
) -> None:
    unreadable(log)
    file = tmp_path / "out.parquet"
    found = ask.answer("trajectories", "--export", file)
    table = pq.read_table(file)
    assert found["written"] == table.num_rows == 11
    assert found["records"] == []
    rows = table.to_pylist()
    assert table.select(SCHEMA.names).schema.types == SCHEMA.types
    assert {row["time"].isoformat(timespec="milliseconds") for row in rows} == {
        line["time"].replace("Z", "+00:00") for line in ask.lines("trajectories")
    }
    for record in read_all(log.cluster, log.cluster.topic("trajectories"), [0, 1]):
        mine = [
            r for r in rows if (r["partition"], r["offset"]) == (record.partition, record.offset)
        ]
        if record.headers["kind"] != "group" or record.key == b"damaged":
            (row,) = mine
            assert row["tokens"] is None
            assert (row["value"] is None) == (record.key in (b"damaged", b"foreign"))
            assert (row["unreadable"] is None) == (record.headers["kind"] == "closed")
            continue
        group = decode_group(record.value)
        assert [r["trajectory_id"] for r in mine] == [t.trajectory_id for t in group.trajectories]
        assert [r["reward"] for r in mine] == [t.reward for t in group.trajectories]
        assert mine[0]["tokens"] == group.trajectories[0].tokens.tolist()
        assert json.loads(mine[0]["prompt"])["task"] == "sums"
        assert dict(mine[0]["headers"]) == record.headers
    ask("trajectories", "--export", file, code=errors.CONFIGURATION)  # it is there already
    kept = tmp_path / "kept.parquet"
    ask("trajectories", "--export", kept, "--where", "reward", ">", 0.5)
    rewards = pq.read_table(kept)["reward"].to_pylist()
    assert [r for r in rewards if r is not None] == [1.0] * 4


def test_nan_is_null_in_both_kinds_of_export(ask: Asked, log: WrittenLog, tmp_path: Path) -> None:
    group = log.group(0, 3, 1)
    nan = float("nan")
    row = dataclasses.replace(
        group.trajectories[0],
        logprobs=np.array([nan, nan, -0.5, -1.0, 0.0], np.float32),
        reward=nan,
        rewards=((2, nan, "a"), (3, 1.0, "b")),
        reward_parts={"x": nan, "y": 2.0},
    )
    at, _ = log.end(0, dataclasses.replace(group, trajectories=(row,)))
    place = ("trajectories", "--from", f"0/{at}")
    ask(*place, "--export", tmp_path / "x.parquet")
    (found,) = pq.read_table(tmp_path / "x.parquet").to_pylist()
    line = ask.lines(*place)[0]["value"]
    assert found["logprobs"] == line["logprobs"] == [None, None, -0.5, -1.0, 0.0]
    assert found["reward"] is line["reward"] is None
    assert dict(found["reward_parts"]) == line["reward_parts"] == {"x": None, "y": 2.0}
    assert found["rewards"] == line["rewards"]
    assert [r["value"] for r in found["rewards"]] == [None, 1.0]


def test_other_topics_export_too_and_a_failed_export_leaves_nothing(
    ask: Asked, log: WrittenLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask.answer("steps", "--export", tmp_path / "steps.parquet")["written"] == 3
    values = pq.read_table(tmp_path / "steps.parquet")["value"].to_pylist()
    assert json.loads(values[1])["step"] == 1
    ask("steps", "--export", tmp_path / "steps.jsonl")
    exported = [json.loads(x) for x in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert exported == ask.lines("steps")
    before = sorted(p.name for p in tmp_path.iterdir())
    for wrong in ("out.csv", "missing/out.jsonl", "steps.jsonl"):
        ask("steps", "--export", tmp_path / wrong, code=errors.CONFIGURATION)
    monkeypatch.setattr("deploy.read_log.decode", _fails)
    ask("steps", "--export", tmp_path / "new.parquet", code=errors.ENVIRONMENT)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def _fails(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_following_goes_on_with_what_is_written_until_it_is_interrupted(log: WrittenLog) -> None:
    process = subprocess.Popen(
        command("log", log.folder, "evaluations", "--follow", "--last", 1),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert json.loads(process.stdout.readline())["value"]["reward"] == 0.5
        log.evaluate(3, 0.75)
        assert json.loads(process.stdout.readline())["value"]["reward"] == 0.75
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
        assert (process.returncode, said) == (0, "")
    finally:
        process.kill()
        process.wait()


def test_a_closed_pipe_is_silent(log: WrittenLog) -> None:
    with closing(Producer(log.cluster)) as producer:
        for _ in range(3000):
            producer.send(log.cluster.topic("prompts"), 0, b'{"prompt": "' + b"x" * 100 + b'"}')
        producer.flush()
    process = subprocess.Popen(
        command("log", log.folder, "prompts"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (process.wait(1), process.stderr.read()) == (0, b"")
    process.stderr.close()
