"""`headwater simulate` as a user calls it, on workloads of a second or two."""

from __future__ import annotations

import json
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from connectors.kafka.client import Reader
from connectors.kafka.terminals import terminal
from connectors.records import Group
from deploy import errors
from deploy.cli import main
from deploy.log import opened
from operators.staleness import PRESETS
from tests.deploy.command import config_text
from tests.small_run import SmallRun
from trainer.step_log import chain, read_steps

PINNED = {
    "name", "parameters", "steps_per_hour", "trained_tokens_per_s", "trainer_wait_share",
    "slot_use", "staleness", "dropped_tokens", "masked_tokens", "cancelled_tokens",
    "trained_length_ratio", "stalled",
}  # fmt: skip


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """Four groups of two a step, up to 64 tokens."""
    file = tmp_path / "small.toml"
    sections = {"trainer": "groups_per_step = 4", "staleness": 'policy = "one-step-off"'}
    file.write_text(config_text("model", **sections))
    return file


def asked(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["simulate", *map(str, arguments), "--json"]) == errors.OK
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["simulate", *map(str, arguments)]) == errors.CONFIGURATION
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


def test_the_json_has_the_pinned_keys(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked(capsys, config_file, "--policy", "sync,n-step-off(n=2)", "--steps", 8)
    assert {"workload", "policies"} <= found.keys()
    assert found["workload"]["batch_size"] == 4
    assert found["workload"]["lengths"]["kind"] == "lognormal"
    first, second = found["policies"]
    for one in (first, second):
        assert one.keys() >= PINNED
        assert one["staleness"].keys() == {"mean", "p99", "max"}
        assert one["stalled"] is None
    assert (first["name"], first["parameters"]) == ("sync", {})
    assert (second["name"], second["parameters"]) == ("n-step-off", {"n": 2})
    assert first["staleness"]["max"] == 0 < second["staleness"]["max"] <= 2
    assert first["steps_per_hour"] < second["steps_per_hour"]


def test_the_same_seed_gives_the_same_and_another_seed_another_run(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once, again, other = (asked(capsys, config_file, "--steps", 5, "--seed", s) for s in (1, 1, 2))
    assert once == again != other


def test_several_seeds_are_averaged(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = [
        asked(capsys, config_file, "--steps", 5, "--seed", seed)["policies"][0] for seed in (3, 4)
    ]
    [both] = asked(capsys, config_file, "--steps", 5, "--seed", 3, "--seeds", 2)["policies"]
    rates = [one["steps_per_hour"] for one in alone]
    assert both["steps_per_hour"] == pytest.approx(sum(rates) / 2)
    assert both["spread"]["steps_per_hour"] == {"least": min(rates), "most": max(rates)}
    assert both["staleness"]["max"] == max(one["staleness"]["max"] for one in alone)
    assert (both["stalled"], both["num_stalled"]) == (None, 0)


def test_without_a_policy_the_configured_one_runs_and_flags_and_set_change_it(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [plain] = asked(capsys, config_file, "--steps", 4)["policies"]
    changed = ["--set", "staleness.policy=n-step-off", "--set", "staleness.lookahead=3"]
    [configured] = asked(capsys, config_file, "--steps", 4, *changed)["policies"]
    [flag] = asked(capsys, config_file, "--steps", 4, *changed, "--bound", 0)["policies"]
    assert plain["name"] == "one-step-off"
    assert [one["parameters"] for one in (configured, flag)] == [{"n": 3}, {"n": 0}]
    assert flag["staleness"]["max"] == 0


def test_a_bound_of_1_is_given_to_the_default_policy(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    default = ["--set", "staleness.policy=deadline"]
    [one] = asked(capsys, config_file, *default, "--bound", 1, "--steps", 4)["policies"]
    assert (one["name"], one["parameters"], one["bound"]) == ("deadline", {"bound": 1}, 1)


def test_the_table_names_each_policy_its_bound_and_what_is_assumed(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = "sync,n-step-off(n=3),skyrl(max_staleness_steps=2)"
    assert main(["simulate", str(config_file), "--policy", policies, "--steps", "6"]) == errors.OK
    said = capsys.readouterr()
    assert said.err == ""
    lines = said.out.splitlines()
    assert lines[0] == "workload small: 6 steps of 4 groups of 2"
    assert lines[1].startswith("assumed: ")
    kept = {name: line for name in policies.split(",") for line in lines if f" {name} " in line}
    assert "<= 0 yes" in kept["sync"]
    assert "<= 3 yes" in kept["n-step-off(n=3)"]
    assert "yes" not in kept["skyrl(max_staleness_steps=2)"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--workload", "none"], "--workload: there is no 'none'; known: standard"),
        (["--workload", "standard", "--set", "a=1"], "--set goes with CONFIG"),
        (["none.toml"], "none.toml: cannot be read"),
        (["--from-run", "none"], "none: does not exist"),
        (["CONFIG", "--policy", "two-step-off"], "unknown staleness policy 'two-step-off'"),
        (["CONFIG", "--policy", "sync(n=1)"], "sync: unknown parameter 'n'"),
        (["CONFIG", "--bound", "3"], "--bound 3: one-step-off has no bound to set"),
        (["CONFIG", "--policy", "openrlhf", "--bound", "0"], "must be an integer of at least 1"),
        (["CONFIG", "--plot", "a.png"], "--plot: a.png: only .svg is drawn, got '.png'"),
        (["CONFIG", "--plot", "none/a.svg"], "there is no folder none"),
        (["CONFIG", "--set", "trainer.groups=1"], "unknown key trainer.groups"),
        (
            ["CONFIG", "--set", "sampling.max_tokens=100000000000000000000000000"],
            "max_tokens: input should be less than or equal to 10000000, got 1000000000",
        ),
        (
            ["CONFIG", "--set", "engine.count=10000", "--set", "engine.max_running=65536"],
            "num_slots must be at most 1000000, got 655360000",
        ),
        (
            ["CONFIG", "--set", "trainer.groups_per_step=1000000"],
            "at most 20000 groups and 1000000 trajectories may be open at once, got 2000000 groups",
        ),
        (
            [
                "CONFIG",
                "--policy",
                "sync",
                "--set",
                "tasks.sums.group_size=65536",
                "--set",
                "trainer.groups_per_step=20",
            ],
            "may be open at once, got 20 groups of 65536 with sync",
        ),
        (["CONFIG", "--policy", "deadline(bound=99999999)"], "bound must be at most 10000, got"),
    ],
)
def test_what_is_refused_is_one_line(
    arguments: list[str], says: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(config_file) if argument == "CONFIG" else argument for argument in arguments]
    assert says in refused(capsys, *given)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["a.toml", "--workload", "standard"],
        ["--workload", "standard", "--steps", "0"],
        ["--workload", "standard", "--bound", "-1"],
        ["--workload", "standard", "--seeds", "0"],
        ["--workload", "standard", "--seeds", "99999999999999999999"],
        ["--workload", "standard", "--steps", "99999999999999999999"],
        ["--workload", "standard", "--bound", "99999999999999999999"],
        ["--workload", "standard", "--lookahead", "99999999999999999999"],
        ["--workload", "standard", "--seed", "99999999999999999999"],
    ],
)
def test_flags_that_cannot_be_are_refused_by_the_parser(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["simulate", *arguments])
    assert end.value.code == errors.CONFIGURATION
    assert "headwater simulate: error: " in capsys.readouterr().err


def test_a_stall_is_reported_with_the_ledger_and_is_exit_code_1(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five prompts in flight straddle two versions: the oldest one never has a whole step."""
    stuck = (
        "nemo-weight-fifo(max_staleness_versions=2,max_inflight_prompts=5,"
        "min_groups_for_streaming_train=4)"
    )
    arguments = ["simulate", str(config_file), "--policy", f"{stuck},sync", "--steps", "30"]
    assert main([*arguments, "--json"]) == errors.FAILED
    first, second = json.loads(capsys.readouterr().out)["policies"]
    assert "0 running, 12 ready" in first["stalled"]
    assert second["stalled"] is None
    assert main(arguments) == errors.FAILED
    said = capsys.readouterr().out
    assert f"{stuck} stalled after" in said
    assert "open step  trains version" in said


def test_a_picture_is_drawn_beside_the_answer(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.svg"
    asked(capsys, config_file, "--policy", "sync,n-step-off(n=2)", "--steps", 5, "--plot", file)
    words = {element.text for element in ElementTree.parse(file).iter()}
    assert {"sync", "n-step-off(n=2)"} <= words


def test_a_folder_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is no run's folder" in refused(capsys, "--from-run", tmp_path)


def test_the_length_ratio_of_what_is_one_token_long_is_1(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--set", "sampling.max_tokens=1", "--policy", "sync", "--steps", 3]
    [one] = asked(capsys, config_file, *short)["policies"]
    assert one["trained_length_ratio"] == 1


@pytest.mark.slow
def test_a_finished_run_is_measured_and_its_policy_simulated(
    tmp_path: Path, tiny_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = SmallRun(tmp_path, tiny_model_path)
    run.run_to_end("--stop-after-steps", 8)
    found = asked(capsys, "--from-run", run.run_dir.path, "--steps", 5, "--policy",
                  "one-step-off,sync", "--plot", tmp_path / "run.svg")  # fmt: skip
    with opened(run.config, run.run_dir) as cluster:
        manifests = chain(read_steps(cluster))
        with closing(Reader(cluster, cluster.topic("trajectories"), {0: 0, 1: 0})) as reader:
            ended = [terminal(record) for record in reader.read_to(reader.ends())]
    rows = [row for group in ended if isinstance(group, Group) for row in group.trajectories]
    tokens = [int(row.loss_mask.sum()) for row in rows]
    assert found["workload"]["lengths"] == {
        "kind": "trace",
        "num": len(tokens),
        "mean": pytest.approx(sum(tokens) / len(tokens)),
        "longest": max(tokens),
    }
    assert (found["workload"]["batch_size"], found["workload"]["group_size"]) == (4, 4)
    timed = [
        (after.finished_at - before.finished_at, after.metrics["seconds/wait"])
        for before, after in pairwise(manifests)
        if before.epoch == after.epoch
    ]
    elapsed_s = sum(took for took, _ in timed)
    measured = found["measured"]
    assert measured["steps_per_hour"] == pytest.approx(3600 * len(timed) / elapsed_s)
    assert measured["trainer_wait_share"] == pytest.approx(sum(w for _, w in timed) / elapsed_s)
    assert measured["staleness"]["max"] <= 1
    trained = [took - wait for took, wait in timed]
    assert min(trained) <= found["workload"]["train_s"] + 1e-9 <= max(trained) + 1e-9
    assert any(note.startswith("measured: ") for note in found["notes"])
    first, second = found["policies"]
    assert (first["name"], second["name"]) == ("one-step-off", "sync")
    assert first["staleness"]["max"] <= 1
    assert second["staleness"]["max"] == 0
    ElementTree.parse(tmp_path / "run.svg")


@pytest.mark.slow
def test_every_preset_can_be_simulated_as_it_is(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those whose parameters have no default get the least that is allowed."""
    given = {"n-step-off": "n-step-off(n=1)"}
    names = [given.get(name, name) for name in PRESETS]
    found = asked(capsys, config_file, "--policy", ",".join(names), "--steps", 8)
    assert [one["name"] for one in found["policies"]] == list(PRESETS)
    for one in found["policies"]:
        assert one["bound"] is None or one["staleness"]["max"] <= one["bound"], one["name"]
